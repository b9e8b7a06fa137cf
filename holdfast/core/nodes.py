"""What nodes do: they join, get ready, leave, vanish, and come back.

A node without a stream is absent, not lost: it has a moment to come back, and is then told what it
missed. One that comes back later finds itself fenced, and joins as another node.
"""

from __future__ import annotations

from holdfast.core.checkpoints import take_in
from holdfast.core.commits import rules as commits
from holdfast.core.membership import rounds
from holdfast.core.membership.patience import RECONNECT_AFTER_RESTART_S, RECONNECT_S
from holdfast.core.nodecheck import schedule as checking
from holdfast.core.recovery import rules as faults
from holdfast.core.repair import (
    break_round,
    close_job,
    finish_job,
    finish_node,
    go_on_checking,
    goodbye,
    grow,
    leave_check,
    send_off,
    settle,
    start_node,
    stop_node,
)
from holdfast.core.requests import desk as requests
from holdfast.core.state import Absence, Job
from holdfast.core.workers import all_progressed
from holdfast.messages.actions import AnyAction, CloseJob, Finish, Prepare
from holdfast.messages.events import (
    CoordinatorRestarted,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    NodeResumed,
    NodeWarm,
    StreamEnded,
    Tick,
)
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_TRY_AGAIN
from holdfast.messages.units import NodeId, Time


def on_joined(job: Job, event: NodeJoined, now: Time) -> list[AnyAction]:
    if job.ended is not None:
        return [finish_node(job, event.node)]
    if event.spec.host in job.excluded:
        why = f"host {event.spec.host} is excluded: {job.excluded[event.spec.host]}"
        return [goodbye(job, event.node, EXIT_DO_NOT_REQUEUE, why)]
    actions: list[AnyAction] = []
    if event.node in job.membership.placed:
        actions += _node_gone(job, event.node, "it joined again", event.at, now)
        if job.ended is not None:
            return [*actions, finish_node(job, event.node)]
    rounds.join(job.membership, event.node, event.spec, event.store_port, now)
    if job.membership.world is not None:
        return [*actions, Prepare(node=event.node)]
    return actions + settle(job, now)


def on_warm(job: Job, event: NodeWarm, now: Time) -> list[AnyAction]:
    m = job.membership
    candidate = m.waiting.get(event.node) or m.placed.get(event.node) or m.busy.get(event.node)
    if candidate is None:
        return []
    if not candidate.warm:
        checking.warmed(job.checking, event.node, now)
    candidate.warm = True  # Said once: a node that is placed now may wait for a place later.
    return grow(job, now) if event.node in m.waiting else []


def on_ready(job: Job, event: NodeReady, now: Time) -> list[AnyAction]:
    if not rounds.ready(job.membership, event.node, event.round, event.store_port):
        return []
    if event.slowest_stop_s is not None:
        job.grace.observe(event.slowest_stop_s)
    if job.ledger.noticed_at is not None:
        job.patience.observe(max(0.0, now - job.ledger.noticed_at))
    all_progressed(job, event.node, event.round, event.ranks)
    return settle(job, now)


def on_leaving(job: Job, event: NodeLeaving, now: Time) -> list[AnyAction]:
    if job.ended is not None or not job.membership.has(event.node):
        return []
    if job.membership.count() - 1 < job.terms.min_nodes:
        return finish_job(job, event.code, event.reason, now)
    why = f"left: {event.reason}"
    return send_off(job, "leave", event.node, event.code, why, now)


def on_left(job: Job, event: NodeLeft, now: Time) -> list[AnyAction]:
    all_progressed(job, event.node, event.round, event.ranks)
    return _node_gone(job, event.node, "it left", event.at, now)


def on_stream_ended(job: Job, event: StreamEnded, now: Time) -> list[AnyAction]:
    if job.membership.has(event.node):
        _miss(job, event.node, Absence(event.at, Time(now + RECONNECT_S)))
    return []


def on_restarted(job: Job, event: CoordinatorRestarted, now: Time) -> list[AnyAction]:
    for node in job.membership.nodes():
        _miss(job, node, Absence(now, Time(now + RECONNECT_AFTER_RESTART_S)))
    checking.restarted(job.checking, now)
    if job.closed:  # It died with the last event written and its own end not yet reached.
        assert job.ended is not None
        return [CloseJob(code=job.ended.code, reason=job.ended.reason)]
    return []


def _miss(job: Job, node: NodeId, absence: Absence) -> None:
    job.absent[node] = absence
    job.absent_until = min(absence.until, job.absent_until or absence.until)


def on_resumed(job: Job, event: NodeResumed, now: Time) -> list[AnyAction]:
    """Tell a node again what it may have missed while it had no stream."""
    job.absent.pop(event.node, None)
    m = job.membership
    if not m.has(event.node) and job.ended is None:
        return [_fence(event.node)]
    reminders = commits.remind(job.commits, event.node)
    if job.ended is not None:
        return [*reminders, finish_node(job, event.node)]
    return reminders + _missed(job, event, now)


def _missed(job: Job, event: NodeResumed, now: Time) -> list[AnyAction]:
    m = job.membership
    if event.round > m.round:
        return _relearn(job, event, now)
    if event.node in m.busy:
        held = m.busy[event.node]
        if event.round == held.round:
            return [stop_node(job, event.node, held.round)]
        # It was never told to start the round that is being stopped: it has no workers of it.
        rounds.ready(m, event.node, held.round, held.store_port)
        return settle(job, now)
    if event.node in m.placed and m.world is not None and event.round < m.round:
        seat = m.placed[event.node].seat
        assert seat is not None
        return [start_node(job, m.world, m.world.places[seat])]
    if event.node in m.waiting and m.world is not None:
        return [Prepare(node=event.node)]
    return checking.remind(job.checking, m, event.node)


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
    return break_round(job, fault, now) + settle(job, now)


def _fence(node: NodeId) -> Finish:
    """What a node is told that comes back after it was given up: end all, and join afresh."""
    why = "this node was given up while it was away; it joins again as a new one"
    return Finish(node=node, code=EXIT_TRY_AGAIN, reason=why, grace_s=0.0, rejoin=True)


def _node_gone(job: Job, node: NodeId, why: str, at: Time, now: Time) -> list[AnyAction]:
    actions = _forget(job, node, why, at, now)
    return actions + (settle(job, now) if job.ended is None else close_job(job, now))


def _forget(job: Job, node: NodeId, why: str, at: Time, now: Time) -> list[AnyAction]:
    """Strike a node off; if the round in force is broken by that, the others have to stop."""
    freed = take_in(job, commits.node_gone(job.commits, node), now)
    round = job.membership.round
    stopping = job.fault is not None and node in job.membership.busy
    broken = rounds.leave(job.membership, node)
    job.absent.pop(node, None)
    if job.ended is None and (broken or stopping):
        # Others often notice first: their ranks fail in the collective they shared with the lost.
        fault = faults.lost_node(node, round, job.highest, why, at)
        freed += break_round(job, fault, now)
    return freed + leave_check(job, node, now)


def on_tick(job: Job, event: Tick, now: Time) -> list[AnyAction]:
    actions: list[AnyAction] = []
    if job.absent_until is not None and job.absent_until <= now:
        for node, absence in list(job.absent.items()):
            if absence.until <= now:
                actions += _forget(job, node, "its stream ended", absence.since, now)
        job.absent_until = min((a.until for a in job.absent.values()), default=None)
    m = job.membership
    if m.patient_until is not None and m.patient_until <= now:
        m.patient_until = None
    actions += requests.times_up(job.desk, now)
    if checking.is_late(job.checking, now):
        actions += checking.hurry(job.checking, m, now)
        if checking.is_over(job.checking):
            actions += go_on_checking(job, now)
    return actions + (settle(job, now) if job.ended is None else close_job(job, now))
