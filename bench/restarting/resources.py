"""What the processes of a job hold, and whether that grows with the number of restarts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness import processes

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


@dataclass(frozen=True)
class Held:
    """What one process holds."""

    rss_mib: float
    threads: int
    files: int
    sockets: int


Sample = Mapping[tuple[int, int], Held]
"""By pid and start time."""


def sample(pids: Iterable[int] | None = None) -> dict[tuple[int, int], Held]:
    """Look at these processes of the job, or at all of them."""
    wanted = None if pids is None else set(pids)
    found = {}
    for process in processes.descendants():
        if wanted is None or process.pid in wanted:
            try:
                found[process.pid, process.started] = _held(process.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # It has just ended.
    return found


def _held(pid: int) -> Held:
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    return Held(
        rss_mib=resident * PAGE_BYTES / MIB,
        threads=len(os.listdir(f"/proc/{pid}/task")),
        files=len(links),
        sockets=sum(link.startswith("socket:") for link in links),
    )


@dataclass(frozen=True)
class Growth:
    """What a process held late more than early, each as `grown` says."""

    pid: int
    samples: int
    rss_mib: float
    threads: float
    files: float
    sockets: float


def growth(samples: Sequence[Sample], fewest: int) -> list[Growth]:
    """For each process that is in at least so many samples."""
    keys = {key for one in samples for key in one}
    found = []
    for key in sorted(keys):
        held = [one[key] for one in samples if key in one]
        if len(held) >= fewest:
            names = ("rss_mib", "threads", "files", "sockets")
            more = {name: grown([getattr(one, name) for one in held]) for name in names}
            found.append(Growth(key[0], len(held), **more))
    return found


def grown(amounts: Sequence[float]) -> float:
    """Return the median of the last third less that of the second."""
    third = len(amounts) // 3
    return median(amounts[-third:]) - median(amounts[third : 2 * third])
