"""Which nodes the job has, and where each of them is."""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.core.patience import StopGrace, StopPatience
from holdfast.core.view import Candidate
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId, RoundNumber, Seconds, Time


class Absence(Struct):
    """A node without a stream: since when, and when it is given up."""

    since: Time
    until: Time


class Membership(Struct):
    terms: Terms
    round: RoundNumber = RoundNumber(0)
    waiting: dict[NodeId, Candidate] = field(default_factory=dict)
    busy: dict[NodeId, Candidate] = field(default_factory=dict)
    placed: dict[NodeId, Candidate] = field(default_factory=dict)
    """Members of the world in force; empty without one."""
    seats: list[str] = field(default_factory=list)
    """The switch of each seat of the last round; a seat's number is its group rank."""
    joins: int = 0
    last_join_at: Time | None = None
    longest_gap_s: Seconds = 0.0
    closes_at: Time | None = None
    """When the grace for newcomers to the first round is over."""
    dissolved_at: Time | None = None
    """When the world was given up, while its nodes stop."""
    patient_until: Time | None = None
    """Until when busy nodes are waited for although others could take their places; None: no more."""
    absent: dict[NodeId, Absence] = field(default_factory=dict)
    absent_until: Time | None = None
    """A lower bound of when the next absent node is given up."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Hosts that are not let in again, and why."""
    saves_at_wish: int | None = None
    """While the world could grow: how many checkpoints there were when that became so."""
    grace: StopGrace = field(default_factory=lambda: StopGrace(None))
    patience: StopPatience = field(default_factory=StopPatience)

    def nodes(self) -> list[NodeId]:
        return [*self.placed, *self.busy, *self.waiting]

    def has(self, node: NodeId) -> bool:
        return node in self.placed or node in self.busy or node in self.waiting

    def count(self) -> int:
        return len(self.placed) + len(self.busy) + len(self.waiting)

    def find(self, node: NodeId) -> Candidate | None:
        return self.placed.get(node) or self.busy.get(node) or self.waiting.get(node)
