"""What workers do: they start, finish steps, and end one way or another."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.checkpoints import finish, on_rank_ended
from holdfast.core.hangs import rules as hangs
from holdfast.core.ledger import books
from holdfast.core.recovery import rules as faults
from holdfast.core.repair import break_round, grow
from holdfast.core.requests import desk as requests
from holdfast.core.scripts import attendance
from holdfast.core.slowness import on_timings
from holdfast.core.state import Job, Pace, RankState, rank_in_force
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import Progress, WorkerExited, WorkerStarted
from holdfast.messages.records import RankProgress
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time


def on_started(job: Job, event: WorkerStarted, now: Time) -> list[AnyAction]:
    rank = rank_in_force(job, event.node, event.round, event.rank)
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


def _note_paces(job: Job, event: Progress) -> None:
    if event.paces is not None:
        hangs.note_paces(job.hangs, event.node, event.paces)


def on_progress(job: Job, event: Progress, now: Time) -> list[AnyAction]:
    all_progressed(job, event.node, event.round, event.ranks)
    _note_paces(job, event)
    slow = on_timings(job, event, now)
    if slow:
        return slow
    wished = job.saves_at_wish is not None and job.saves != job.saves_at_wish
    return grow(job, now) if wished else []


def all_progressed(
    job: Job, node: NodeId, round: RoundNumber, ranks: Iterable[RankProgress]
) -> None:
    for progress in ranks:
        rank = rank_in_force(job, node, round, progress.rank)
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
    incident = job.last_fault
    if incident is not None and incident.round < job.membership.round:
        incident.lost_steps = max(0, incident.step - job.resumed_at)


def _note_pace(job: Job, step: StepNumber, at: Time) -> None:
    last = job.pace
    if last is None or step <= last.step:
        job.pace = Pace(step, at)
    elif at - last.at >= 0.5:
        job.pace = Pace(step, at, (step - last.step) / (at - last.at))


def on_exited(job: Job, event: WorkerExited, now: Time) -> list[AnyAction]:
    rank = rank_in_force(job, event.node, event.round, event.rank)
    if rank is None or rank.finished or job.ended is not None:
        return []
    all_progressed(job, event.node, event.round, [event.progress])
    if job.fault is None and job.membership.world is None:
        return []  # Its round is broken and judged already.
    if event.code == 0:
        return _finished(job, event.rank, rank, event.at, now)
    fault = faults.fault_of(event, event.progress.step or job.highest)
    return break_round(job, fault, now)


def _finished(job: Job, number: Rank, rank: RankState, at: Time, now: Time) -> list[AnyAction]:
    if job.fault is not None:
        return []
    rank.finished = True
    job.to_finish -= 1
    books.enter(job.ledger, "idle", at, number)
    if job.to_finish > 0:
        answers = requests.rank_ended(job.desk, number, attendance(job))
        return [*answers, *on_rank_ended(job, now)]
    incident = job.open_incident
    if incident is not None:
        incident.closed_at = at
    return finish(job, now)
