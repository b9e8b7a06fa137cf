"""What a job leaves behind, while it runs and after it ended.

While it runs: the processes that live through all the kills (the launcher, a coordinator, an agent)
must not gather file descriptors. After it ended: no process, no shared memory, no socket. A socket
without a path cannot outlive its process, so only socket files are looked for.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import processes
from harness.marks import Seconds

SHARED_MEMORY = Path("/dev/shm")
FD_SLACK = 4
"""What may be open for a moment, such as a standby that is just being started."""


@dataclass(frozen=True)
class Footprint:
    """The open file descriptors of every process of the job that is not a rank."""

    files: dict[tuple[int, int], int]
    """By pid and start time."""
    names: dict[tuple[int, int], str]


def footprint(rank_pids: Iterable[int]) -> Footprint:
    ranks = set(rank_pids)
    files: dict[tuple[int, int], int] = {}
    names: dict[tuple[int, int], str] = {}
    for process in processes.descendants():
        opened = processes.open_files(process.pid)
        if opened is not None and process.pid not in ranks:
            files[process.pid, process.started] = opened
            names[process.pid, process.started] = process.name
    return Footprint(files, names)


def descriptor_growth(samples: list[Footprint]) -> dict[str, int]:
    """For each process that lived through all samples: its fewest open files late less early."""
    if not samples:
        return {}
    third = max(len(samples) // 3, 1)
    early, late = samples[:third], samples[-third:]
    lasting = set.intersection(*(set(sample.files) for sample in samples))
    return {
        f"{samples[0].names[key]} ({key[0]})": min(sample.files[key] for sample in late)
        - min(sample.files[key] for sample in early)
        for key in sorted(lasting)
    }


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY))


def processes_after(own: set[int], grace_s: Seconds = 1.0) -> list[str]:
    """Processes of an ended job still there after a moment's grace. The bench's own are not meant:
    it ends the service itself."""
    deadline = time.monotonic() + grace_s
    while True:
        processes.reap_orphans(own)
        living = [process for process in processes.descendants() if process.pid not in own]
        if not living or time.monotonic() > deadline:
            return [f"{process.name} ({process.pid})" for process in living]
        time.sleep(processes.POLL_S)


def unowned_shared_memory(before: set[str]) -> list[str]:
    """Files that came since `before` and that no process has open or mapped. Others on the machine
    have shared memory too, but theirs is in use."""
    new = shared_memory() - before
    return sorted(new - set(_shared_memory_in_use())) if new else []


def _shared_memory_in_use() -> Iterator[str]:
    prefix = f"{SHARED_MEMORY}/"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            held = [os.readlink(fd) for fd in (entry / "fd").iterdir()]
            held += [
                line.split(maxsplit=5)[-1] for line in (entry / "maps").read_text().splitlines()
            ]
        except OSError:
            continue  # it has just ended, or it is another user's and so not this job's
        yield from (path.removeprefix(prefix) for path in held if path.startswith(prefix))


def socket_files(folder: Path) -> list[str]:
    """Socket files anywhere below a folder."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if stat.S_ISSOCK(path.lstat().st_mode)
    )
