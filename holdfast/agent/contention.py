"""Reads how long the kernel kept processes that wanted to run from a CPU.

There are three ways not to get one, and the kernel counts each elsewhere:

    queued      another thread had it: /proc/PID/task/TID/schedstat, for each thread
    throttled   the cgroup's quota (cpu.max, or cpu.cfs_quota_us) was used up: cpu.stat
    stolen      another virtual machine had it: the field "steal" in /proc/stat

All counters only grow; two readings and the time between them tell what was lost. What the kernel does
not count, or shows to nobody, reads as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from holdfast import proc
from holdfast.messages.timings import CpuShortage

ROOT: Final = Path("/")
_USER, _IDLE, _IOWAIT, _STEAL = 0, 3, 4, 7
"""Fields of the line "cpu" in /proc/stat."""


class ThreadTime(NamedTuple):
    """What a thread had of the CPUs since it began."""

    ran_s: float
    queued_s: float


class CpuTicks(NamedTuple):
    """What all CPUs did since the machine started, in clock ticks."""

    wanted: int = 0
    """Busy, or stolen while something wanted to run."""
    stolen: int = 0


class Quota(NamedTuple):
    """How often a cgroup used up its quota since it began."""

    periods: int = 0
    """Periods in which something ran."""
    throttled: int = 0
    """Periods in which the quota was used up."""
    throttled_s: float = 0.0
    """Time that its threads were throttled, summed over CPUs."""


class Reading(NamedTuple):
    """All counters that concern one process, at one moment."""

    at: float
    threads: Mapping[int, ThreadTime]
    ticks: CpuTicks = CpuTicks()
    quotas: Mapping[Path, Quota] = {}


def read(pid: int, now: float, root: Path = ROOT) -> Reading:
    """Read the counters of a process, its cgroups and the machine."""
    return Reading(now, thread_times(pid), cpu_ticks(root), quotas(pid, root))


def shortage(before: Reading, after: Reading) -> CpuShortage:
    """Return the time that the thread that waited longest had no CPU between two readings."""
    took_s = after.at - before.at
    if took_s <= 0:
        return CpuShortage()
    ran_s = queued_s = 0.0
    for thread, (ran, queued) in after.threads.items():
        if (known := before.threads.get(thread)) is not None:
            ran_s = max(ran_s, ran - known.ran_s)
            queued_s = max(queued_s, queued - known.queued_s)
    wanted = after.ticks.wanted - before.ticks.wanted
    stolen = (after.ticks.stolen - before.ticks.stolen) / wanted if wanted > 0 else 0.0
    throttled_s = max(
        (
            _throttled_s(before.quotas[g], q, took_s)
            for g, q in after.quotas.items()
            if g in before.quotas
        ),
        default=0.0,
    )
    return CpuShortage(
        queued_s=min(queued_s, took_s),
        throttled_s=throttled_s,
        stolen_s=min(1.0, max(0.0, stolen)) * min(ran_s, took_s),
    )


def _throttled_s(before: Quota, after: Quota, took_s: float) -> float:
    """Return how long one thread was throttled, at most: the kernel adds up the time of all CPUs."""
    periods = after.periods - before.periods
    if periods <= 0:
        return 0.0
    share = min(1.0, (after.throttled - before.throttled) / periods)
    return max(0.0, min(after.throttled_s - before.throttled_s, share * took_s))


def thread_times(pid: int) -> dict[int, ThreadTime]:
    """Return what each thread of a process had of the CPUs."""
    found = {thread: proc.cpu_time(pid, thread) for thread in proc.threads(pid)}
    return {thread: ThreadTime(*(ns / 1e9 for ns in times)) for thread, times in found.items()}


def cpu_ticks(root: Path = ROOT) -> CpuTicks:
    """Return what all CPUs did so far."""
    name, *words = _text(f"{root}/proc/stat").partition("\n")[0].split()[: _STEAL + 2] or [""]
    if name != "cpu" or len(words) <= _STEAL:
        return CpuTicks()
    ticks = [int(word) for word in words[: _STEAL + 1]]
    return CpuTicks(sum(ticks[_USER:]) - ticks[_IDLE] - ticks[_IOWAIT], ticks[_STEAL])


def quotas(pid: int, root: Path = ROOT) -> dict[Path, Quota]:
    """Return the quotas of a process's cgroups, of version 1 or 2: each level may have one."""
    found = {}
    for folder in _cgroups(pid, root):
        counts = dict(line.split()[:2] for line in _text(f"{folder}/cpu.stat").splitlines())
        if "nr_periods" in counts:
            usec, nsec = counts.get("throttled_usec", "0"), counts.get("throttled_time", "0")
            throttled_s = int(usec) / 1e6 + int(nsec) / 1e9
            found[folder] = Quota(
                int(counts["nr_periods"]), int(counts.get("nr_throttled", "0")), throttled_s
            )
    return found


def _cgroups(pid: int, root: Path) -> list[Path]:
    """List the cgroups that may limit the CPU time of a process.

    In a container the path that the kernel names may not be visible; then the mounted one is ours.
    """
    found = []
    top = root / "sys/fs/cgroup"
    for line in _text(f"{root}/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = top / controllers if controllers else top
        if controllers and not mounted.is_dir():
            mounted = top / "cpu"
        inner = Path(path.strip("/"))
        levels = [] if ".." in inner.parts else [inner, *inner.parents]
        found += [mounted / level for level in levels or [Path()]]
    return list(dict.fromkeys(found))


def _text(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""
