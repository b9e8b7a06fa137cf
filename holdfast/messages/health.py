"""Defines the result of a health check, which agents report and `holdfast check` prints.

A verdict rests only on what was seen. What could not be examined is "unknown": it neither clears a
node nor condemns it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from holdfast.messages.units import Seconds

Verdict = Literal["pass", "fail", "warn", "unknown"]

Fact = str | int | float


class HealthResult(Struct, frozen=True):
    """The result of one run of one health check."""

    check: str
    """Name of the check: "memory", "gpu-ecc", "storage:/data"."""
    verdict: Verdict
    reason: str
    """One sentence for people. That of a failure names the part and what can be done."""
    seconds: Seconds
    facts: dict[str, Fact] = field(default_factory=dict)
    """Measured values, for programs."""
