"""What a check of a node found: what agents tell the coordinator and `holdfast check` prints.

A verdict is only ever drawn from something that was seen. What could not be looked at is "unknown":
it neither clears a node nor condemns it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from holdfast.messages.units import Seconds

Verdict = Literal["pass", "fail", "warn", "unknown"]

Fact = str | int | float


class Result(Struct, frozen=True):
    """One check's answer at one look."""

    check: str
    """Its name: "memory", "gpu-ecc", "storage:/data"."""
    verdict: Verdict
    reason: str
    """One sentence for people. A failing one names the part and what can be done."""
    seconds: Seconds
    facts: dict[str, Fact] = field(default_factory=dict)
    """What was measured, for programs."""
