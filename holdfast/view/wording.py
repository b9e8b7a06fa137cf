"""Words and numbers as viewers write them, on a terminal and in reports."""

from __future__ import annotations

import re

from holdfast.messages.losses import Loss
from holdfast.messages.units import Seconds

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x1f\x7f-\x9f]+")


def plain(text: str) -> str:
    """Return a text on one line without control characters: a script's error may hold any."""
    return " ".join(_CONTROLS.sub(" ", text).split())


def percent(share: float) -> str:
    """Write a share, never rounding up to all of it."""
    return "100%" if share >= 1 else f"{min(share, 0.999):.1%}"


def speed(per_s: float | None) -> str:
    """Write how often a second."""
    if per_s is None:
        return "-"
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2g}"


def loss(value: Loss) -> str:
    """Write a loss, or what it is instead of a number."""
    return value if isinstance(value, str) else f"{value:.4g}"


def duration(seconds: Seconds) -> str:
    """Write a time in its two largest units."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest_s} s" if minutes < 10 else f"{minutes} min"
    hours, rest_min = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest_min} min"
    return f"{hours // 24} d {hours % 24} h"
