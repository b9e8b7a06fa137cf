"""Checks memory: how much is left before a process is killed, has it erred, and what may be used?

What is left is the least of the machine's available memory and of the remainder under each limit of
this process's cgroups. Pages that the kernel only caches for files count as free: it gives them up on
demand.

A small /dev/shm is typical of containers: everything works until a data loader's worker dies of a bus
error. Locked memory only matters to RDMA, whose buffers are pinned.
"""

from __future__ import annotations

import os
import re

from holdfast.health.baseline import MemorySeen
from holdfast.health.judgement import Judgement, Remark, amount, counted, summed, unknown
from holdfast.health.node import Node
from holdfast.messages.health import Fact

UNLIMITED = 1 << 63
_NO_LIMIT = 1 << 60
"""Version 1 of cgroups has no word for "none"; it shows a number of about that size."""


def check_memory(node: Node, before: MemorySeen | None) -> Judgement:
    machine = node.fields("proc/meminfo")
    total, available = machine.get("MemTotal"), machine.get("MemAvailable")
    if not total or available is None:
        return unknown("the kernel does not show how much memory there is (proc/meminfo)")
    limits, where = node.settings.limits, "this machine"
    for group in node.cgroups("memory"):
        room = _room(node, group)
        if room is not None and room[1] < available:
            total, available, where = min(total, room[0]), room[1], f"cgroup {group}"
    remarks = []
    text = f"{amount(available)} of {amount(total)} memory left for {where}"
    if available < limits.memory_bytes:
        remarks.append(Remark("fail", f"only {text}"))
    elif available < limits.memory_share * total:
        remarks.append(Remark("warn", f"only {text}"))
    addresses = limit_of(node, "Max address space")
    if addresses is not None and addresses < machine["MemTotal"]:
        remarks.append(Remark("warn", f"ulimit -v allows only {amount(addresses)} of addresses"))
    errors = _uncorrected(node)
    remarks += _errors(errors, before)
    facts: dict[str, Fact] = {"available_bytes": available, "total_bytes": total}
    if errors is not None:
        facts["uncorrected_errors"] = errors
    return summed(remarks, text, facts, None if errors is None else MemorySeen(errors))


def _room(node: Node, group: str) -> tuple[int, int] | None:
    """Return a cgroup's limit and how much of it is left; None if it has no limit."""
    cache = node.fields(f"{group}/memory.stat")
    for limit_file, usage_file, cache_field in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = node.number(f"{group}/{limit_file}"), node.number(f"{group}/{usage_file}")
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            return limit, max(0, limit - usage + cache.get(cache_field, 0))
    return None


def _uncorrected(node: Node) -> int | None:
    """Count the uncorrected memory errors since boot."""
    base = "sys/devices/system/edac/mc"
    counts = [node.number(f"{base}/{name}/ue_count") for name in node.names(base)]
    told = [count for count in counts if count is not None]
    return sum(told) if told else None


def _errors(count: int | None, before: MemorySeen | None) -> list[Remark]:
    if not count:
        return []
    known, word = before.uncorrected if before else count, "uncorrected memory error"
    if count > known:
        return [Remark("fail", f"{counted(count - known, word)} since the last look")]
    return [Remark("warn", f"{counted(count, word)} since boot")]


def limit_of(node: Node, name: str) -> int | None:
    """Return one of the limits of this process; None if it is unknown."""
    match = re.search(rf"^{name}\s+(\S+)", node.text("proc/self/limits") or "", re.MULTILINE)
    if match is None:
        return None
    return int(match[1]) if match[1].isdecimal() else UNLIMITED


def check_limits(node: Node, before: None) -> Judgement:
    files, locked = limit_of(node, "Max open files"), limit_of(node, "Max locked memory")
    if files is None or locked is None:
        return unknown("the kernel does not show this process's limits (proc/self/limits)")
    limits, remarks = node.settings.limits, []
    if files < limits.open_files:
        remarks.append(Remark("warn", f"only {files} files may be open at once: use ulimit -n"))
    if locked < limits.locked_bytes and node.names("sys/class/infiniband"):
        text = f"only {amount(locked)} may be locked, RDMA needs more: use ulimit -l"
        remarks.append(Remark("warn", text))
    facts: dict[str, Fact] = {"open_files": files}
    if locked < UNLIMITED:
        facts["locked_bytes"] = locked
    may_lock = "any memory" if locked == UNLIMITED else amount(locked)
    return summed(remarks, f"{files} files may be open, {may_lock} may be locked", facts)


def check_shm(node: Node, before: None) -> Judgement:
    try:
        disk = os.statvfs(node.path("dev/shm"))
    except OSError as error:
        return unknown(f"no shared memory to check (/dev/shm: {error.strerror})")
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    limits, remarks = node.settings.limits, []
    text = f"{amount(free)} of {amount(size)} free in /dev/shm"
    if free < limits.shm_bytes:
        remarks.append(Remark("fail", f"only {text}"))
    elif size < limits.shm_size_bytes:
        hint = "data loaders may die; give the container --shm-size"
        remarks.append(Remark("warn", f"{text}: {hint}"))
    return summed(remarks, text, {"free_bytes": free, "size_bytes": size})
