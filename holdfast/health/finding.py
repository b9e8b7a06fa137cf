"""What one check concludes, put together from remarks on each thing it looked at.

The worst remark gives the verdict, and every remark that is no praise is told: one sick GPU out of
eight must be named, and so must the second one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from holdfast.health.baseline import Seen
from holdfast.messages.health import Fact, Verdict

SEVERITY: Mapping[Verdict, int] = {"pass": 0, "unknown": 1, "warn": 2, "fail": 3}


class Remark(NamedTuple):
    verdict: Verdict
    text: str


class Finding(Struct, frozen=True):
    verdict: Verdict
    reason: str
    facts: dict[str, Fact] = field(default_factory=dict)
    seen: Seen | None = None
    """What to remember for the next look; None: what was remembered stays."""


def summed(
    remarks: Sequence[Remark],
    fine: str,
    facts: Mapping[str, Fact] | None = None,
    seen: Seen | None = None,
) -> Finding:
    """The worst of the remarks; without any it is a pass, and `fine` says what was seen."""
    told = sorted(remarks, key=lambda remark: -SEVERITY[remark.verdict])
    verdict = told[0].verdict if told else "pass"
    reason = "; ".join(remark.text for remark in told) or fine
    return Finding(verdict, reason, dict(facts or {}), seen)


def unknown(reason: str) -> Finding:
    return Finding("unknown", reason)


def counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def amount(size_bytes: float) -> str:
    """A size as people say it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
