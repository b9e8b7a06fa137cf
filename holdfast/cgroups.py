"""A memory cgroup for one process, so that it can run out of memory alone.

When a process in a cgroup with a limit takes more, the kernel kills a process of that cgroup; with
nobody else in it, nobody else is in danger. Making one takes the right to write to our own cgroup,
which root has and most containers do not give.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

PREFIX: Final = "holdfast-oom-"


def enter(limit_bytes: int) -> bool:
    """Put this process into a box of its own; False when there can be none."""
    box = _made(str(os.getpid()))
    if box is None:
        return False
    try:
        (_limit_file(box)).write_text(str(limit_bytes))
        swap = box / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")
        (box / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        remove(os.getpid())
        return False
    return True


def possible() -> bool:
    """Whether a process here could have one."""
    name = f"probe-{os.getpid()}"
    box = _made(name)
    if box is not None:
        _remove(box)
    return box is not None


def remove(pid: int) -> None:
    """Take away the box of a process that is gone."""
    parent = _own_cgroup()
    if parent is not None:
        _remove(parent / f"{PREFIX}{pid}")


def _made(name: str) -> Path | None:
    parent = _own_cgroup()
    if parent is None:
        return None
    box = parent / f"{PREFIX}{name}"
    try:
        box.mkdir()
    except OSError:
        return None
    if _limit_file(box).exists():
        return box
    _remove(box)
    return None


def _remove(box: Path) -> None:
    try:
        box.rmdir()
    except OSError:
        pass  # It is not there, or not empty: a cgroup goes with its last process at the latest.


def _limit_file(box: Path) -> Path:
    newer = box / "memory.max"
    return newer if newer.exists() else box / "memory.limit_in_bytes"


def _own_cgroup(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The directory of our memory cgroup."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return cgroups / "memory" / path.lstrip("/")
    unified = [line.split(":", 2)[2] for line in lines if line.startswith("0::")]
    return cgroups / unified[0].lstrip("/") if unified else None
