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

from collections.abc import Callable, Iterable
from typing import Any, Literal

from msgspec import Struct, field

from holdfast.core import ledger as books
from holdfast.core import membership as rounds
from holdfast.core import recovery as faults
from holdfast.core import requests
from holdfast.core.deadlines import (
    JOIN_LIMIT_S,
    RECONNECT_AFTER_RESTART_S,
    RECONNECT_S,
    StopGrace,
)
from holdfast.core.ledger import Ledger
from holdfast.core.meetings import Attendance
from holdfast.core.membership import Membership
from holdfast.core.recovery import Fault, Recovery, Stop
from holdfast.core.requests import Desk
from holdfast.messages.actions import (
    AnyAction,
    CloseJob,
    Finish,
    Prepare,
    StartWorkers,
    StopWorkers,
)
from holdfast.messages.events import (
    AnyEvent,
    Asked,
    CoordinatorRestarted,
    ExcludeAsked,
    JobOpened,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    NodeResumed,
    NodeWarm,
    Progress,
    StopAsked,
    StreamEnded,
    Tick,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_TRY_AGAIN
from holdfast.messages.records import Ended, FaultKind, Incident, Place, RankProgress, Terms, World
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

State = Literal["gathering", "running", "stopping", "ending", "ended"]

ALSO_AT_MOST = 100
"""Of the deaths in a fault's wake so many are told: there can be one for each of 80,000 ranks."""


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
    desk: Desk = field(default_factory=Desk)
    """What the scripts of the round in force share, and what they wait for."""
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
        membership=Membership(event.terms),
        recovery=Recovery(event.terms),
        ledger=Ledger(event.at),
        grace=StopGrace(event.terms.grace_s),
    )


def handle(job: Job, event: AnyEvent, now: Time) -> list[AnyAction]:
    """Take one event in; the actions are to be carried out in their order."""
    return _HANDLERS[type(event)](job, event, now)


def deadline(job: Job) -> Time | None:
    """When the job next wants a Tick."""
    deadlines = (job.absent_until, job.membership.closes_at, job.short_until, job.desk.until)
    return min((at for at in deadlines if at is not None), default=None)


# ---- nodes -------------------------------------------------------------------------------------


def _on_joined(job: Job, event: NodeJoined, now: Time) -> list[AnyAction]:
    if job.ended is not None:
        return [_finish_node(job, event.node)]
    if event.spec.host in job.excluded:
        why = f"host {event.spec.host} is excluded: {job.excluded[event.spec.host]}"
        return [_goodbye(job, event.node, EXIT_DO_NOT_REQUEUE, why)]
    actions: list[AnyAction] = []
    if event.node in job.membership.placed:
        actions += _node_gone(job, event.node, "it joined again", event.at, now)
        if job.ended is not None:
            return [*actions, _finish_node(job, event.node)]
    rounds.join(job.membership, event.node, event.spec, event.store_port, now)
    if job.membership.world is not None:
        return [*actions, Prepare(node=event.node)]
    return actions + _settle(job, now)


def _on_warm(job: Job, event: NodeWarm, now: Time) -> list[AnyAction]:
    m = job.membership
    candidate = m.waiting.get(event.node) or m.placed.get(event.node) or m.busy.get(event.node)
    if candidate is None:
        return []
    candidate.warm = True  # Said once: a node that is placed now may wait for a place later.
    return _grow(job, now) if event.node in m.waiting else []


def _on_ready(job: Job, event: NodeReady, now: Time) -> list[AnyAction]:
    if not rounds.ready(job.membership, event.node, event.round, event.store_port):
        return []
    if event.slowest_stop_s is not None:
        job.grace.observe(event.slowest_stop_s)
    _all_progressed(job, event.node, event.round, event.ranks)
    return _settle(job, now)


def _on_leaving(job: Job, event: NodeLeaving, now: Time) -> list[AnyAction]:
    if job.ended is not None or not job.membership.has(event.node):
        return []
    if job.membership.count() - 1 < job.terms.min_nodes:
        return _finish(job, event.code, event.reason, now)
    why = f"left: {event.reason}"
    return _send_off(job, "leave", event.node, event.code, why, now)


def _on_exclude_asked(job: Job, event: ExcludeAsked, now: Time) -> list[AnyAction]:
    if job.ended is not None or _rank_in_force(job, event.node, event.round, event.rank) is None:
        return []
    candidate = job.membership.placed.get(event.node)
    if candidate is None:
        return []
    job.excluded[candidate.spec.host] = event.reason
    why = f"excluded by rank {event.rank}: {event.reason}"
    return _send_off(job, "exclude", event.node, EXIT_DO_NOT_REQUEUE, why, now)


def _on_stop_asked(job: Job, event: StopAsked, now: Time) -> list[AnyAction]:
    if job.ended is not None or _rank_in_force(job, event.node, event.round, event.rank) is None:
        return []
    return _finish(job, event.code, f"rank {event.rank} stopped the job: {event.reason}", now)


def _on_asked(job: Job, event: Asked, now: Time) -> list[AnyAction]:
    rank = _rank_in_force(job, event.node, event.round, event.rank)
    if job.ended is not None or job.membership.world is None or rank is None or rank.finished:
        why = f"rank {event.rank} of round {event.round} is not in force"
        return [requests.fenced(event, f"{why} (the job is in round {job.membership.round})")]
    return [*requests.take(job.desk, event, _attendance(job), now)]


def _attendance(job: Job) -> Attendance:
    return Attendance(present=job.to_finish, ended=len(job.ranks) - job.to_finish)


def _close_desk(job: Job, why: str) -> list[AnyAction]:
    """What the scripts shared ends with their round."""
    desk, job.desk = job.desk, Desk()
    return [*requests.close(desk, why)]


def _send_off(
    job: Job, kind: FaultKind, node: NodeId, code: int, why: str, now: Time
) -> list[AnyAction]:
    """Part with a node in peace; the others go on in a new round."""
    actions: list[AnyAction] = [_goodbye(job, node, code, why)]
    round = job.membership.round
    if rounds.leave(job.membership, node):
        actions += _break(job, faults.wanted(kind, node, round, job.highest, why, now), now)
    return actions + _settle(job, now)


def _on_left(job: Job, event: NodeLeft, now: Time) -> list[AnyAction]:
    _all_progressed(job, event.node, event.round, event.ranks)
    return _node_gone(job, event.node, "it left", event.at, now)


def _on_stream_ended(job: Job, event: StreamEnded, now: Time) -> list[AnyAction]:
    if job.membership.has(event.node):
        _miss(job, event.node, Absence(event.at, Time(now + RECONNECT_S)))
    return []


def _on_restarted(job: Job, event: CoordinatorRestarted, now: Time) -> list[AnyAction]:
    for node in job.membership.nodes():
        _miss(job, node, Absence(now, Time(now + RECONNECT_AFTER_RESTART_S)))
    if job.closed:  # It died with the last event written and its own end not yet reached.
        assert job.ended is not None
        return [CloseJob(code=job.ended.code, reason=job.ended.reason)]
    return []


def _miss(job: Job, node: NodeId, absence: Absence) -> None:
    job.absent[node] = absence
    job.absent_until = min(absence.until, job.absent_until or absence.until)


def _on_resumed(job: Job, event: NodeResumed, now: Time) -> list[AnyAction]:
    """Tell a node again what it may have missed while it had no stream."""
    job.absent.pop(event.node, None)
    m = job.membership
    if job.ended is not None:
        return [_finish_node(job, event.node)]
    if not m.has(event.node):
        return [_fence(event.node)]
    if event.round > m.round:
        return _relearn(job, event, now)
    if event.node in m.busy:
        held = m.busy[event.node]
        if event.round == held.round:
            return [_stop_node(job, event.node, held.round)]
        # It was never told to start the round that is being stopped: it has no workers of it.
        rounds.ready(m, event.node, held.round, held.store_port)
        return _settle(job, now)
    if event.node in m.placed and m.world is not None and event.round < m.round:
        seat = m.placed[event.node].seat
        assert seat is not None
        return [_start_node(job, m.world, m.world.places[seat])]
    return []


def _relearn(job: Job, event: NodeResumed, now: Time) -> list[AnyAction]:
    """A node knows a round that the journal lost (its disk was full when the coordinator died).

    What was agreed in it is not known any more, so it is given up: everybody stops and meets anew.
    """
    m = job.membership
    m.round = event.round
    for candidate in [*m.placed.values(), *m.busy.values()]:
        candidate.round = event.round
    if event.node in m.waiting:
        m.busy[event.node] = m.waiting.pop(event.node)
        m.busy[event.node].round = event.round
    why = f"knows round {event.round}, which the journal lost"
    fault = faults.wanted("resize", event.node, event.round, job.highest, why, now)
    return _break(job, fault, now) + _settle(job, now)


def _fence(node: NodeId) -> Finish:
    """What a node is told that comes back after it was given up: end all, and join afresh."""
    why = "this node was given up while it was away; it joins again as a new one"
    return Finish(node=node, code=EXIT_TRY_AGAIN, reason=why, grace_s=0.0, rejoin=True)


def _node_gone(job: Job, node: NodeId, why: str, at: Time, now: Time) -> list[AnyAction]:
    actions = _forget(job, node, why, at, now)
    return actions + (_settle(job, now) if job.ended is None else _close(job, now))


def _forget(job: Job, node: NodeId, why: str, at: Time, now: Time) -> list[AnyAction]:
    """Strike a node off; if the round in force is broken by that, the others have to stop."""
    round = job.membership.round
    stopping = job.fault is not None and node in job.membership.busy
    broken = rounds.leave(job.membership, node)
    job.absent.pop(node, None)
    if job.ended is not None or not (broken or stopping):
        return []
    # Others often notice first: their ranks fail in the collective they shared with the lost node.
    return _break(job, faults.lost_node(node, round, job.highest, why, at), now)


# ---- workers -----------------------------------------------------------------------------------


def _on_started(job: Job, event: WorkerStarted, now: Time) -> list[AnyAction]:
    rank = _rank_in_force(job, event.node, event.round, event.rank)
    if rank is None or rank.started:
        return []
    rank.started, rank.pid = True, event.pid
    books.script_began(job.ledger, event.rank, event.at)
    job.to_start -= 1
    incident = job.open_incident
    if incident is None or job.membership.world is None:
        return []
    if not event.warm:
        incident.action = "gave the ranks to fresh processes"
    if job.to_start == 0:
        incident.started_at = event.at
        if job.highest == 0:  # A script that takes no steps is back when it runs.
            incident.closed_at = event.at
    return []


def _on_progress(job: Job, event: Progress, now: Time) -> list[AnyAction]:
    _all_progressed(job, event.node, event.round, event.ranks)
    wished = job.saves_at_wish is not None and job.saves != job.saves_at_wish
    return _grow(job, now) if wished else []


def _all_progressed(
    job: Job, node: NodeId, round: RoundNumber, ranks: Iterable[RankProgress]
) -> None:
    for progress in ranks:
        rank = _rank_in_force(job, node, round, progress.rank)
        if rank is not None:
            _progressed(job, rank, progress)


def _progressed(job: Job, rank: RankState, progress: RankProgress) -> None:
    if progress.steps == 0 or progress.last_at is None:
        return
    if progress.steps < job.ledger.accounts[progress.rank].steps:
        return  # Older than what is known already.
    books.progressed(job.ledger, progress)
    rank.step = progress.step
    job.highest = max(job.highest, progress.step)
    if progress.rank == 0:
        job.saves = progress.saves
        _note_pace(job, progress.step, progress.last_at)
    _note_base(job, rank, StepNumber(max(0, progress.step - progress.steps)))
    if rank.stepped:
        return
    rank.stepped = True
    job.to_step -= 1
    incident = job.open_incident
    if incident is None or job.membership.world is None:
        return  # Late word of a round that is broken does not end its incident.
    first_at = progress.first_at or progress.last_at
    # Times of the ranks' first steps arrive in any order; the last one is when training was back.
    incident.back_at = max(first_at, incident.back_at or first_at)
    if job.to_step == 0:
        incident.closed_at = incident.back_at


def _note_base(job: Job, rank: RankState, base: StepNumber) -> None:
    """Note the step that a rank went on from: what lies between it and the fault is lost.

    It changes when a script begins to count for itself after the optimizer hook counted from 0.
    """
    if rank.base == base:
        return
    first, rank.base = rank.base is None, base
    if first and job.resumed_at is not None:
        job.resumed_at = min(job.resumed_at, base)
    else:
        job.resumed_at = min(r.base for r in job.ranks.values() if r.base is not None)
    incident = job.incidents[-1] if job.incidents else None
    if incident is not None and incident.round < job.membership.round:
        incident.lost_steps = max(0, incident.step - job.resumed_at)


def _note_pace(job: Job, step: StepNumber, at: Time) -> None:
    last = job.pace
    if last is None or step <= last.step:
        job.pace = Pace(step, at)
    elif at - last.at >= 0.5:
        job.pace = Pace(step, at, (step - last.step) / (at - last.at))


def _on_exited(job: Job, event: WorkerExited, now: Time) -> list[AnyAction]:
    rank = _rank_in_force(job, event.node, event.round, event.rank)
    if rank is None or rank.finished or job.ended is not None:
        return []
    _all_progressed(job, event.node, event.round, [event.progress])
    if job.fault is None and job.membership.world is None:
        return []  # Its round is broken and judged already.
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
        return [*requests.rank_ended(job.desk, number, _attendance(job))]
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
    stops = [_stop_node(job, node, held.round) for node, held in job.membership.busy.items()]
    return [*stops, *_close_desk(job, f"{_subject(fault)} {fault.signature}")]


def _stop_node(job: Job, node: NodeId, round: RoundNumber) -> StopWorkers:
    incident = job.incidents[-1]
    why = f"{_subject(incident)} {incident.signature}"
    return StopWorkers(node=node, round=round, grace_s=job.grace.limit_s(), why=why)


def _blame(job: Job, fault: Fault) -> None:
    assert job.fault is not None
    incident = job.incidents[-1]
    guilty = faults.culprit(job.fault, fault)
    other = fault if guilty is job.fault else job.fault
    if len(incident.also) < ALSO_AT_MOST:
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


def _subject(fault: Fault | Incident) -> str:
    return f"node {fault.node}" if fault.rank is None else f"rank {fault.rank}"


def _grow(job: Job, now: Time) -> list[AnyAction]:
    """Form a larger world once nodes wait for it, right after a checkpoint if there are any.

    A script that never says when it saves gives no better moment than now.
    """
    size = rounds.can_grow(job.membership) if job.fault is None and job.ended is None else 0
    if size == 0:
        job.saves_at_wish = None
        return []
    if job.saves_at_wish is None:
        job.saves_at_wish = job.saves
    if job.saves > 0 and job.saves == job.saves_at_wish:
        return []
    newest = next(reversed(job.membership.waiting))
    before = len(job.membership.placed)
    why = f"joined: from {before} to {size} nodes"
    fault = faults.wanted("resize", newest, job.membership.round, job.highest, why, now)
    return _break(job, fault, now)


def _settle(job: Job, now: Time) -> list[AnyAction]:
    """Without a world in force: judge what broke the last one, and freeze the next if it may be."""
    m = job.membership
    if job.ended is not None or m.world is not None:
        return []
    if job.fault is not None:
        if m.busy:
            return []
        stop = _judge(job, job.fault, now)
        if stop is not None:
            return _finish(job, stop.code, stop.reason, now)
    world = rounds.close(m, now)
    if world is not None:
        job.short_until = None
        return _start(job, world, now)
    if job.ledger.waiting_since is None and not m.busy:
        books.wait(job.ledger, now)
    return _mind_shortage(job, now)


def _judge(job: Job, fault: Fault, now: Time) -> Stop | None:
    verdict = faults.judge(job.recovery, fault, job.highest)
    incident = job.incidents[-1]
    incident.stopped_at = now
    books.stopped(job.ledger, now)
    job.fault = None
    if isinstance(verdict, Stop):
        incident.action = f"stopped the job: {verdict.reason}"
        incident.closed_at = now
        return verdict
    incident.action = "gave the ranks to standbys"
    return None


def _mind_shortage(job: Job, now: Time) -> list[AnyAction]:
    """Fewer nodes than the job needs: wait for more, but not for ever."""
    m = job.membership
    there, needed = m.count(), job.terms.min_nodes
    if there >= needed and (m.busy or m.closes_at is not None):
        job.short_until = None
        return []
    if job.short_until is None:
        limit = JOIN_LIMIT_S if job.terms.join_limit_s is None else job.terms.join_limit_s
        job.short_until = Time(now + limit)
    if now < job.short_until:
        return []
    reason = f"{there} of at least {needed} nodes are there and no more came in time"
    if there >= needed:
        reason = f"{there} nodes are there, but no {needed} of them form complete segments or units"
    return _finish(job, EXIT_TRY_AGAIN, reason, now)


def _start(job: Job, world: World, now: Time) -> list[AnyAction]:
    books.size(job.ledger, world.size, now)
    books.begin_round(job.ledger, world.round, job.highest, now)
    job.ranks = {
        Rank(rank): RankState(place.node)
        for place in world.places
        for rank in range(place.first_rank, place.first_rank + place.slots)
    }
    job.to_start = job.to_step = job.to_finish = world.size
    job.resumed_at = job.pace = job.saves_at_wish = None
    job.saves = 0
    incident = job.open_incident
    if incident is not None:
        incident.frozen_at = now
    return [_start_node(job, world, place) for place in world.places]


def _start_node(job: Job, world: World, place: Place) -> StartWorkers:
    restarts, limit = job.recovery.restarts, job.terms.max_restarts or 0
    return StartWorkers(node=place.node, part=rounds.part_of(world, place, restarts, limit))


def _rank_in_force(job: Job, node: NodeId, round: RoundNumber, rank: Rank) -> RankState | None:
    """The rank that an event speaks of; None when that is of an older round, another node's, or
    the node was given up."""
    current = round == job.membership.round and job.membership.has(node)
    found = job.ranks.get(rank) if current else None
    return found if found is not None and found.node == node else None


# ---- the end -----------------------------------------------------------------------------------


def _finish(job: Job, code: int, reason: str, now: Time) -> list[AnyAction]:
    job.ended = Ended(code=code, reason=reason, at=now)
    job.membership.closes_at = job.short_until = None
    incident = job.open_incident
    if incident is not None:
        incident.closed_at = now
        incident.action = incident.action or f"the job ended: {reason}"
    if code == 0:
        if job.ledger.fault_at is not None:
            books.stopped(job.ledger, now)
        books.enter(job.ledger, "idle", now)
    elif job.ledger.fault_at is None:
        books.broke(job.ledger, now, now)  # Booked when the nodes have told how far they came.
    answers = _close_desk(job, reason)
    nodes = job.membership.nodes()
    return [*(_finish_node(job, node) for node in nodes), *answers] if nodes else _close(job, now)


def _finish_node(job: Job, node: NodeId) -> Finish:
    assert job.ended is not None
    return _goodbye(job, node, job.ended.code, job.ended.reason)


def _goodbye(job: Job, node: NodeId, code: int, reason: str) -> Finish:
    return Finish(node=node, code=code, reason=reason, grace_s=job.grace.limit_s())


def _close(job: Job, now: Time) -> list[AnyAction]:
    assert job.ended is not None
    if job.membership.nodes() or job.closed:
        return []
    job.closed = True
    job.ended = Ended(code=job.ended.code, reason=job.ended.reason, at=now)
    if job.ledger.fault_at is not None:
        books.stopped(job.ledger, now)
    for rank in list(job.ledger.accounts):
        books.book(job.ledger, rank, now)
    return [CloseJob(code=job.ended.code, reason=job.ended.reason)]


def _on_tick(job: Job, event: Tick, now: Time) -> list[AnyAction]:
    actions: list[AnyAction] = []
    if job.absent_until is not None and job.absent_until <= now:
        for node, absence in list(job.absent.items()):
            if absence.until <= now:
                actions += _forget(job, node, "its stream ended", absence.since, now)
        job.absent_until = min((a.until for a in job.absent.values()), default=None)
    actions += requests.times_up(job.desk, now)
    return actions + (_settle(job, now) if job.ended is None else _close(job, now))


def _on_opened_again(job: Job, event: JobOpened, now: Time) -> list[AnyAction]:
    return []


_HANDLERS: dict[type, Callable[[Job, Any, Time], list[AnyAction]]] = {
    JobOpened: _on_opened_again,
    NodeJoined: _on_joined,
    NodeWarm: _on_warm,
    NodeReady: _on_ready,
    ExcludeAsked: _on_exclude_asked,
    StopAsked: _on_stop_asked,
    Asked: _on_asked,
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
    requests.validate(job.desk, _attendance(job))
    ranks = job.ranks.values()
    assert job.to_start == sum(not r.started for r in ranks), "miscounted starts"
    assert job.to_step == sum(not r.stepped for r in ranks), "miscounted steps"
    assert job.to_finish == sum(not r.finished for r in ranks), "miscounted ends"
    assert (job.fault is None) or job.membership.world is None, "a broken world is in force"
    assert [i.id for i in job.incidents] == list(range(1, len(job.incidents) + 1))
    assert sum(i.closed_at is None for i in job.incidents) <= 1, "two incidents are open"
    if job.membership.world is None or job.ended is not None:
        assert job.desk == Desk(), "what a round shared outlived it"
    if job.membership.world is not None:
        assert len(job.ranks) == job.membership.world.size, "ranks beside the world"
