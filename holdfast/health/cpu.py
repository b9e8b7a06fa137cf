"""Checks the processors: are all cores present and usable, are they slow, do they compute correctly?

Only a core that disappeared or computes wrongly fails a node. A busy or throttled core is slow, not
broken, a container may have a quota, and cores may be off on purpose (as the second thread of each core
often is): those are warnings at most.

Rarely, but at the scale of a cluster surely, a core gets a sum wrong and reports nothing. So each core
gets the same small piece of work with a known result: a chaotic sequence in floating point, a sequence
of multiplications, and a digest of every number in them, so that no wrong bit is lost on the way. It
takes a few milliseconds of each core, and at most two seconds in all.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Mapping

from holdfast.health.baseline import CpuSeen
from holdfast.health.judgement import Judgement, Remark, counted, summed, unknown
from holdfast.health.node import Node, number_set
from holdfast.messages.health import Fact

_CPU = "sys/devices/system/cpu"


def check_cpu(node: Node, known: CpuSeen | None) -> Judgement:
    online = node.numbers(f"{_CPU}/online")
    if not online:
        return unknown(f"the kernel does not list the cores ({_CPU}/online)")
    usable = online & (_allowed(node) or online)
    names = (f"{_CPU}/cpu{core}/thermal_throttle/core_throttle_count" for core in online)
    throttles = sum(node.number(name) or 0 for name in names)
    slow, load, limits = _slow(node, online), _load(node), node.settings.limits
    remarks = _missing(node, online, known)
    if len(usable) == 1 < len(online):
        remarks.append(Remark("warn", f"this process may use 1 of {len(online)} cores: unbind it"))
    if load is not None and load > limits.load_per_core * len(usable):
        remarks.append(Remark("warn", f"load {load:.0f} on {len(usable)} usable cores"))
    if known is not None and throttles > known.throttles:
        times = counted(throttles - known.throttles, "time")
        remarks.append(Remark("warn", f"cores got too hot {times} since the last look"))
    if slow:
        below = f"below {limits.frequency_share:.0%} of their frequency"
        remarks.append(Remark("warn", f"{slow} cores are held {below}"))
    facts: dict[str, Fact] = {"cores": len(online), "usable": len(usable), "throttles": throttles}
    if load is not None:
        facts["load_1m"] = load
    if (quota := _quota(node)) is not None:
        facts["quota_cores"] = quota
        if quota < len(usable):
            may = f"the container may use {quota:.3g} of {len(online)} CPUs"
            remarks.append(
                Remark("warn", f"{may}: its cgroup has a quota, beyond which it is throttled")
            )
    fine = f"{len(usable)} of {len(online)} cores usable" + (f", load {load:.1f}" if load else "")
    ever = tuple(sorted(online | set(known.online if known else ())))
    return summed(remarks, fine, facts, CpuSeen(ever, throttles))


def _allowed(node: Node) -> set[int] | None:
    """Return the cores that this process may run on."""
    for line in node.lines("proc/self/status"):
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


def _slow(node: Node, online: set[int]) -> int:
    """Count the cores that may run only at a small part of their maximal frequency."""
    slow = 0
    for core in online:
        could = node.number(f"{_CPU}/cpu{core}/cpufreq/cpuinfo_max_freq")
        may = node.number(f"{_CPU}/cpu{core}/cpufreq/scaling_max_freq")
        if could and may is not None and may < node.settings.limits.frequency_share * could:
            slow += 1
    return slow


def _quota(node: Node) -> float | None:
    """Return how many cores' worth of time our cgroups allow; None: all."""
    quotas = []
    for group in node.cgroups("cpu"):
        words = (node.text(f"{group}/cpu.max") or "").split()
        if not words:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [node.text(f"{group}/{name}") or "" for name in names]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


# ---- computing ----------------------------------------------------------------------------------

KNOWN = "3a2972a309fd46fdac8ed0a0f878975b"
"""Result of `work` on every machine that computes according to IEEE 754."""

STEPS = 1000
ROUNDS = 4
BUDGET_S = 2.0


def work(x: float = 0.4) -> str:
    n = 1
    fractions, numbers = [], []
    for _ in range(STEPS):
        x = 3.99 * x * (1.0 - x)
        n = (n * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        fractions.append(x)
        numbers.append(n)
    content = struct.pack(f"<{STEPS}d{STEPS}Q", *fractions, *numbers)
    return hashlib.sha512(content * 8).hexdigest()[:32]


def check_compute(node: Node, before: None) -> Judgement:
    """Test the cores of the machine we run on, whatever the root."""
    cores = os.sched_getaffinity(0)
    begun = time.monotonic()
    results: dict[int, set[str]] = {}
    try:
        for core in sorted(cores):
            if time.monotonic() - begun > BUDGET_S:
                break
            try:
                os.sched_setaffinity(0, {core})
            except OSError:
                continue  # It was switched off just now; the check of cores reports that.
            results[core] = {work() for _ in range(ROUNDS)}
    finally:
        os.sched_setaffinity(0, cores)
    return judge_results(results, len(cores))


def judge_results(results: Mapping[int, set[str]], cores: int) -> Judgement:
    """Judge the results: a core is wrong if its result is not the known one, unless all agree."""
    got = set().union(*results.values())
    wrong = [core for core, values in results.items() if values != {KNOWN}]
    if not results:
        return unknown("no core could be tested")
    if wrong and len(got) == 1:
        return unknown(f"all {len(results)} cores agree, but on another result than is known")
    remarks = [Remark("fail", f"core {core} computes wrong results") for core in wrong[:8]]
    fine = f"{len(results)} of {cores} cores computed the known result"
    return summed(remarks, fine, {"tested": len(results), "wrong": len(wrong)})
