"""Reads and creates cgroups: whether the kernel ran out of memory, a limit for one process, and whether
one is frozen.

A process that the kernel's out-of-memory (OOM) killer killed looks like any other that got SIGKILL;
only the kernel's counters tell. The counter of our own cgroup comes first, because it counts no other
job's processes, together with those of the cgroups that were created within it.

When a process in a cgroup with a limit exceeds it, the kernel kills a process of that cgroup; if it is
alone in there, no other process is in danger. Creating one takes the right to write to our own
cgroup, which root has and most containers do not give.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

PREFIX: Final = "holdfast-oom-"
PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")


def kill_count(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return how many processes the OOM killer has killed so far, as far as can be seen from here."""
    own = _own_cgroups(proc, cgroups)
    files = [cgroup / name for cgroup in own for name in ("memory.events", "memory.oom_control")]
    for path in [*files, proc / "vmstat"]:
        count = _kills(path)
        if count is not None:
            inner = path.parent.glob(f"{PREFIX}*/{path.name}")
            return count + sum(_kills(other) or 0 for other in inner)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _kills(path: Path) -> int | None:
    lines = _text(path).splitlines()
    counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return counts[0] if counts else None


def is_frozen(pid: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> bool:
    """Return whether a process is frozen by its cgroup, as far as can be seen from here."""
    try:
        lines = [line.split(":", 2) for line in (proc / f"{pid}/cgroup").read_text().splitlines()]
    except OSError:
        return False
    for _, controllers, path in lines:
        inner = path.lstrip("/")
        if "freezer" in controllers.split(","):
            if _text(cgroups / "freezer" / inner / "freezer.state").strip() == "FROZEN":
                return True
        elif not controllers:
            roots = (cgroups, cgroups / "unified")
            if any("frozen 1" in _text(root / inner / "cgroup.events") for root in roots):
                return True
    return False


def memory_left(proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[int, int]:
    """Return how much memory this process's cgroups and its machine leave, and the tightest limit.

    Cached files count as left, because the kernel drops them when memory is needed. (0, 0) if it cannot
    be read.
    """
    found = []
    machine = dict(line.split(":", 1) for line in _text(proc / "meminfo").splitlines())
    if "MemAvailable" in machine:
        available, total = (int(machine[k].split()[0]) << 10 for k in ("MemAvailable", "MemTotal"))
        found.append((available, total))
    for cgroup in _own_cgroups(proc, cgroups):
        for inner in (cgroup, *cgroup.parents):
            limit, used = _text(_limit_file(inner)).strip(), _used_bytes(inner)
            if limit.isdigit() and used is not None and (not found or int(limit) < found[0][1]):
                found.append((max(0, int(limit) - used), int(limit)))
            if inner == cgroups:
                break
    return min(found, default=(0, 0))


def _used_bytes(cgroup: Path) -> int | None:
    newer = cgroup / "memory.current"
    used = _text(newer if newer.exists() else cgroup / "memory.usage_in_bytes").strip()
    stat = dict(line.split(" ", 1) for line in _text(cgroup / "memory.stat").splitlines())
    cached = int(stat.get("inactive_file", stat.get("total_inactive_file", "0")))
    return max(0, int(used) - cached) if used.isdigit() else None


def enter(limit_bytes: int) -> bool:
    """Put this process into a cgroup of its own with that limit; False if none can be created."""
    created = _create(str(os.getpid()))
    if created is None:
        return False
    try:
        _limit_file(created).write_text(str(limit_bytes))
        swap = created / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")
        (created / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        _remove(created)
        return False
    return True


def possible() -> bool:
    """Whether a process here can have a cgroup of its own."""
    created = _create(f"probe-{os.getpid()}")
    if created is not None:
        _remove(created)
    return created is not None


def remove(pid: int) -> None:
    """Remove the cgroup of a process that is gone, if it had one."""
    for cgroup in _own_cgroups()[:1]:
        _remove(cgroup / f"{PREFIX}{pid}")


def _create(name: str) -> Path | None:
    for cgroup in _own_cgroups()[:1]:
        path = cgroup / f"{PREFIX}{name}"
        try:
            path.mkdir()
        except OSError:
            return None
        if _limit_file(path).exists():
            return path
        _remove(path)
    return None


def _remove(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        pass  # It does not exist, or is not empty: a cgroup ends with its last process at the latest.


def _limit_file(cgroup: Path) -> Path:
    newer = cgroup / "memory.max"
    return newer if newer.exists() else cgroup / "memory.limit_in_bytes"


def _own_cgroups(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Path]:
    """Return the directories of our memory cgroups: that of version 1, if there is one, then of 2."""
    try:
        lines = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    older = [cgroups / "memory" / p.lstrip("/") for _, c, p in lines if "memory" in c.split(",")]
    return older + [cgroups / path.lstrip("/") for _, controllers, path in lines if not controllers]
