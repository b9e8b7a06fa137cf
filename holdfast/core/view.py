"""What every machine may read of the job, and none may write.

A machine is given the job as a `View`: protocols of read-only properties, so the type checker refuses
a machine that writes into another one's state. Values that several machines share live here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from holdfast.messages.losses import Loss
from holdfast.messages.records import NodeSpec, Resumed, Terms, World
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

if TYPE_CHECKING:
    from holdfast.core.states import AnyState


class Candidate(Struct):
    """A node and what decides about its place."""

    spec: NodeSpec
    store_port: int
    joined: int
    """Join sequence number."""
    seat: int | None = None
    """Group rank in the last round that the node was in."""
    round: RoundNumber = RoundNumber(0)
    """The last round that the node was placed in."""
    warm: bool = False
    """The node's standbys are ready: it could start a rank at once."""
    killed: bool = False
    """Its workers of the round that is being stopped were killed, though not all are gone."""
    parked: int = 0
    """Its workers that wait to enter their function again."""


class RankState(Struct):
    """One rank of the newest round."""

    node: NodeId
    pid: int = 0
    started: bool = False
    finished: bool = False
    step: StepNumber = StepNumber(0)
    steps: int = 0
    """Steps finished by the present process."""
    resumed: Resumed = "none"
    """Whether the process knows the step that it went on from."""
    base: StepNumber | None = None
    """That step, if it is known."""

    @property
    def stepped(self) -> bool:
        return self.steps > 0


class JobSpeed(Struct, frozen=True):
    """How fast the ranks of the newest round train: see `core.speed`."""

    world_size: int
    steps_per_s: float | None
    """Of the job, whose ranks step together; None while unknown."""
    samples_per_s: float | None
    """Of all ranks that count their samples; None if none does."""
    stable: bool
    """Whether every rank has trained for long enough at this world size to judge by it."""


class JobLoss(Struct, frozen=True):
    """The loss that the script told last in the newest round: see `core.losses`."""

    value: Loss
    step: StepNumber


class Members(Protocol):
    """The nodes of the job, by where they are: see `core.membership`."""

    @property
    def round(self) -> RoundNumber: ...
    @property
    def waiting(self) -> Mapping[NodeId, Candidate]: ...
    @property
    def busy(self) -> Mapping[NodeId, Candidate]: ...
    @property
    def placed(self) -> Mapping[NodeId, Candidate]: ...
    def has(self, node: NodeId) -> bool: ...
    def count(self) -> int: ...
    def find(self, node: NodeId) -> Candidate | None: ...
    @property
    def stayed(self) -> int:
        """Processes that entered their function again in the newest round."""

    @property
    def excluded(self) -> Mapping[str, str]:
        """Hosts that are not let in again, and why."""

    @property
    def largest(self) -> int:
        """Nodes of the largest legal world."""

    def formable(self, candidates: Mapping[NodeId, Candidate]) -> int:
        """Count the nodes of the largest world that these could form."""

    def is_complete(self, now: Time) -> bool:
        """Whether the next round has all the nodes it waits for."""


class View(Protocol):
    """The job, as a machine sees it."""

    @property
    def replaces_nodes(self) -> bool:
        """Whether a platform is there that provides another node for one that leaves."""

    @property
    def terms(self) -> Terms: ...
    @property
    def state(self) -> AnyState: ...
    @property
    def world(self) -> World | None:
        """The world in force; None unless the job is running."""

    @property
    def membership(self) -> Members: ...
    @property
    def ranks(self) -> Mapping[Rank, RankState]:
        """All ranks of the newest round."""

    @property
    def unfinished(self) -> int:
        """Ranks of the newest round that have not ended with 0."""

    @property
    def returning(self) -> bool:
        """Whether restartable functions have returned on all ranks of some node in the newest round."""

    @property
    def unstarted(self) -> int:
        """Ranks of the newest round whose script has not begun."""

    @property
    def unstepped(self) -> int:
        """Ranks of the newest round that have not finished a step."""

    @property
    def highest(self) -> StepNumber:
        """The highest step that any rank ever finished."""

    @property
    def resumed_at(self) -> StepNumber | None:
        """The lowest step that the ranks of the newest round went on from; None if unknown."""

    @property
    def comparable(self) -> bool:
        """Whether the newest round's steps can be compared with those of earlier rounds."""

    @property
    def steps_per_s(self) -> float | None:
        """The `steps_per_s` of `speed`, which costs more."""

    @property
    def speed(self) -> JobSpeed:
        """Speed of the newest round, at the end of that, or now; for those who change the world."""

    @property
    def loss(self) -> JobLoss | None:
        """Loss that the script told last in the newest round; None if it has told none."""

    @property
    def restarts(self) -> int:
        """Rounds that a fault made necessary."""

    @property
    def incident_count(self) -> int:
        """Incidents so far, open ones included."""

    @property
    def saves(self) -> int:
        """Checkpoints that rank 0 has finished in the newest round."""


def rank_in_force(job: View, node: NodeId, round: RoundNumber, rank: Rank) -> RankState | None:
    """Find the rank that an event speaks of; None for another round, or another node's rank."""
    if round != job.membership.round or not job.membership.has(node):
        return None
    found = job.ranks.get(rank)
    return found if found is not None and found.node == node else None


def can_spare_a_node(job: View) -> bool:
    """Whether the job has more nodes than it needs."""
    return job.membership.count() - 1 >= max(1, job.terms.min_nodes)


def earliest(*deadlines: Time | None) -> Time | None:
    return min((at for at in deadlines if at is not None), default=None)
