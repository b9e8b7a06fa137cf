"""The ranks of the newest round, and how far the job has come with them."""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.core.view import RankState
from holdfast.messages.units import Rank, StepNumber, Time


class Pace(Struct):
    """Speed, from the distance between two reports of rank 0."""

    step: StepNumber
    at: Time
    per_s: float | None = None


class Ranks(Struct):
    all: dict[Rank, RankState] = field(default_factory=dict)
    unstarted: int = 0
    """Ranks whose script has not begun."""
    unstepped: int = 0
    """Ranks that have not finished a step."""
    unfinished: int = 0
    """Ranks that have not ended with 0."""
    highest: StepNumber = StepNumber(0)
    """The highest step that any rank ever finished, in this round or before."""
    resumed_at: StepNumber | None = None
    """The lowest step that the ranks went on from."""
    pace: Pace | None = None
    stepped_at: Time | None = None
    """When a rank last finished a step of this round."""
    saves: int = 0
    """Checkpoints that rank 0 has finished in this round."""
