"""Processors: are all cores there and ours to use, how loaded are they, are they slowed down?

Only a core that was there and is gone fails a node. A busy or a slowed one is slow, not broken, and
cores may be off on purpose (as the second thread of each core often is): those are warnings at most.
"""

from __future__ import annotations

from holdfast.health.baseline import CpuSeen, Seen
from holdfast.health.cgroup import own_groups
from holdfast.health.finding import Finding, Remark, counted, summed, unknown
from holdfast.health.node import Node, number_set
from holdfast.messages.health import Fact

_CPU = "sys/devices/system/cpu"


def check_cpu(node: Node, before: Seen | None) -> Finding:
    online = node.numbers(f"{_CPU}/online")
    if not online:
        return unknown(f"the kernel does not say which cores there are ({_CPU}/online)")
    known = before if isinstance(before, CpuSeen) else None
    usable = online & (_allowed(node) or online)
    throttles, slow = _throttles(node, online), _slow(node, online)
    load = _load(node)
    limits = node.settings.limits
    remarks = _missing(node, online, known)
    if len(usable) == 1 < len(online):
        remarks.append(Remark("warn", f"this process may use 1 of {len(online)} cores: unbind it"))
    if load is not None and load > limits.load_per_core * len(usable):
        remarks.append(Remark("warn", f"load {load:.0f} on {len(usable)} usable cores"))
    if known is not None and throttles > known.throttles:
        times = counted(throttles - known.throttles, "time")
        remarks.append(Remark("warn", f"cores got too hot {times} since the last look"))
    if slow:
        share = limits.frequency_share
        remarks.append(
            Remark("warn", f"{slow} cores are held below {share:.0%} of their frequency")
        )
    facts: dict[str, Fact] = {"cores": len(online), "usable": len(usable), "throttles": throttles}
    if load is not None:
        facts["load_1m"] = load
    if (quota := _quota(node)) is not None:
        facts["quota_cores"] = quota
    fine = f"{len(usable)} of {len(online)} cores usable" + (f", load {load:.1f}" if load else "")
    ever = tuple(sorted(online | set(known.online if known else ())))
    return summed(remarks, fine, facts, CpuSeen(ever, throttles))


def _allowed(node: Node) -> set[int] | None:
    """The cores that this process may run on."""
    for line in (node.text("proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            return number_set(value)
    return None


def _missing(node: Node, online: set[int], known: CpuSeen | None) -> list[Remark]:
    gone = sorted(set(known.online) - online) if known else []
    if gone:
        return [Remark("fail", f"cores {_listed(gone)} were there at an earlier look and are gone")]
    off = (node.numbers(f"{_CPU}/present") or online) - online
    if off and node.text(f"{_CPU}/smt/control") not in ("off", "forceoff"):
        return [Remark("warn", f"cores {_listed(sorted(off))} are switched off")]
    return []


def _listed(cores: list[int]) -> str:
    return ", ".join(map(str, cores[:8])) + (f" and {len(cores) - 8} more" if cores[8:] else "")


def _load(node: Node) -> float | None:
    try:
        return float((node.text("proc/loadavg") or "").split()[0])
    except (IndexError, ValueError):
        return None


def _throttles(node: Node, online: set[int]) -> int:
    """How often cores were slowed down because they got too hot."""
    names = (f"{_CPU}/cpu{core}/thermal_throttle/core_throttle_count" for core in online)
    return sum(node.number(name) or 0 for name in names)


def _slow(node: Node, online: set[int]) -> int:
    """How many cores may run at a small part only of the frequency they are made for."""
    slow = 0
    for core in online:
        could = node.number(f"{_CPU}/cpu{core}/cpufreq/cpuinfo_max_freq")
        may = node.number(f"{_CPU}/cpu{core}/cpufreq/scaling_max_freq")
        if could and may is not None and may < node.settings.limits.frequency_share * could:
            slow += 1
    return slow


def _quota(node: Node) -> float | None:
    """How many cores' worth of time our control groups let us have; None: all."""
    quotas = []
    for group in own_groups(node, "cpu"):
        words = (node.text(f"{group}/cpu.max") or "").split()
        if not words:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [node.text(f"{group}/{name}") or "" for name in names]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)
