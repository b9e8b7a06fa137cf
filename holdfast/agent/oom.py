"""Whether the kernel's out-of-memory killer was at work.

A process it killed looks like any other that got SIGKILL; only the kernel's counters tell. The one of
our own memory cgroup is asked first, because it counts nobody else's processes; with it those that were
made within it for one process alone.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.cgroups import PREFIX


def kill_count(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes it has killed so far, as far as can be seen from here."""
    for path in [*_cgroup_files(proc, cgroups), proc / "vmstat"]:
        try:
            text = path.read_text()
        except OSError:
            continue
        count = _kills(text)
        if count is not None:
            boxes = path.parent.glob(f"{PREFIX}*/{path.name}")
            return count + sum(_kills(box.read_text()) or 0 for box in boxes)
    return 0


def _kills(text: str) -> int | None:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None


def _cgroup_files(proc: Path, cgroups: Path) -> list[Path]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files.append(cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    return files
