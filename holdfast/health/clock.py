"""Checks the clock: does a time service synchronise it, and was it set?

Nothing in Holdfast depends on clocks that agree, but logs, certificates and file systems do. The kernel
knows whether a time service steers its clock; if it was not told, a service may still do so (chrony
only tells the kernel if configured to), so that is unknown rather than wrong.
"""

from __future__ import annotations

import ctypes
import time

from msgspec import Struct

from holdfast.health.baseline import ClockSeen
from holdfast.health.judgement import Judgement, Remark, summed
from holdfast.health.node import Node
from holdfast.health.settings import HealthLimits
from holdfast.messages.health import Fact

_UNSYNCHRONISED = 0x40
_TIMESYNCD = "run/systemd/timesync/synchronized"
"""A file that systemd's time service creates once the clock is right."""


class Steering(Struct, frozen=True):
    """What the kernel knows about its clock."""

    synchronised: bool
    error_s: float
    """Largest error, as the time service estimates it."""


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("max_error_us", ctypes.c_long),
        ("estimated_error_us", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def check_clock(node: Node, known: ClockSeen | None) -> Judgement:
    steering = _steering() if node.is_real else None
    seen = ClockSeen(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
    told = node.path(_TIMESYNCD).exists()
    return judge_clock(steering, told, known, seen, node.settings.limits)


def _steering() -> Steering | None:
    """Ask the kernel without changing anything; None if it does not answer."""
    timex = _Timex()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) < 0:
        return None
    return Steering(not timex.status & _UNSYNCHRONISED, timex.max_error_us / 1e6)


def judge_clock(
    steering: Steering | None,
    told: bool,
    known: ClockSeen | None,
    seen: ClockSeen,
    limits: HealthLimits,
) -> Judgement:
    remarks = []
    facts: dict[str, Fact] = {}
    fine = "the clock is synchronised"
    if steering is not None and steering.synchronised:
        fine += f", to {steering.error_s:.3f} s"
        facts["max_error_s"] = steering.error_s
        if steering.error_s > limits.clock_error_s:
            remarks.append(Remark("warn", f"the clock may be off by {steering.error_s:.1f} s"))
    elif not told:
        remarks.append(Remark("unknown", "no time service reports that it synchronises the clock"))
    step = seen.wall_minus_boot_s - known.wall_minus_boot_s if known else 0.0
    if abs(step) > limits.clock_step_s:
        remarks.append(Remark("warn", f"the clock was set by {step:+.1f} s since the last look"))
    return summed(remarks, fine, facts, seen)
