"""Defines what a check is asked and what it concludes.

A check makes a remark on each thing that is not as it should be. The worst remark gives the verdict,
and the reason lists all of them: one sick GPU out of eight must be named, and so must the second one.

A checker and its probe exchange a question and a judgement as one line of JSON each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct, field

from holdfast.health.baseline import Seen
from holdfast.health.settings import HealthSettings
from holdfast.messages.health import Fact, Verdict

SEVERITY: Mapping[Verdict, int] = {"pass": 0, "unknown": 1, "warn": 2, "fail": 3}

READY = b"ready"
"""A probe's first line: it has started, and its answers can be waited for."""


class Question(Struct, frozen=True):
    """A request to a probe to run one check."""

    kind: str
    subject: str
    look: int
    """Number of the look. Questions of one look share what was read once."""
    settings: HealthSettings
    before: Seen | None


class Remark(NamedTuple):
    """One observation, with the verdict that it alone would give."""

    verdict: Verdict
    text: str


class Judgement(Struct, frozen=True):
    """The conclusion of one check."""

    verdict: Verdict
    reason: str
    facts: dict[str, Fact] = field(default_factory=dict)
    seen: Seen | None = None
    """What to remember for the next look; None: what was remembered stays."""


def encode_line(message: Question | Judgement) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def summed(
    remarks: Sequence[Remark],
    fine: str,
    facts: Mapping[str, Fact] | None = None,
    seen: Seen | None = None,
) -> Judgement:
    """Sum up remarks; without any the verdict is "pass", and `fine` says what was seen."""
    told = sorted(remarks, key=lambda remark: -SEVERITY[remark.verdict])
    verdict = told[0].verdict if told else "pass"
    reason = "; ".join(remark.text for remark in told) or fine
    return Judgement(verdict, reason, dict(facts or {}), seen)


def unknown(reason: str) -> Judgement:
    return Judgement("unknown", reason)


def counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def amount(size_bytes: float) -> str:
    """Format a size for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
