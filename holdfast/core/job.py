"""The machine that joins the others: one job, from its first event to its last.

`handle` takes an event and the time and returns actions. It is the only place where membership,
recovery and the ledger meet:

    a worker dies ──▶ the incident opens, the world is dissolved, every node is told to stop
    every node is ready ──▶ all deaths of the round are known: the culprit is judged
                            ├── try again: the next round is frozen, every node gets its part
                            └── give up: every node is told to finish
    every rank has finished a step ──▶ the incident closes

Judging waits until all nodes are ready, because only then is it known who died first, and it costs
nothing: whatever the verdict, the workers had to be stopped before.

The job ends when all ranks ended with 0, when recovery gives up, or when too many nodes were told to
leave; then each node is told to finish, and with the last one gone the job is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct, field

from holdfast.core import ledger as books
from holdfast.core import membership as rounds
from holdfast.core import recovery as faults
from holdfast.core.deadlines import RECONNECT_AFTER_RESTART_S, RECONNECT_S, StopGrace
from holdfast.core.ledger import Ledger
from holdfast.core.membership import Membership
from holdfast.core.recovery import Fault, Recovery, Stop
from holdfast.messages.actions import AnyAction, CloseJob, Finish, StartWorkers, StopWorkers
from holdfast.messages.events import (
    AnyEvent,
    CoordinatorRestarted,
    JobOpened,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    NodeResumed,
    Progress,
    StreamEnded,
    Tick,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.records import Ended, Incident, Place, RankProgress, Terms, World
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

State = Literal["gathering", "running", "stopping", "ending", "ended"]


class RankState(Struct):
    """One rank of the round in force."""

    node: NodeId
    pid: int = 0
    started: bool = False
    stepped: bool = False
    finished: bool = False
    step: StepNumber = StepNumber(0)


class Pace(Struct):
    """Speed, from the distance between two reports of rank 0."""

    step: StepNumber
    at: Time
    per_s: float | None = None


class Job(Struct):
    name: str
    terms: Terms
    opened_at: Time
    membership: Membership
    recovery: Recovery
    ledger: Ledger
    grace: StopGrace
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
    absent: dict[NodeId, Time] = field(default_factory=dict)
    """Nodes without a stream, and when each is given up."""
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
    def open_incident(self) -> Incident | None:
        last = self.incidents[-1] if self.incidents else None
        return last if last is not None and last.closed_at is None else None


def opened(event: JobOpened) -> Job:
    """A job as its first event makes it."""
    return Job(
        name=event.job,
        terms=event.terms,
        opened_at=event.at,
        membership=rounds.gathering(event.terms),
        recovery=Recovery(event.terms),
        ledger=Ledger(event.at),
        grace=StopGrace(event.terms.grace_s),
    )


def handle(job: Job, event: AnyEvent, now: Time) -> list[AnyAction]:
    """Take one event in; the actions are to be carried out in their order."""
    return _HANDLERS[type(event)](job, event, now)


def deadline(job: Job) -> Time | None:
    """When the job next wants a Tick."""
    deadlines = [*job.absent.values()]
    if job.membership.closes_at is not None:
        deadlines.append(job.membership.closes_at)
    return min(deadlines, default=None)


# ---- nodes -------------------------------------------------------------------------------------


def _on_joined(job: Job, event: NodeJoined, now: Time) -> list[AnyAction]:
    if job.ended is not None:
        return [_finish_node(job, event.node)]
    actions: list[AnyAction] = []
    if event.node in job.membership.placed:
        actions += _node_gone(job, event.node, "it joined again", event.at, now)
    rounds.join(job.membership, event.node, event.spec, event.store_port, now)
    return actions + _settle(job, now)


def _on_ready(job: Job, event: NodeReady, now: Time) -> list[AnyAction]:
    if not rounds.ready(job.membership, event.node, event.round, event.store_port):
        return []
    if event.slowest_stop_s is not None:
        job.grace.observe(event.slowest_stop_s)
    for progress in event.ranks:
        _progressed(job, progress)
    return _settle(job, now)


def _on_leaving(job: Job, event: NodeLeaving, now: Time) -> list[AnyAction]:
    if job.ended is not None:
        return []
    if len(job.membership.nodes()) - 1 < job.terms.min_nodes:
        return _finish(job, event.code, event.reason, now)
    goodbye = Finish(
        node=event.node, code=event.code, reason=event.reason, grace_s=job.grace.limit_s()
    )
    return [goodbye, *_node_gone(job, event.node, event.reason, event.at, now)]


def _on_left(job: Job, event: NodeLeft, now: Time) -> list[AnyAction]:
    for progress in event.ranks:
        _progressed(job, progress)
    return _node_gone(job, event.node, "it left", event.at, now)


def _on_stream_ended(job: Job, event: StreamEnded, now: Time) -> list[AnyAction]:
    if event.node in job.membership.nodes():
        job.absent[event.node] = Time(now + RECONNECT_S)
    return []


def _on_restarted(job: Job, event: CoordinatorRestarted, now: Time) -> list[AnyAction]:
    until = Time(now + RECONNECT_AFTER_RESTART_S)
    job.absent = dict.fromkeys(job.membership.nodes(), until)
    return []


def _on_resumed(job: Job, event: NodeResumed, now: Time) -> list[AnyAction]:
    """Tell a node again what it may have missed while it had no stream."""
    job.absent.pop(event.node, None)
    if job.ended is not None:
        return [_finish_node(job, event.node)]
    if event.node not in job.membership.nodes():
        reason = "this node was given up while it was away"
        return [Finish(node=event.node, code=faults.EXIT_TRY_AGAIN, reason=reason, grace_s=0.0)]
    m = job.membership
    if event.node in m.busy:
        return [_stop_node(job, event.node, event.round)] if event.round == m.round else []
    if event.node in m.placed and m.world is not None and event.round < m.round:
        return [_start_node(job, m.world, p) for p in m.world.places if p.node == event.node]
    return []


def _node_gone(job: Job, node: NodeId, why: str, at: Time, now: Time) -> list[AnyAction]:
    round = job.membership.round
    broken = rounds.leave(job.membership, node)
    job.absent.pop(node, None)
    if job.ended is not None:
        return _close(job, now)
    if not broken:
        return _settle(job, now)
    fault = faults.lost_node(node, round, job.highest, why, at)
    return _break(job, fault, now) + _settle(job, now)


# ---- workers -----------------------------------------------------------------------------------


def _on_started(job: Job, event: WorkerStarted, now: Time) -> list[AnyAction]:
    rank = _rank_in_force(job, event.round, event.rank)
    if rank is None or rank.started:
        return []
    rank.started, rank.pid = True, event.pid
    books.script_began(job.ledger, event.rank, event.at)
    job.to_start -= 1
    incident = job.open_incident
    if job.to_start == 0 and incident is not None:
        incident.started_at = event.at
        if job.highest == 0:  # A script that takes no steps is back when it runs.
            incident.closed_at = event.at
    return []


def _on_progress(job: Job, event: Progress, now: Time) -> list[AnyAction]:
    if event.round == job.membership.round:
        for progress in event.ranks:
            _progressed(job, progress)
    return []


def _progressed(job: Job, progress: RankProgress) -> None:
    rank = job.ranks.get(progress.rank)
    if rank is None or progress.steps == 0 or progress.last_at is None:
        return
    books.progressed(job.ledger, progress)
    rank.step = progress.step
    job.highest = max(job.highest, progress.step)
    if progress.rank == 0:
        _note_pace(job, progress.step, progress.last_at)
    if rank.stepped:
        return
    rank.stepped = True
    job.to_step -= 1
    base = StepNumber(progress.step - progress.steps)
    job.resumed_at = base if job.resumed_at is None else min(job.resumed_at, base)
    incident = job.open_incident
    if incident is None or job.fault is not None:
        return
    first_at = progress.first_at or progress.last_at
    incident.lost_steps = max(0, incident.step - job.resumed_at)
    # Times of the ranks' first steps arrive in any order; the last one is when training was back.
    incident.back_at = max(first_at, incident.back_at or first_at)
    if job.to_step == 0:
        incident.closed_at = incident.back_at


def _note_pace(job: Job, step: StepNumber, at: Time) -> None:
    last = job.pace
    if last is None or step <= last.step:
        job.pace = Pace(step, at)
    elif at - last.at >= 0.5:
        job.pace = Pace(step, at, (step - last.step) / (at - last.at))


def _on_exited(job: Job, event: WorkerExited, now: Time) -> list[AnyAction]:
    rank = _rank_in_force(job, event.round, event.rank)
    if rank is None or rank.finished or job.ended is not None:
        return []
    _progressed(job, event.progress)
    if event.code == 0:
        return _finished(job, event.rank, rank, event.at, now)
    fault = faults.fault_of(event, event.progress.step or job.highest)
    return _break(job, fault, now)


def _finished(job: Job, number: Rank, rank: RankState, at: Time, now: Time) -> list[AnyAction]:
    if job.fault is not None:
        return []
    rank.finished = True
    job.to_finish -= 1
    books.enter(job.ledger, "idle", at, number)
    if job.to_finish > 0:
        return []
    incident = job.open_incident
    if incident is not None:
        incident.closed_at = at
    return _finish(job, 0, "finished", now)


# ---- rounds ------------------------------------------------------------------------------------


def _break(job: Job, fault: Fault, now: Time) -> list[AnyAction]:
    """The round in force is broken: open the incident, or learn more about the one just opened."""
    if job.fault is not None:
        _blame(job, fault)
        return []
    last = job.open_incident
    if last is not None:
        last.closed_at = fault.at
        last.action += "; failed again before the first step"
    job.fault = fault
    job.incidents.append(_incident(len(job.incidents) + 1, fault, now))
    books.broke(job.ledger, fault.at, now)
    rounds.dissolve(job.membership)
    return [_stop_node(job, node, fault.round) for node in job.membership.busy]


def _stop_node(job: Job, node: NodeId, round: RoundNumber) -> StopWorkers:
    assert job.fault is not None
    why = f"{_subject(job.fault)} {job.fault.signature}"
    return StopWorkers(node=node, round=round, grace_s=job.grace.limit_s(), why=why)


def _blame(job: Job, fault: Fault) -> None:
    assert job.fault is not None
    incident = job.incidents[-1]
    guilty = faults.culprit(job.fault, fault)
    other = fault if guilty is job.fault else job.fault
    incident.also.append(f"{_subject(other)} {other.signature}")
    if guilty is not job.fault:
        better = _incident(incident.id, guilty, incident.opened_at)
        better.also = incident.also
        job.incidents[-1] = better
        job.fault = guilty


def _incident(number: int, fault: Fault, now: Time) -> Incident:
    return Incident(
        id=number,
        kind=fault.kind,
        node=fault.node,
        rank=fault.rank,
        round=fault.round,
        step=fault.step,
        signature=fault.signature,
        detail=fault.detail,
        fault_at=min(fault.at, now),
        opened_at=now,
    )


def _subject(fault: Fault) -> str:
    return f"node {fault.node}" if fault.rank is None else f"rank {fault.rank}"


def _settle(job: Job, now: Time) -> list[AnyAction]:
    """Without a world in force: judge what broke the last one, and freeze the next if it may be."""
    m = job.membership
    if job.ended is not None or m.world is not None:
        return []
    if job.fault is not None:
        if m.busy and len(m.waiting) < m.max_nodes:
            return []
        verdict = faults.judge(job.recovery, job.fault, job.highest)
        incident = job.incidents[-1]
        incident.stopped_at = now
        books.stopped(job.ledger, now)
        job.fault = None
        if isinstance(verdict, Stop):
            incident.action = f"stopped the job: {verdict.reason}"
            incident.closed_at = now
            return _finish(job, verdict.code, verdict.reason, now)
        incident.action = "gave the ranks to standbys"
    world = rounds.close(m, now)
    if world is None:
        books.enter(job.ledger, "wait", now)
        return []
    return _start(job, world, now)


def _start(job: Job, world: World, now: Time) -> list[AnyAction]:
    books.size(job.ledger, world.size, now)
    books.begin_round(job.ledger, world.round, job.highest, now)
    job.ranks = {
        Rank(rank): RankState(place.node)
        for place in world.places
        for rank in range(place.first_rank, place.first_rank + place.slots)
    }
    job.to_start = job.to_step = job.to_finish = world.size
    job.resumed_at = None
    job.pace = None
    incident = job.open_incident
    if incident is not None:
        incident.frozen_at = now
    return [_start_node(job, world, place) for place in world.places]


def _start_node(job: Job, world: World, place: Place) -> StartWorkers:
    restarts, limit = job.recovery.restarts, job.terms.max_restarts or 0
    return StartWorkers(node=place.node, part=rounds.part_of(world, place, restarts, limit))


def _rank_in_force(job: Job, round: RoundNumber, rank: Rank) -> RankState | None:
    """The rank that an event speaks of; None when it speaks of an older round."""
    return job.ranks.get(rank) if round == job.membership.round else None


# ---- the end -----------------------------------------------------------------------------------


def _finish(job: Job, code: int, reason: str, now: Time) -> list[AnyAction]:
    job.ended = Ended(code=code, reason=reason, at=now)
    job.membership.closes_at = None
    if job.ledger.fault_at is not None:
        books.stopped(job.ledger, now)
    books.enter(job.ledger, "stop" if code else "idle", now)
    return [_finish_node(job, node) for node in job.membership.nodes()] or _close(job, now)


def _finish_node(job: Job, node: NodeId) -> Finish:
    assert job.ended is not None
    return Finish(
        node=node, code=job.ended.code, reason=job.ended.reason, grace_s=job.grace.limit_s()
    )


def _close(job: Job, now: Time) -> list[AnyAction]:
    assert job.ended is not None
    if job.membership.nodes() or job.closed:
        return []
    job.closed = True
    job.ended = Ended(code=job.ended.code, reason=job.ended.reason, at=now)
    for rank in list(job.ledger.accounts):
        books.book(job.ledger, rank, now)
    return [CloseJob(code=job.ended.code, reason=job.ended.reason)]


def _on_tick(job: Job, event: Tick, now: Time) -> list[AnyAction]:
    actions: list[AnyAction] = []
    for node in [node for node, until in job.absent.items() if until <= now]:
        actions += _node_gone(job, node, "its stream ended", event.at, now)
    return actions + _settle(job, now)


def _on_opened_again(job: Job, event: JobOpened, now: Time) -> list[AnyAction]:
    return []


_HANDLERS: dict[type, Callable[[Job, Any, Time], list[AnyAction]]] = {
    JobOpened: _on_opened_again,
    NodeJoined: _on_joined,
    NodeReady: _on_ready,
    NodeLeaving: _on_leaving,
    NodeLeft: _on_left,
    StreamEnded: _on_stream_ended,
    NodeResumed: _on_resumed,
    CoordinatorRestarted: _on_restarted,
    WorkerStarted: _on_started,
    WorkerExited: _on_exited,
    Progress: _on_progress,
    Tick: _on_tick,
}


def validate(job: Job) -> None:
    """Every invariant of the job and of the machines in it."""
    rounds.validate(job.membership)
    faults.validate(job.recovery)
    books.validate(job.ledger)
    ranks = job.ranks.values()
    assert job.to_start == sum(not r.started for r in ranks), "miscounted starts"
    assert job.to_step == sum(not r.stepped for r in ranks), "miscounted steps"
    assert job.to_finish == sum(not r.finished for r in ranks), "miscounted ends"
    assert (job.fault is None) or job.membership.world is None, "a broken world is in force"
    assert [i.id for i in job.incidents] == list(range(1, len(job.incidents) + 1))
    assert sum(i.closed_at is None for i in job.incidents) <= 1, "two incidents are open"
    if job.membership.world is not None:
        assert len(job.ranks) == job.membership.world.size, "ranks beside the world"
