"""From a broken round to the next one, or to the end of the job.

    break_round    open the incident, dissolve the world, tell every node to stop
    settle         once every node is ready: judge, then freeze the next round if it may be
    grow           break a round on purpose, because more nodes wait for a place
    finish_job     tell every node to finish; with the last one gone, close_job

Judging waits until all nodes are ready, because only then is it known who died first, and it costs
nothing: whatever the verdict, the workers had to be stopped before.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.core.chaos import plans as chaos
from holdfast.core.commits import rules as commits
from holdfast.core.commits import state as commitbook
from holdfast.core.commits.replica_placement import placement
from holdfast.core.hangs import rules as hangs
from holdfast.core.ledger import books
from holdfast.core.membership import rounds
from holdfast.core.membership.patience import JOIN_LIMIT_S
from holdfast.core.nodecheck import schedule as checking
from holdfast.core.recovery import rules as faults
from holdfast.core.recovery.rules import Fault, Stop
from holdfast.core.requests import desk as requests
from holdfast.core.requests.desk import Desk
from holdfast.core.state import Job, RankState
from holdfast.core.stragglers import windows as stragglers
from holdfast.messages.actions import (
    AnyAction,
    CloseJob,
    Finish,
    Prepare,
    StartWorkers,
    StopWorkers,
)
from holdfast.messages.checkpoints import Holder
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_TRY_AGAIN
from holdfast.messages.records import Ended, FaultKind, Incident, Place, World
from holdfast.messages.units import NodeId, Rank, RoundNumber, Time

ALSO_AT_MOST = 100
"""Of the deaths in a fault's wake so many are told: there can be one for each of 80,000 ranks."""


def break_round(job: Job, fault: Fault, now: Time) -> list[AnyAction]:
    """The round in force is broken: open the incident, or learn more about the one just opened."""
    if job.fault is not None:
        _blame(job, fault)
        return []
    last = job.open_incident
    if last is not None:
        last.closed_at = fault.at
        last.action += "; failed again before the first step"
    job.fault = fault
    checking.abandon(job.checking)
    job.incidents.append(_incident(len(job.incidents) + 1, fault, now))
    books.broke(job.ledger, fault.at, now)
    rounds.dissolve(job.membership, Time(now + job.patience.limit_s()))
    stops = [stop_node(job, node, held.round) for node, held in job.membership.busy.items()]
    answers = _close_desk(job, f"{faults.subject(fault)} {fault.signature}")
    if fault.kind == "hang":
        answers = []  # Whoever waits is to be looked at as it waits, and ended then.
    return [*stops, *commits.secure(job.commits), *answers]


def stop_node(job: Job, node: NodeId, round: RoundNumber) -> StopWorkers:
    incident = job.last_fault
    assert incident is not None
    why = f"{faults.subject(incident)} {incident.signature}"
    # A rank that hangs does not end by itself, and the others wait for it.
    hangs = incident.kind == "hang"
    grace_s = 0.0 if hangs else job.grace.limit_s()
    examine = incident.id if hangs else 0
    return StopWorkers(node=node, round=round, grace_s=grace_s, why=why, examine=examine)


def _blame(job: Job, fault: Fault) -> None:
    assert job.fault is not None
    incident = job.last_fault
    assert incident is not None
    guilty = faults.culprit(job.fault, fault)
    other = fault if guilty is job.fault else job.fault
    if len(incident.also) < ALSO_AT_MOST:
        incident.also.append(f"{faults.subject(other)} {other.signature}")
    if guilty is not job.fault:
        better = _incident(incident.id, guilty, incident.opened_at)
        better.also = incident.also
        job.incidents[incident.id - 1] = better
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


def grow(job: Job, now: Time) -> list[AnyAction]:
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
    return break_round(job, fault, now)


def settle(job: Job, now: Time) -> list[AnyAction]:
    """Without a world in force: judge what broke the last one, and freeze the next if it may be."""
    m = job.membership
    if job.ended is not None or m.world is not None:
        return []
    if job.fault is not None:
        if rounds.must_wait(m):
            return []
        stop = _judge(job, job.fault, now)
        if stop is not None:
            return finish_job(job, stop.code, stop.reason, now)
    if job.checking.check is not None:
        return []
    actions = _part_with_sick(job, now)
    if job.terms.node_check and rounds.may_close(m, now) and checking.due(job.checking, m):
        return actions + _check(job, now)
    world = _close(job, now)
    if world is not None:
        job.short_until = None
        return actions + _start(job, world, now)
    if job.ledger.waiting_since is None and not m.busy:
        books.wait(job.ledger, now)
    return actions + _mind_shortage(job, now)


def _close(job: Job, now: Time) -> World | None:
    m = job.membership
    unchecked = checking.set_aside(job.checking, m) if job.terms.node_check else {}
    world = rounds.close(m, now)
    m.waiting.update(unchecked)
    return world


# ---- nodes that are tested ---------------------------------------------------------------------


def _check(job: Job, now: Time) -> list[AnyAction]:
    # As many as are needed are there: from here on it is the check that takes its time.
    job.short_until = job.membership.closes_at = None
    if job.ledger.waiting_since is None and not job.membership.busy:
        books.wait(job.ledger, now)
    return checking.begin(job.checking, job.membership, now)


def go_on_checking(job: Job, now: Time) -> list[AnyAction]:
    """A round of tests is over: the next one, or the verdicts, and with them the next round."""
    actions = checking.go_on(job.checking, job.membership, now)
    if job.checking.until is not None:
        return actions
    verdicts = checking.take_verdicts(job.checking)
    faulty = {one.node: one.reason for one in verdicts if one.verdict == "faulty"}
    if faulty and len(faulty) == job.membership.count():
        return _nobody_passed(job, faulty, now)
    for node, why in faulty.items():
        actions += _send_away(job, node, why, now)
    for one in verdicts:
        if one.verdict == "slow" and job.terms.exclude_stragglers and can_do_without(job):
            actions += _send_away(job, one.node, one.reason, now)
        elif one.verdict not in ("healthy", "faulty"):
            note_unfit(job, one.node, f"{one.verdict}: {one.reason}", "", now)
    return actions + settle(job, now)


def _nobody_passed(job: Job, faulty: dict[NodeId, str], now: Time) -> list[AnyAction]:
    """There is nobody who could wait for better nodes."""
    for node, why in faulty.items():
        job.excluded[job.membership.waiting[node].spec.host] = why
        note_unfit(job, node, why, "the job ends", now)
    node, why = next(iter(faulty.items()))
    others = f", and so did {len(faulty) - 1} more" if len(faulty) > 1 else ""
    reason = f"no node is fit to train: node {node} {why}{others}"
    return finish_job(job, EXIT_DO_NOT_REQUEUE, reason, now)


def leave_check(job: Job, node: NodeId, now: Time) -> list[AnyAction]:
    """A node is gone from the job: a check that it took part in goes on without it."""
    actions = checking.lost(job.checking, job.membership, node)
    if job.ended is None and checking.is_over(job.checking):
        return go_on_checking(job, now)
    return actions


def _part_with_sick(job: Job, now: Time) -> list[AnyAction]:
    """Nodes that the job could not do without when their own checks failed: perhaps it can now."""
    m = job.membership
    actions: list[AnyAction] = []
    for node, why in list(job.checking.sick.items()):
        if node in m.waiting and can_do_without(job) and rounds.may_close(m, now):
            actions += _send_away(job, node, why, now)
    return actions


def can_do_without(job: Job) -> bool:
    """Whether the job has more nodes than it needs."""
    return job.membership.count() - 1 >= max(1, job.terms.min_nodes)


def _send_away(job: Job, node: NodeId, why: str, now: Time) -> list[AnyAction]:
    """A node that is not fit has no place, nor has its host from now on."""
    job.excluded[job.membership.waiting[node].spec.host] = why
    note_unfit(job, node, why, "the job goes on without it", now)
    rounds.leave(job.membership, node)
    checking.lost(job.checking, job.membership, node)
    return [goodbye(job, node, EXIT_DO_NOT_REQUEUE, f"this node is unfit: {why}")]


def note_unfit(job: Job, node: NodeId, why: str, action: str, now: Time) -> None:
    job.incidents.append(
        Incident(
            id=len(job.incidents) + 1,
            kind="unfit",
            node=node,
            rank=None,
            round=job.membership.round,
            step=job.highest,
            signature=f"is unfit: {why}",
            action=action or "training goes on with it",
            fault_at=now,
            opened_at=now,
            closed_at=now,
        )
    )


def _judge(job: Job, fault: Fault, now: Time) -> Stop | None:
    verdict = faults.judge(job.recovery, fault, job.highest)
    if fault.kind not in faults.WANTED:
        job.checking.done.clear()  # Whatever it was, look again.
    incident = job.last_fault
    assert incident is not None
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
    if job.excluded:
        host, why = next(reversed(job.excluded.items()))
        more = f" and {len(job.excluded) - 1} more are" if len(job.excluded) > 1 else " is"
        reason += f"; host {host}{more} excluded ({why})"
    return finish_job(job, EXIT_TRY_AGAIN, reason, now)


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
    job.checking.row = 0
    # What was found out about the ranks of another round is nothing to these.
    job.findings, job.found = [], 0
    incident = job.open_incident
    if incident is not None:
        incident.frozen_at = now
    hosts = {Rank(r): s.node for r, s in job.ranks.items()}
    specs = {n: c.spec.host for n, c in job.membership.placed.items()}
    stragglers.renew(job.stragglers, {r: specs[n] for r, n in hosts.items()}, job.highest)
    job.copies = _place_copies(job, world)
    chaos.begin_round(job.chaos, world)
    leftovers = [Prepare(node=node) for node in job.membership.waiting]
    return [*(start_node(job, world, place) for place in world.places), *leftovers]


def start_node(job: Job, world: World, place: Place) -> StartWorkers:
    restarts, limit = job.recovery.restarts, job.terms.max_restarts or 0
    ranks = [Rank(r) for r in range(place.first_rank, place.first_rank + place.slots)]
    paces = hangs.paces(job.hangs)
    copies = tuple(_holder(job, node) for node in job.copies.get(place.node, ()))
    fetch = commits.wanted_images(job.commits, ranks, place.node, world.size, reach(job))
    part = replace(
        rounds.part_of(world, place, restarts, limit),
        copies=copies,
        fetch=fetch,
        paces=paces,
        alarms=job.hangs.alarms,
        traps=chaos.set_on(job.chaos, place.node),
    )
    return StartWorkers(node=place.node, part=part)


def reach(job: Job) -> commitbook.Reach:
    """Where a node's keeper is to be found."""
    m = job.membership

    def of(node: NodeId) -> commitbook.Address | None:
        held = m.placed.get(node) or m.busy.get(node) or m.waiting.get(node)
        return None if held is None else (held.spec.address, held.spec.keeper_port)

    return of


def _holder(job: Job, node: NodeId) -> Holder:
    spec = job.membership.placed[node].spec
    return Holder(Rank(0), node, spec.address, spec.keeper_port)


def _place_copies(job: Job, world: World) -> dict[NodeId, list[NodeId]]:
    """Which nodes keep copies of which others' images, in this round."""
    nodes = [place.node for place in world.places]
    specs = [job.membership.placed[node].spec for node in nodes]
    domains = [f"{spec.block}/{spec.switch}" for spec in specs]
    hosts = [spec.host for spec in specs]
    placed = placement(len(nodes), 1 + job.terms.copies, 1, domains, hosts)
    return {node: [nodes[i] for i in peers] for node, peers in zip(nodes, placed, strict=True)}


def send_off(
    job: Job, kind: FaultKind, node: NodeId, code: int, why: str, now: Time
) -> list[AnyAction]:
    """Part with a node in peace; the others go on in a new round."""
    actions: list[AnyAction] = [goodbye(job, node, code, why)]
    round = job.membership.round
    if rounds.leave(job.membership, node):
        actions += break_round(job, faults.wanted(kind, node, round, job.highest, why, now), now)
    return actions + leave_check(job, node, now) + settle(job, now)


def finish_job(job: Job, code: int, reason: str, now: Time, secure: bool = True) -> list[AnyAction]:
    """End it. One that does not end well has its newest snapshots written, unless that just failed."""
    job.ended = Ended(code=code, reason=reason, at=now)
    job.membership.closes_at = job.short_until = None
    checking.abandon(job.checking)
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
    answers = [*(commits.secure(job.commits) if code and secure else []), *_close_desk(job, reason)]
    nodes = job.membership.nodes()
    return [*answers, *(finish_node(job, node) for node in nodes)] if nodes else close_job(job, now)


def finish_node(job: Job, node: NodeId) -> Finish:
    assert job.ended is not None
    return goodbye(job, node, job.ended.code, job.ended.reason)


def goodbye(job: Job, node: NodeId, code: int, reason: str) -> Finish:
    return Finish(node=node, code=code, reason=reason, grace_s=job.grace.limit_s())


def close_job(job: Job, now: Time) -> list[AnyAction]:
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


def _close_desk(job: Job, why: str) -> list[AnyAction]:
    """What the scripts shared ends with their round."""
    commits.round_over(job.commits)
    hangs.round_over(job.hangs)
    desk, job.desk = job.desk, Desk()
    return [*requests.close(desk, why)]
