"""The clock: does somebody keep it right, and did somebody set it?

Nothing of ours depends on clocks that agree, but logs, certificates and file systems do. The kernel
knows whether a time service steers its clock; where it was not told, the service may still do so
(chrony only tells when asked to), so that is unknown rather than wrong.
"""

from __future__ import annotations

import ctypes
import time

from msgspec import Struct

from holdfast.health.baseline import ClockSeen, Seen
from holdfast.health.finding import Finding, Remark, summed
from holdfast.health.node import Node
from holdfast.health.settings import Limits
from holdfast.messages.health import Fact

_UNSYNCHRONISED = 0x40
_TIMESYNCD = "run/systemd/timesync/synchronized"
"""A file that systemd's time service makes once the clock is right."""


class Steering(Struct, frozen=True):
    """What the kernel knows about its clock."""

    synchronised: bool
    error_s: float
    """How far it may be off at most, as the service estimates."""


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


def check_clock(node: Node, before: Seen | None) -> Finding:
    steering = _steering() if node.is_real else None
    seen = ClockSeen(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
    known = before if isinstance(before, ClockSeen) else None
    told = node.path(_TIMESYNCD).exists()
    return judge_clock(steering, told, known, seen, node.settings.limits)


def _steering() -> Steering | None:
    """Asked without changing anything; None where the kernel does not answer."""
    timex = _Timex()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) < 0:
        return None
    return Steering(not timex.status & _UNSYNCHRONISED, timex.max_error_us / 1e6)


def judge_clock(
    steering: Steering | None,
    told: bool,
    known: ClockSeen | None,
    seen: ClockSeen,
    limits: Limits,
) -> Finding:
    remarks = []
    facts: dict[str, Fact] = {}
    fine = "the clock is kept right"
    if steering is not None and steering.synchronised:
        fine += f", to {steering.error_s:.3f} s"
        facts["max_error_s"] = steering.error_s
        if steering.error_s > limits.clock_error_s:
            remarks.append(Remark("warn", f"the clock may be off by {steering.error_s:.1f} s"))
    elif not told:
        remarks.append(Remark("unknown", "no time service has said that it keeps the clock right"))
    step = seen.wall_minus_boot_s - known.wall_minus_boot_s if known else 0.0
    if abs(step) > limits.clock_step_s:
        remarks.append(Remark("warn", f"the clock was set by {step:+.1f} s since the last look"))
    return summed(remarks, fine, facts, seen)
