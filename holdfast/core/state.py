"""A job as data: everything that the core remembers about it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from holdfast.core.chaos import plans as chaos
from holdfast.core.chaos.plans import Chaos
from holdfast.core.commits.state import Commits
from holdfast.core.hangs.rules import Hangs
from holdfast.core.ledger.books import Ledger
from holdfast.core.membership.patience import StopGrace, StopPatience
from holdfast.core.membership.rounds import Membership
from holdfast.core.nodecheck.schedule import Checking
from holdfast.core.recovery.rules import Fault, Recovery
from holdfast.core.requests.desk import Desk
from holdfast.core.stragglers.windows import Stragglers
from holdfast.messages.events import JobOpened
from holdfast.messages.records import Ended, Incident, Terms
from holdfast.messages.timings import Finding
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

QUIET = frozenset({"storage", "straggler", "unfit"})
"""Incidents that break no round."""

State = Literal["gathering", "running", "stopping", "ending", "ended"]


class RankState(Struct):
    """One rank of the round in force."""

    node: NodeId
    pid: int = 0
    started: bool = False
    stepped: bool = False
    finished: bool = False
    step: StepNumber = StepNumber(0)
    base: StepNumber | None = None
    """The step it went on from."""


class Pace(Struct):
    """Speed, from the distance between two reports of rank 0."""

    step: StepNumber
    at: Time
    per_s: float | None = None


class Absence(Struct):
    """A node without a stream: since when, and when it is given up."""

    since: Time
    until: Time


class Job(Struct):
    name: str
    terms: Terms
    opened_at: Time
    membership: Membership
    recovery: Recovery
    ledger: Ledger
    grace: StopGrace
    patience: StopPatience = field(default_factory=StopPatience)
    ranks: dict[Rank, RankState] = field(default_factory=dict)
    to_start: int = 0
    """Ranks of this round whose script has not begun."""
    to_step: int = 0
    """Ranks of this round that have not finished a step."""
    to_finish: int = 0
    """Ranks of this round that have not ended with 0."""
    highest: StepNumber = StepNumber(0)
    resumed_at: StepNumber | None = None
    """The step at which this round's workers went on; the lowest of all ranks."""
    pace: Pace | None = None
    fault: Fault | None = None
    """The likeliest culprit of a round that broke, until it is judged."""
    absent: dict[NodeId, Absence] = field(default_factory=dict)
    """Nodes without a stream."""
    absent_until: Time | None = None
    """No absent node is given up before this; it may be earlier than need be, never later."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Hosts that are not let in again, and why."""
    short_until: Time | None = None
    """While fewer nodes than the minimum are there: when the job gives up waiting."""
    saves_at_wish: int | None = None
    """While the world could grow: how many checkpoints there were when that became so."""
    saves: int = 0
    """Checkpoints finished by rank 0 in this round."""
    commits: Commits = field(default_factory=Commits)
    """Snapshots and checkpoints."""
    checking: Checking = field(default_factory=Checking)
    hangs: Hangs = field(default_factory=Hangs)
    stragglers: Stragglers = field(default_factory=Stragglers)
    findings: list[Finding] = field(default_factory=list)
    """Ranks that became slow, or are not any more; the last few."""
    found: int = 0
    """How many findings there have been."""
    copies: dict[NodeId, list[NodeId]] = field(default_factory=dict)
    """Who keeps copies of whose images, in the round in force."""
    last_write: str | None = None
    """All ranks ended with 0, and the last checkpoint is being written; then what became of it."""
    desk: Desk = field(default_factory=Desk)
    """What the scripts of the round in force share, and what they wait for."""
    chaos: Chaos = field(default_factory=Chaos)
    """Faults that somebody asked for."""
    incidents: list[Incident] = field(default_factory=list)
    ended: Ended | None = None
    closed: bool = False

    @property
    def state(self) -> State:
        if self.ended is not None:
            return "ended" if self.closed else "ending"
        if self.fault is not None:
            return "stopping"
        return "running" if self.membership.world is not None else "gathering"

    @property
    def last_fault(self) -> Incident | None:
        """The newest incident that broke a round; some break none."""
        return next((i for i in reversed(self.incidents) if i.kind not in QUIET), None)

    @property
    def open_incident(self) -> Incident | None:
        last = self.last_fault
        return last if last is not None and last.closed_at is None else None


def opened(event: JobOpened) -> Job:
    """A job as its first event makes it."""
    return Job(
        name=event.job,
        terms=event.terms,
        opened_at=event.at,
        membership=Membership(event.terms),
        recovery=Recovery(event.terms),
        ledger=Ledger(event.at),
        grace=StopGrace(event.terms.grace_s),
        chaos=chaos.opened(event.terms.chaos),
    )


def rank_in_force(job: Job, node: NodeId, round: RoundNumber, rank: Rank) -> RankState | None:
    """The rank that an event speaks of; None when that is of an older round, another node's, or
    the node was given up."""
    current = round == job.membership.round and job.membership.has(node)
    found = job.ranks.get(rank) if current else None
    return found if found is not None and found.node == node else None
