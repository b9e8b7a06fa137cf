"""Memory: how much can still be had before something is killed, and has it erred?

What can be had is the least of what the machine has available and of what is left under each limit
of the groups this process is in. Pages that the kernel only keeps to read files faster count as
free: it gives them up when they are needed.
"""

from __future__ import annotations

from holdfast.health.baseline import MemorySeen, Seen
from holdfast.health.cgroup import own_groups
from holdfast.health.finding import Finding, Remark, amount, counted, summed, unknown
from holdfast.health.limits import limit_of
from holdfast.health.node import Node
from holdfast.messages.health import Fact

_NO_LIMIT = 1 << 60
"""Version 1 of the groups has no word for "none"; it says a number of about that size."""


def check_memory(node: Node, before: Seen | None) -> Finding:
    machine = node.fields("proc/meminfo")
    total, available = machine.get("MemTotal"), machine.get("MemAvailable")
    if not total or available is None:
        return unknown("the kernel does not say how much memory there is (proc/meminfo)")
    limits = node.settings.limits
    where = "this machine"
    for group in own_groups(node, "memory"):
        room = _room(node, group)
        if room is not None and room[1] < available:
            total, available, where = min(total, room[0]), room[1], f"control group {group}"
    remarks = []
    text = f"{amount(available)} of {amount(total)} memory left for {where}"
    if available < limits.memory_bytes:
        remarks.append(Remark("fail", f"only {text}"))
    elif available < limits.memory_share * total:
        remarks.append(Remark("warn", f"only {text}"))
    addresses = limit_of(node, "Max address space")
    if addresses is not None and addresses < machine["MemTotal"]:
        remarks.append(Remark("warn", f"ulimit -v allows {amount(addresses)} of addresses only"))
    errors = _uncorrected(node)
    remarks += _errors(errors, before)
    facts: dict[str, Fact] = {"available_bytes": available, "total_bytes": total}
    if errors is not None:
        facts["uncorrected_errors"] = errors
    return summed(remarks, text, facts, None if errors is None else MemorySeen(errors))


def _room(node: Node, group: str) -> tuple[int, int] | None:
    """A group's limit and how much of it is left; None where it has no limit."""
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
    """Errors that the machine's memory could not correct since it was started."""
    base = "sys/devices/system/edac/mc"
    counts = [node.number(f"{base}/{name}/ue_count") for name in node.names(base)]
    told = [count for count in counts if count is not None]
    return sum(told) if told else None


def _errors(count: int | None, before: Seen | None) -> list[Remark]:
    if not count:
        return []
    known = before.uncorrected if isinstance(before, MemorySeen) else count
    word = "uncorrected memory error"
    if count > known:
        return [Remark("fail", f"{counted(count - known, word)} since the last look")]
    return [Remark("warn", f"{counted(count, word)} since the machine was started")]
