"""One job: its state, its machines, and how it takes an event in.

`MACHINES` is the tuple of machines: each of them hears of every moment, in this order. A new
capability is a room of its own with a machine in it, one entry here, and its messages.

`handle` takes an event and the time and returns actions, in the order in which they are to be carried
out. The event goes to every machine that handles it in the job's present state; what they decide is
carried out by `core.transitions`, and then the job settles: it judges, freezes, ends or closes, if it
may. An event that decides nothing changes nothing beyond the machines that heard it; one that does not
fit is refused with a reason, and counted. `docs/states.md` has the table of all states and events.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.core import faults
from holdfast.core.chaos.events import ChaosMachine
from holdfast.core.commits.events import CommitsMachine
from holdfast.core.decisions import BreakRound, EndJob, Refused, Requeue
from holdfast.core.hangs.events import HangsMachine
from holdfast.core.ledger.events import LedgerMachine
from holdfast.core.losses.events import LossesMachine, loss_of
from holdfast.core.machine import Effects, Machine, Rule
from holdfast.core.machine import tell as moment
from holdfast.core.membership.events import MembershipMachine
from holdfast.core.nodecheck.events import NodecheckMachine
from holdfast.core.ranks.events import RanksMachine
from holdfast.core.recovery.events import RecoveryMachine
from holdfast.core.requests.events import RequestsMachine
from holdfast.core.shards.events import ShardsMachine
from holdfast.core.speed import windows
from holdfast.core.speed.events import SpeedMachine
from holdfast.core.states import OVER, AnyState, Ended, Gathering, Running
from holdfast.core.stragglers.events import StragglersMachine
from holdfast.core.supply.events import SupplyMachine
from holdfast.core.suspects.events import SuspectsMachine
from holdfast.core.transitions import STEPS, carry_out, settle
from holdfast.core.tuning.events import TuningMachine
from holdfast.core.usage.events import UsageMachine
from holdfast.core.view import JobLoss, JobSpeed, RankState, earliest
from holdfast.messages.actions import AnyAction, CloseJob
from holdfast.messages.events import (
    AnyEvent,
    CoordinatorRestarted,
    JobOpened,
    JobRequeued,
    JobStopAsked,
    Tick,
)
from holdfast.messages.records import Incident, JobResult, Terms, World
from holdfast.messages.units import CauseId, NodeId, Rank, Seconds, StepNumber, Time

MACHINES: tuple[type[Machine], ...] = (
    RanksMachine,
    SpeedMachine,
    LossesMachine,
    MembershipMachine,
    RecoveryMachine,
    LedgerMachine,
    CommitsMachine,
    RequestsMachine,
    ShardsMachine,
    HangsMachine,
    StragglersMachine,
    NodecheckMachine,
    SuspectsMachine,
    ChaosMachine,
    TuningMachine,
    SupplyMachine,
    UsageMachine,
)

if TYPE_CHECKING:
    Machines = tuple[Machine, ...]
else:  # The same tuple, as the type that a snapshot of the job is decoded to.
    Machines = tuple.__class_getitem__(MACHINES)

M = TypeVar("M")


class Job(Struct, dict=True):
    """A job; what is derived from its tuple of machines is kept beside its fields, and not stored."""

    name: str
    terms: Terms
    opened_at: Time
    machines: Machines
    state: AnyState = field(default_factory=Gathering)
    events: int = 1
    """Events taken in so far; the number of the newest."""
    refused: dict[str, int] = field(default_factory=dict)
    """Events that changed nothing, by type and reason."""
    id: str = ""
    """Drawn when the job opened: see `JobOpened`."""
    opened_terms: Terms = Terms()
    """What the user asked of the job when it opened; `terms` are what holds since it was scaled."""
    requeues: int = 0
    """How often its platform started it again."""

    def of(self, kind: type[M]) -> M:
        """Find the machine of that type."""
        for machine in self.machines:
            if isinstance(machine, kind):
                return machine
        raise LookupError(f"no machine is a {kind.__name__}")

    @property
    def cause(self) -> CauseId:
        """The id of the event that is being handled."""
        return str(self.events)

    # ---- what machines may read: see `core.view.View` ----

    @property
    def world(self) -> World | None:
        return self.state.world if isinstance(self.state, Running) else None

    @cached_property
    def membership(self) -> MembershipMachine:
        return self.of(MembershipMachine)

    @cached_property
    def _ranks(self) -> RanksMachine:
        return self.of(RanksMachine)

    @property
    def ranks(self) -> Mapping[Rank, RankState]:
        return self._ranks.all

    @property
    def unstarted(self) -> int:
        return self._ranks.unstarted

    @property
    def unstepped(self) -> int:
        return self._ranks.unstepped

    @property
    def unfinished(self) -> int:
        return self._ranks.unfinished

    @property
    def returning(self) -> bool:
        return bool(self._ranks.returned)

    def can_do_without(self, nodes: Collection[NodeId]) -> bool:
        """Return whether the job could go on without these nodes, or is over."""
        return self.result is not None or self.membership.dispensable(nodes)

    @property
    def replaces_nodes(self) -> bool:
        return self.supply.active and not self.supply.together

    @property
    def highest(self) -> StepNumber:
        return self._ranks.highest

    @property
    def resumed_at(self) -> StepNumber | None:
        return self._ranks.resumed_at

    @property
    def comparable(self) -> bool:
        return self._ranks.comparable

    @cached_property
    def speeds(self) -> SpeedMachine:
        return self.of(SpeedMachine)

    @property
    def steps_per_s(self) -> float | None:
        return windows.steps_per_s(self.speeds)

    @property
    def speed(self) -> JobSpeed:
        return windows.total(self.speeds, self.ranks)

    @cached_property
    def _losses(self) -> LossesMachine:
        return self.of(LossesMachine)

    @property
    def loss(self) -> JobLoss | None:
        return loss_of(self._losses, self)

    @property
    def stepped_at(self) -> Time | None:
        """When a rank last finished a step of the newest round."""
        return self._ranks.stepped_at

    @property
    def usual_wait_s(self) -> Seconds | None:
        """Time of a step between the two latest reports, whatever filled it."""
        pace = self._ranks.pace
        return pace.step_s if pace is not None else None

    @property
    def restarts(self) -> int:
        return self.recovery.history.restarts

    @property
    def incident_count(self) -> int:
        return len(self.incidents)

    @property
    def saves(self) -> int:
        return self._ranks.saves

    # ---- what reports read, and carrying decisions out needs ----

    @property
    def incidents(self) -> list[Incident]:
        return self.recovery.incidents

    @property
    def result(self) -> JobResult | None:
        """How the job ended; None while it has not."""
        return self.state.result if isinstance(self.state, OVER) else None

    @cached_property
    def recovery(self) -> RecoveryMachine:
        return self.of(RecoveryMachine)

    @cached_property
    def supply(self) -> SupplyMachine:
        return self.of(SupplyMachine)

    @cached_property
    def requests(self) -> RequestsMachine:
        return self.of(RequestsMachine)

    # ---- who hears what ----

    @cached_property
    def hearers(self) -> dict[str, list[Callable[..., Any]]]:
        """The methods of the machines that do more than the default, by name, in their order."""
        moments = [name for name in vars(Machine) if not name.startswith("_")]
        return {
            moment: [
                getattr(machine, moment)
                for machine in self.machines
                if getattr(type(machine), moment) is not getattr(Machine, moment)
            ]
            for moment in moments
        }

    @cached_property
    def listeners(self) -> dict[type, list[tuple[Rule, Callable[..., Effects | Refused]]]]:
        """The handlers of each event, with the states in which they take it."""
        found: dict[type, list[tuple[Rule, Callable[..., Effects | Refused]]]] = {}
        for machine in self.machines:
            for name, one in vars(type(machine)).items():
                if isinstance(getattr(one, "rule", None), Rule):
                    found.setdefault(one.rule.event, []).append((one.rule, getattr(machine, name)))
        return found


def opened(event: JobOpened, machines: Sequence[type[Machine]] = MACHINES) -> Job:
    """Make a job as its first event makes it."""
    made = tuple(machine.opened(event.terms, event.at) for machine in machines)
    return Job(event.job, event.terms, event.at, made, id=event.id, opened_terms=event.terms)


def handle(job: Job, event: AnyEvent, now: Time) -> list[AnyAction]:
    """Take one event in; each action names itself and the event that it follows from."""
    actions = decide(job, event, now)
    cause = job.cause
    return [replace(one, id=f"{cause}.{i}", cause=cause) for i, one in enumerate(actions)]


def decide(job: Job, event: AnyEvent, now: Time) -> list[AnyAction]:
    """Take one event in; the same actions, without their ids."""
    job.events += 1
    actions: list[AnyAction] = []
    refusals: list[str] = []
    decisions = False
    kind = type(event)
    own = OWN.get(kind)
    listeners = job.listeners.get(kind, ()) if own is None else ()
    for rule, handler in listeners:
        if not isinstance(job.state, rule.states):
            refusals.append(rule.refusal)
            continue
        decided = handler(job, event, now)
        if isinstance(decided, Refused):
            refusals.append(decided.reason)
        else:
            decisions = decisions or any(type(effect) in STEPS for effect in decided)
            actions += carry_out(job, decided, now)
    if own is not None:
        # After a restart, nodes come back before anything is decided.
        decisions = kind is not CoordinatorRestarted
        actions += carry_out(job, own(job, event, now), now)
    elif len(refusals) == len(listeners):
        refused = f"{kind.__name__}: {refusals[0] if refusals else 'nothing handles it'}"
        job.refused[refused] = job.refused.get(refused, 0) + 1
    return actions + settle(job, now) if decisions else actions


def deadline(job: Job) -> Time | None:
    """When the job next wants a Tick."""
    short_until = job.state.short_until if isinstance(job.state, Gathering) else None
    due = earliest(short_until, *(ask(job) for ask in job.hearers["deadline"]))
    pause = job.recovery.ticks_after
    return due if due is None or pause is None else max(due, pause)


def validate(job: Job) -> None:
    """Assert every invariant of the job and of the machines in it."""
    for machine in job.machines:
        machine.validate(job)


# ---- events that are the job's own ---------------------------------------------------------------


def on_restarted(job: Job, event: CoordinatorRestarted, now: Time) -> Effects:
    """Give every node time to come back; a job that is over closes again.

    If the journal lost events, what was agreed in the round is unknown: all nodes stop and meet anew.
    """
    if isinstance(job.state, Ended):  # It died with the last event written and not acted upon.
        return [CloseJob(code=job.state.result.code, reason=job.state.result.reason)]
    restarted = moment(Machine.coordinator_restarted)
    if not event.lost or job.world is None:
        return [restarted]
    why = f"the journal lost {event.lost} events"
    fault = faults.wanted("resize", NodeId(""), job.world.round, job.highest, why, now)
    return [restarted, BreakRound(fault=fault)]


def on_stop(job: Job, event: JobStopAsked, now: Time) -> Effects:
    return [EndJob(code=event.code, reason=event.reason)]


def on_requeued(job: Job, event: JobRequeued, now: Time) -> Effects:
    job.requeues += 1
    return [Requeue(since=event.since)]


def on_tick(job: Job, event: Tick, now: Time) -> Effects:
    return [moment(Machine.tick)]


OWN: dict[type, Callable[[Job, Any, Time], Effects]] = {
    CoordinatorRestarted: on_restarted,
    JobStopAsked: on_stop,
    JobRequeued: on_requeued,
    Tick: on_tick,
}
