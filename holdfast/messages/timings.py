"""How long the sections of a training step took, and who was found to be slow by that."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.messages.units import Rank, Seconds, StepNumber

STEP = "step"
"""The section that is the whole step; all others are parts of it."""
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

Kind = Literal["relative", "individual"]
"""Slow beside the other ranks, or slow beside what the same rank once did."""


class Timing(Struct, frozen=True, kw_only=True):
    """One section of one rank, since it was last told about."""

    section: Annotated[str, Meta(min_length=1, max_length=200)]
    count: Annotated[int, Meta(ge=0, le=1 << 53)]
    median_s: Seconds
    total_s: Seconds
    waits: bool = False
    """Whether the rank may have waited for others in that time, as in a backward pass of DDP."""


class RankTimings(Struct, frozen=True, kw_only=True):
    rank: Rank
    timings: tuple[Timing, ...]


class Finding(Struct, frozen=True, kw_only=True):
    """A rank became a straggler, or is none any more."""

    rank: Rank
    kind: Kind
    began: bool
    """False: it ended."""
    score: float
    """1 is as fast as the best; 0.5 takes twice as long."""
    section: str
    """Where it loses most."""
    step: StepNumber
