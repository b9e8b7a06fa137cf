"""Defines the result of a health check, which agents report and `holdfast check` prints.

A verdict rests only on what was seen. What could not be examined is "unknown": it neither clears a
node nor condemns it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from holdfast.messages.units import Float, Int64, Mapped, Seconds, Text, Word

Verdict = Literal["pass", "fail", "warn", "unknown"]

Fact = Text | Int64 | Float


class HealthResult(Struct, frozen=True):
    """The result of one run of one health check."""

    check: Word
    """Name of the check: "memory", "gpu-ecc", "storage:/data"."""
    verdict: Verdict
    reason: Text
    """One sentence for people. That of a failure names the part and what can be done."""
    seconds: Seconds
    facts: Mapped[Word, Fact] = field(default_factory=dict)
    """Measured values, for programs."""
