"""What this user may take: open files, locked memory, and the shared memory that loaders need.

A small /dev/shm is the classic of containers: everything works until a data loader's worker dies of
a bus error. Locked memory only matters to RDMA, whose buffers are pinned.
"""

from __future__ import annotations

import os
import re

from holdfast.health.baseline import Seen
from holdfast.health.finding import Finding, Remark, amount, summed, unknown
from holdfast.health.node import Node
from holdfast.messages.health import Fact

UNLIMITED = 1 << 63


def limit_of(node: Node, name: str) -> int | None:
    """One of the limits of this process; None where it is not told."""
    match = re.search(rf"^{name}\s+(\S+)", node.text("proc/self/limits") or "", re.MULTILINE)
    if match is None:
        return None
    return int(match[1]) if match[1].isdecimal() else UNLIMITED


def check_limits(node: Node, before: Seen | None) -> Finding:
    files, locked = limit_of(node, "Max open files"), limit_of(node, "Max locked memory")
    if files is None or locked is None:
        return unknown("the kernel does not tell this process's limits (proc/self/limits)")
    limits = node.settings.limits
    remarks = []
    if files < limits.open_files:
        remarks.append(
            Remark("warn", f"only {files} files may be open at once: raise it with ulimit -n")
        )
    if locked < limits.locked_bytes and node.names("sys/class/infiniband"):
        text = f"only {amount(locked)} may be locked, RDMA needs more: raise it with ulimit -l"
        remarks.append(Remark("warn", text))
    facts: dict[str, Fact] = {"open_files": files}
    if locked < UNLIMITED:
        facts["locked_bytes"] = locked
    may_lock = "any memory" if locked == UNLIMITED else amount(locked)
    return summed(remarks, f"{files} files may be open, {may_lock} may be locked", facts)


def check_shm(node: Node, before: Seen | None) -> Finding:
    try:
        disk = os.statvfs(node.path("dev/shm"))
    except OSError as error:
        return unknown(f"no shared memory to look at (/dev/shm: {error.strerror})")
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    limits = node.settings.limits
    text = f"{amount(free)} of {amount(size)} free in /dev/shm"
    remarks = []
    if free < limits.shm_bytes:
        remarks.append(Remark("fail", f"only {text}"))
    elif size < limits.shm_size_bytes:
        remarks.append(
            Remark("warn", f"{text}: data loaders may die; give the container --shm-size")
        )
    return summed(remarks, text, {"free_bytes": free, "size_bytes": size})
