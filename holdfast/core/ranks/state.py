"""The ranks of the newest round, and how far the job has come with them."""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.core.view import RankState
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, StepNumber, Time


class Pace(Struct):
    """Distance between the two latest reports of rank 0: what tells a slow step from a standstill."""

    step: StepNumber
    at: Time
    step_s: Seconds | None = None


class Ranks(Struct):
    opened_at: Time = Time(0.0)
    """When the job began."""
    all: dict[Rank, RankState] = field(default_factory=dict)
    unstarted: int = 0
    """Ranks whose script has not begun."""
    unstepped: int = 0
    """Ranks that have not finished a step."""
    unfinished: int = 0
    """Ranks that have not ended with 0."""
    highest: StepNumber = StepNumber(0)
    """The highest step that any rank ever finished, in this round or before."""
    known_at: StepNumber | None = None
    """The lowest step that ranks know they went on from."""
    unsure: int = 0
    """Ranks that have finished a step and do not know where they went on from."""
    pace: Pace | None = None
    stepped_at: Time | None = None
    """When a rank last finished a step of this round."""
    saves: int = 0
    """Checkpoints that rank 0 has finished in this round."""
    returned: dict[NodeId, RoundNumber] = field(default_factory=dict)
    """Nodes on all of whose ranks the restartable function has returned."""

    @property
    def comparable(self) -> bool:
        """Whether the steps of this round can be compared with those of earlier rounds."""
        return self.known_at is not None or self.unsure == 0

    @property
    def resumed_at(self) -> StepNumber | None:
        """The lowest step that the ranks went on from: 0 if none of them read anything to resume
        from, None if that is not known or no rank has finished a step."""
        if self.known_at is None and (self.unsure or self.unstepped == len(self.all)):
            return None
        return self.known_at or StepNumber(0)
