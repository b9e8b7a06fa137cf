"""Which nodes the job has, and where each of them is."""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.core.patience import SILENCE_FLOOR_S, LeaveGrace, StopGrace, StopPatience
from holdfast.core.view import Candidate
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId, RoundNumber, Seconds, Time


class Membership(Struct):
    terms: Terms
    round: RoundNumber = RoundNumber(0)
    waiting: dict[NodeId, Candidate] = field(default_factory=dict)
    busy: dict[NodeId, Candidate] = field(default_factory=dict)
    placed: dict[NodeId, Candidate] = field(default_factory=dict)
    """Members of the world in force; empty without one."""
    leaving: dict[NodeId, Candidate] = field(default_factory=dict)
    """Members no more: told to finish, while they still stop their workers."""
    fewest: int = 0
    """The minimum when the world in force was formed; a job may want more since."""
    stayed: int = 0
    """Processes of the last round that had been parked, and entered their function again in it."""
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
    absent: dict[NodeId, Time] = field(default_factory=dict)
    """Members without a stream, since when. They get no place in a new round."""
    silence_s: Seconds = SILENCE_FLOOR_S
    """How long a member may be silent before it is given up; it never shrinks."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Hosts that are not let in again, and why."""
    saves_at_wish: int | None = None
    """While the world could grow: how many checkpoints there were when that became so."""
    grace: StopGrace = field(default_factory=lambda: StopGrace(None))
    leave: LeaveGrace = field(default_factory=LeaveGrace)
    patience: StopPatience = field(default_factory=StopPatience)

    def nodes(self) -> list[NodeId]:
        return [*self.placed, *self.busy, *self.waiting]

    def known(self) -> list[NodeId]:
        """All nodes that may have workers, or get some."""
        return [*self.nodes(), *self.leaving]

    def round_of(self, node: NodeId) -> RoundNumber:
        """Return the round in force if the node has places in it, else 0."""
        placed = self.placed.get(node)
        return RoundNumber(0) if placed is None else placed.round

    def has(self, node: NodeId) -> bool:
        return node in self.placed or node in self.busy or node in self.waiting

    def count(self) -> int:
        return len(self.placed) + len(self.busy) + len(self.waiting)

    def find(self, node: NodeId) -> Candidate | None:
        return self.placed.get(node) or self.busy.get(node) or self.waiting.get(node)
