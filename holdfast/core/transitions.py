"""How a job passes from one state to the next, and how decisions are carried out.

    a fault ──▶ break_round    the incident opens, the world is dissolved, every node is told to stop
    every node is ready ──▶ settle    all deaths of the round are known: the culprit is judged
                            ├── try again: the next round is frozen, every node gets its part
                            └── give up: every node is told to finish
    every rank has finished a step ──▶ the incident closes

Judging waits until all nodes are ready, because only then is it known who died first, and it costs
nothing: whatever the verdict, the workers had to be stopped before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.core import faults, ladder
from holdfast.core.decisions import (
    AnswerRequest,
    BreakRound,
    Effect,
    EndJob,
    Exclude,
    LoseNode,
    Note,
    Repeat,
    Requeue,
    Rescale,
    SendAway,
    Settle,
    Tell,
)
from holdfast.core.faults import Fault
from holdfast.core.machine import Effects, Machine
from holdfast.core.membership import rounds
from holdfast.core.membership.events import shortage
from holdfast.core.patience import JOIN_LIMIT_S
from holdfast.core.recovery import rules as recovery_rules
from holdfast.core.states import (
    FOLLOWS,
    OVER,
    AnyState,
    Ended,
    Ending,
    Gathering,
    Running,
    Stopping,
)
from holdfast.core.view import Candidate
from holdfast.messages.actions import (
    AnyAction,
    CloseJob,
    KeepEvidence,
    Prepare,
    StartWorkers,
    StopWorkers,
)
from holdfast.messages.exits import EXIT_TRY_AGAIN
from holdfast.messages.records import JobResult, Place, World
from holdfast.messages.units import NodeId, RoundNumber, Time

if TYPE_CHECKING:
    from holdfast.core.job import Job

NO_PROCESS = recovery_rules.Keeping(any=False)


def carry_out(job: Job, effects: Iterable[Effect], now: Time) -> list[AnyAction]:
    """Carry out decisions, in their order; the actions that are left, and those that follow."""
    actions: list[AnyAction] = []
    for effect in effects:
        step = STEPS.get(type(effect))
        actions += [effect] if step is None else step(job, effect, now)  # type: ignore[list-item]
    return actions


def announce(
    job: Job, moment: Callable[..., Effects], *arguments: Any, now: Time
) -> list[AnyAction]:
    """Let every machine hear of a moment, and carry out what they decide."""
    return carry_out(job, heard(job, moment.__name__, arguments, now), now)


def heard(job: Job, moment: str, arguments: tuple[Any, ...], now: Time) -> list[Effect]:
    effects: list[Effect] = []
    for hear in job.hearers[moment]:
        effects += hear(job, *arguments, now)
    return effects


def enter(job: Job, state: AnyState) -> None:
    before = type(job.state)
    assert type(state) in FOLLOWS[before], f"{before.__name__} to {type(state).__name__}"
    job.state = state


# ---- a round ends ------------------------------------------------------------------------------


def _break_round(job: Job, decision: BreakRound, now: Time) -> list[AnyAction]:
    """Stop the workers of the round, or learn more about the fault that broke it."""
    fault = decision.fault
    if isinstance(job.state, OVER):
        return []
    if isinstance(job.state, Stopping):
        enter(job, Stopping(job.recovery.blame(job.state.fault, fault)))
        return []
    incident = job.recovery.open(fault, job.cause, now)
    enter(job, Stopping(fault))
    effects = heard(job, Machine.round_ended.__name__, (fault,), now)
    busy = job.membership.busy
    actions: list[AnyAction] = [_stop_node(job, node, held.round) for node, held in busy.items()]
    if fault.examination:
        actions.append(KeepEvidence(examination=fault.examination, incident=incident.id))
    return [*actions, *carry_out(job, effects, now)]


def _stop_node(job: Job, node: NodeId, round: RoundNumber) -> StopWorkers:
    incident = job.recovery.last_fault
    assert incident is not None
    hurries = incident.kind == "hang" or job.membership.hurries
    fault = job.state.fault if isinstance(job.state, Stopping) else None
    keeping = recovery_rules.keeping(job.recovery.history, fault) if fault else NO_PROCESS
    stays = keeping.any and not job.membership.hurries
    return StopWorkers(
        node=node,
        round=round,
        # A rank that hangs does not end by itself, and the others wait for it.
        grace_s=0.0 if hurries else job.membership.grace.limit_s(),
        why=f"{faults.subject(incident)} {incident.signature}",
        look=fault is not None and fault.unexplained,
        leave_s=job.membership.leave.limit_s() if stays else 0.0,
        replace=keeping.without,
    )


# ---- and the next begins -----------------------------------------------------------------------


def settle(job: Job, now: Time) -> list[AnyAction]:
    """Without a world in force: judge what broke the last one, and freeze the next if it may be."""
    actions: list[AnyAction] = []
    if isinstance(job.state, Stopping) and not rounds.must_wait(job.membership):
        actions += _judge(job, job.state.fault, now)
    if isinstance(job.state, Gathering):
        actions += _gather(job, job.state, now)
    if isinstance(job.state, Ending) and not job.membership.nodes():
        actions += _close(job, job.state.result, now)
    return actions


def _judge(job: Job, fault: Fault, now: Time) -> list[AnyAction]:
    m = job.membership
    fault = job.recovery.explain(job, fault)
    there = ladder.Resources(
        seats=len(m.seats),
        survivors=sum(one.round == m.round for one in [*m.waiting.values(), *m.busy.values()]),
        formable=m.formable({**m.waiting, **m.busy}),
        needed=max(1, job.terms.min_nodes),
        ranks=len(job.ranks),
        parked=sum(one.parked for one in m.waiting.values() if one.round == m.round),
        platform=job.supply.active,
    )
    rung = job.recovery.judge(job, fault, there, now)
    actions = announce(job, Machine.round_stopped, fault, now=now)
    if isinstance(rung, ladder.Stop):
        return actions + _end(job, EndJob(code=rung.code, reason=rung.reason), now)
    enter(job, Gathering())
    return actions


def _gather(job: Job, state: Gathering, now: Time) -> list[AnyAction]:
    m = job.membership
    actions: list[AnyAction] = []
    while not _held(job):
        before = heard(job, Machine.before_round.__name__, (), now)
        if not before:
            break
        actions += carry_out(job, before, now)
    if job.state is not state:
        return actions
    if _held(job):
        # As many nodes as are needed are there: from here on it is the check that takes its time.
        state.short_until = m.closes_at = None
        return actions
    world = rounds.close(m, now, _withheld(job))
    if world is not None:
        return actions + _begin_round(job, world, now)
    actions += announce(job, Machine.round_awaited, now=now)
    return actions + _mind_shortage(job, state, now)


def _withheld(job: Job) -> list[NodeId]:
    """Gather the nodes that get no place yet; each machine is asked about those that are left."""
    withheld: list[NodeId] = []
    waiting: Mapping[NodeId, Candidate] = job.membership.waiting
    for ask in job.hearers["withheld"]:
        named = set(ask(job, waiting))
        if named:
            withheld += (node for node in waiting if node in named)
            waiting = {node: one for node, one in waiting.items() if node not in named}
    return withheld


def _held(job: Job) -> bool:
    over = not isinstance(job.state, Gathering)
    return over or any(asked() for asked in job.hearers["holds_round"])


def _mind_shortage(job: Job, state: Gathering, now: Time) -> list[AnyAction]:
    """With fewer nodes than the job needs, wait for more, but not for ever."""
    m = job.membership
    if m.count() >= job.terms.min_nodes and (m.busy or m.closes_at is not None):
        state.short_until = None
        return []
    limit_s = job.terms.join_limit_s
    if limit_s is None and job.supply.active and m.count() < job.terms.min_nodes:
        # Supply sees to it: it knows what the platform was asked for, and when. What it does not see
        # is that the nodes that came form no complete segments.
        state.short_until = None
        return []
    if state.short_until is None:
        state.short_until = Time(now + (JOIN_LIMIT_S if limit_s is None else limit_s))
    if now < state.short_until:
        return []
    return _end(job, EndJob(code=EXIT_TRY_AGAIN, reason=shortage(m)), now)


def _begin_round(job: Job, world: World, now: Time) -> list[AnyAction]:
    enter(job, Running(world))
    actions = announce(job, Machine.round_began, world, now=now)
    starts = [_start_node(job, world, place) for place in world.places]
    leftovers = [Prepare(node=node) for node in job.membership.waiting]
    return [*actions, *starts, *leftovers]


def _start_node(job: Job, world: World, place: Place) -> StartWorkers:
    restarts, limit = job.recovery.history.restarts, job.terms.max_restarts or 0
    fields: dict[str, Any] = {}
    for contribute in job.hearers["part_of"]:
        fields |= contribute(job, world, place)
    part = replace(rounds.part_of(world, place, restarts, limit), **fields)
    return StartWorkers(node=place.node, part=part)


def _repeat(job: Job, decision: Repeat, now: Time) -> list[AnyAction]:
    """Tell a node that was away to stop or to start, if it does not know yet."""
    m, node = job.membership, decision.node
    held = m.busy.get(node)
    if held is not None and held.round == decision.round:
        return [_stop_node(job, node, held.round)]
    if node in m.placed and isinstance(job.state, Running) and decision.round < m.round:
        seat, world = m.placed[node].seat, job.state.world
        assert seat is not None
        return [_start_node(job, world, world.places[seat])]
    return []


# ---- nodes go ----------------------------------------------------------------------------------


def _lose_node(job: Job, decision: LoseNode, now: Time) -> list[AnyAction]:
    """Strike a node off; if the round in force is broken by that, the others have to stop."""
    node, round = decision.node, job.membership.round
    stopping = isinstance(job.state, Stopping) and node in job.membership.busy
    placed = rounds.leave(job.membership, node)
    actions = announce(job, Machine.node_lost, node, placed, now=now)
    if placed or stopping:
        # Others often notice first: their ranks fail in the collective they shared with the lost.
        fault = faults.lost_node(node, round, job.highest, decision.why, decision.at)
        actions += _break_round(job, BreakRound(fault=fault), now)
    return actions


def _send_away(job: Job, decision: SendAway, now: Time) -> list[AnyAction]:
    m, node, why = job.membership, decision.node, decision.why
    actions: list[AnyAction] = [m.goodbye(node, decision.code, why)]
    round = m.round
    if rounds.send_away(m, node):
        fault = faults.wanted(decision.kind, node, round, job.highest, why, now)
        actions += _break_round(job, BreakRound(fault=fault), now)
    return actions + announce(job, Machine.node_sent_away, node, now=now)


def _exclude(job: Job, decision: Exclude, now: Time) -> list[AnyAction]:
    member = job.membership.find(decision.node)
    if member is not None:
        job.membership.excluded[member.spec.host] = decision.why
    return []


def _rescale(job: Job, decision: Rescale, now: Time) -> list[AnyAction]:
    """Want another number of nodes. A world that is too large for it ends at once; one that is too
    small trains on, and grows when nodes come."""
    m = job.membership
    job.terms = m.terms = replace(
        job.terms,
        min_nodes=decision.min_nodes,
        max_nodes=decision.max_nodes,
        spares=decision.spares,
    )
    size, most = len(m.placed), rounds.most_nodes(m)
    if size <= most:
        return carry_out(job, m.rescaled(job, now), now)
    why = f"scaled down: from {size} to {most} nodes"
    fault = faults.wanted("resize", NodeId(""), m.round, job.highest, why, now)
    return _break_round(job, BreakRound(fault=fault), now)


# ---- the job ends ------------------------------------------------------------------------------


def _end(job: Job, decision: EndJob, now: Time) -> list[AnyAction]:
    """Tell every node to finish."""
    if isinstance(job.state, OVER):
        return []
    result = JobResult(code=decision.code, reason=decision.reason, at=now)
    enter(job, Ending(result))
    actions = announce(job, Machine.job_ended, result, decision.secure, now=now)
    m = job.membership
    return actions + [m.dismiss(node, result) for node in m.nodes()]


def _close(job: Job, ended: JobResult, now: Time) -> list[AnyAction]:
    result = replace(ended, at=now)
    enter(job, Ended(result))
    actions = announce(job, Machine.job_closed, result, now=now)
    return [*actions, CloseJob(code=result.code, reason=result.reason)]


def _requeue(job: Job, decision: Requeue, now: Time) -> list[AnyAction]:
    """Go on with a job whose nodes are all gone: it waits for others, as after any lost node."""
    m, since = job.membership, decision.since
    result = job.result
    why = (
        f"requeued after it ended: {result.reason}" if result else "requeued after it was cut short"
    )
    if result is not None:
        since = result.at
        enter(job, Gathering())
    actions = announce(job, Machine.job_requeued, since, now=now)
    fault = faults.wanted("requeue", NodeId(""), m.round, job.highest, why, since)
    actions += _break_round(job, BreakRound(fault=fault), now)
    for node in m.known():
        rounds.leave(m, node)
        actions += announce(job, Machine.node_lost, node, False, now=now)
    return actions


# ---- the rest ----------------------------------------------------------------------------------


def _tell(job: Job, decision: Tell, now: Time) -> list[AnyAction]:
    effects = heard(job, decision.moment, decision.arguments, now)
    return carry_out(job, effects, now) if effects else []


def _note(job: Job, decision: Note, now: Time) -> list[AnyAction]:
    job.recovery.note(decision, job.cause, now)
    return []


def _answer(job: Job, decision: AnswerRequest, now: Time) -> list[AnyAction]:
    return [*job.requests.answer(decision.asker, decision.answer)]


STEPS: dict[type, Callable[[Job, Any, Time], list[AnyAction]]] = {
    Tell: _tell,
    Settle: lambda job, decision, now: [],
    BreakRound: _break_round,
    LoseNode: _lose_node,
    Repeat: _repeat,
    SendAway: _send_away,
    Exclude: _exclude,
    Rescale: _rescale,
    Requeue: _requeue,
    EndJob: _end,
    Note: _note,
    AnswerRequest: _answer,
}
