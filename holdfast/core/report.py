"""Derives reports from a job's state.

Reports depend on the state and the given time alone, so they are the same whether the job is running,
has ended, or was replayed from its journal on another machine. Every report reads the job through this
module; those who show reports know only `messages/reports.py`.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.core.chaos import plans as chaos
from holdfast.core.chaos.plans import Chaos, Plan
from holdfast.core.commits.state import Commits
from holdfast.core.faults import subject
from holdfast.core.hangs import rules as hangs
from holdfast.core.hangs.events import paces
from holdfast.core.hangs.events import scene as hang_scene
from holdfast.core.hangs.state import Hangs
from holdfast.core.job import Job
from holdfast.core.ledger import books
from holdfast.core.ledger.books import Ledger
from holdfast.core.nodecheck.schedule import Checking
from holdfast.core.shards import account
from holdfast.core.shards.state import Shards
from holdfast.core.states import Ended
from holdfast.core.stragglers import windows as stragglers
from holdfast.core.stragglers.windows import Stragglers
from holdfast.core.supply import wording as supply
from holdfast.core.suspects.state import Suspects
from holdfast.core.tuning import wording as tuning
from holdfast.core.tuning.state import Tunings
from holdfast.core.usage.events import NodeSamples
from holdfast.core.view import JobSpeed
from holdfast.messages.chaos import FaultsReport, InjectionReport
from holdfast.messages.records import Incident
from holdfast.messages.reports import (
    CAUSES,
    CheckpointerReport,
    DataAccount,
    GoodputReport,
    IncidentReport,
    JobState,
    NodeReport,
    NodeState,
    RankReport,
    StatusReport,
    SuspicionReport,
)
from holdfast.messages.tuning import LoaderConfig, TuningReport
from holdfast.messages.units import NodeId, Rank, Seconds, Time

REPORTED_WITHIN_S: Seconds = 3.0
"""Agents report finished steps every second, and a journal is read a little later."""


def status(job: Job, now: Time, alive: bool, with_nodes: bool = True) -> StatusReport:
    """Report where the job stands. `alive` says whether a process still runs it. The nodes of a large
    job cost most of it, and can be left out."""
    state = _state(job, alive)
    end = job.result
    no_step_s = _no_step_s(job, now) if state == "running" else None
    speed = _speed(job, no_step_s) if state == "running" else None
    loss = job.loss
    return StatusReport(
        job=job.name,
        state=state,
        round=job.membership.round,
        world_size=_world_size(job),
        step=job.highest,
        steps_per_s=_rounded(speed.steps_per_s, 3) if speed is not None else None,
        samples_per_s=_rounded(speed.samples_per_s, 3) if speed is not None else None,
        speed_stable=speed is not None and speed.stable,
        wall_s=round(_until(job, now) - job.opened_at, 3),
        restarts=job.recovery.history.restarts,
        nodes=_nodes(job) if with_nodes else [],
        checkpoints=_checkpoints(job),
        excluded=job.membership.excluded,
        faults=_faults(job),
        last_incident=incident_line(job, job.incidents[-1]) if job.incidents else None,
        exit_code=end.code if end is not None else None,
        reason=end.reason if end is not None else None,
        opened_at=job.opened_at,
        suspicion=suspicion(job, now),
        suspects=_suspects(job),
        refused={**job.refused, **job.recovery.refused},
        failed_tasks=job.recovery.failed_tasks,
        no_step_s=_rounded(no_step_s, 3),
        skipped_shards=account.skipped(job.of(Shards)),
        tuning=tunings(job),
        supply=supply.report(job.supply, job, now),
        requeues=job.requeues,
        loss=loss.value if loss is not None else None,
        loss_step=loss.step if loss is not None else None,
    )


def goodput(job: Job, now: Time) -> GoodputReport:
    """Report the seconds of all ranks by cause."""
    until = _until(job, now)
    wall_s = until - job.opened_at
    seconds = books.seconds_until(job.of(Ledger), until)
    total = books.rank_seconds(job.of(Ledger), until)
    ranks = total / wall_s if wall_s > 0 else float(len(job.ranks))
    productive_s, samples = seconds.get("productive", 0.0), job.of(Ledger).samples
    timed = samples.timed if samples is not None else 0.0
    whole = round(ranks)
    return GoodputReport(
        job=job.name,
        wall_s=round(wall_s, 6),
        ranks=whole if abs(ranks - whole) < 0.005 else round(ranks, 3),
        seconds={cause: round(seconds.get(cause, 0.0), 6) for cause in CAUSES},
        goodput=round(productive_s / total, 6) if total > 0 else 0.0,
        unknown_since=books.unknown_since(job.of(Ledger), until),
        samples=samples.used if samples is not None else None,
        redone_samples=samples.redone if samples is not None else None,
        samples_per_s=round(timed * ranks / productive_s, 3) if timed and productive_s else None,
    )


def data(job: Job) -> list[DataAccount]:
    """Report what was used of each data set, and how often."""
    return list(account.account(job.of(Shards)).values())


def incidents(job: Job) -> list[IncidentReport]:
    """Report each fault: what, where, what was done, and what it cost."""
    return [incident_report(job, incident) for incident in job.incidents]


# ---- an incident ---------------------------------------------------------------------------------


def incident_report(job: Job, incident: Incident) -> IncidentReport:
    return IncidentReport(
        id=incident.id,
        kind=incident.kind,
        node=incident.node,
        rank=incident.rank,
        round=incident.round,
        step=incident.step,
        at=incident.fault_at,
        signature=incident.signature,
        action=incident.action,
        rung=incident.rung or None,
        cause=incident.cause,
        phases={name: round(s, 6) for name, s in phases(incident).items()},
        lost_s=_rounded(lost_s(incident)),
        lost_steps=incident.lost_steps,
        also=incident.also,
        detail=incident.detail,
        injected=injected_by(job, incident) or None,
        line=incident_line(job, incident),
    )


def phases(incident: Incident) -> dict[str, Seconds]:
    """Split the repair into its phases, in order, as far as it has come; together they are `lost_s`.

    The marks come from the clocks of several nodes, which need not agree to the millisecond."""
    torn_down = [] if incident.gone_at is None else [("teardown", incident.gone_at)]
    marks = [
        *torn_down,
        ("detect", incident.opened_at),
        ("stop", incident.stopped_at),
        ("rendezvous", incident.frozen_at),
        ("start", incident.started_at),
        ("first_step", incident.back_at),
    ]
    found: dict[str, Seconds] = {}
    before = incident.fault_at
    for name, mark in marks:
        if mark is None:
            break
        until = mark if incident.back_at is None else min(mark, incident.back_at)
        found[name] = max(0.0, until - before)
        before = max(before, until)
    return found


def lost_s(incident: Incident) -> Seconds | None:
    """Time from the fault to the first good step, or to what ended the incident instead."""
    end = incident.back_at or incident.closed_at
    return None if end is None else max(0.0, end - incident.fault_at)


def incident_line(job: Job, incident: Incident) -> str:
    """Describe an incident in one line."""
    line = f"{_what(incident)} at step {incident.step}"
    injected = injected_by(job, incident)
    if injected:
        line += f" [injected: {injected}]"
    if incident.closed_at is None:
        return f"{line}: being repaired"
    if incident.back_at is None:
        return f"{line}: {incident.action}"
    shown = ", ".join(
        f"{name.replace('_', ' ')} {took:.2f}"
        for name, took in phases(incident).items()
        if name not in ("teardown", "rendezvous") or took >= 0.005
    )
    return f"{line}: back in {lost_s(incident):.2f} s ({shown}), {incident.lost_steps} steps redone"


def _what(incident: Incident) -> str:
    if incident.kind in ("storage", "data"):
        return f"{incident.signature} ({incident.detail})"
    if incident.kind == "hang" and incident.detail:
        return incident.detail  # The verdict, which names ranks and lines.
    verb = {"exception": "raised ", "exit": "ended with "}.get(incident.kind, "")
    return f"{subject(incident)} {verb}{incident.signature}"


def injected_by(job: Job, incident: Incident) -> str:
    """Name the injected fault that caused an incident; empty if none did."""
    step_s = paces(job.of(Hangs)).step_s or 0.0
    return chaos.injected_by(job.of(Chaos), incident, step_s)


# ---- injected faults -----------------------------------------------------------------------------


def injection(job: Job, plan: Plan) -> InjectionReport:
    ended = job.result is not None
    return chaos.report(job.of(Chaos), plan, job.world, job.ranks, ended)


def _faults(job: Job) -> FaultsReport:
    plans, ended = job.of(Chaos).plans, job.result is not None
    return FaultsReport(
        pending=[injection(job, plan) for plan in plans if not plan.over and not ended],
        injected=job.of(Chaos).count,
        refused=[
            injection(job, plan)
            for plan in plans
            if plan.refused or (ended and not plan.over and plan.injection.every is None)
        ],
    )


# ---- settings of loaders -------------------------------------------------------------------------


def tunings(job: Job) -> list[TuningReport]:
    """Report the settings of each loader that can be tuned."""
    return [
        TuningReport(
            dataset=name,
            version=loader.version,
            config=loader.config,
            script=loader.seats[Rank(0)].own if Rank(0) in loader.seats else LoaderConfig(),
            ranks=len(loader.seats),
            missing=tuning.absentees(loader, job) if job.world is not None else [],
            pending=tuning.pending(loader, job),
            auto=tuning.search_line(loader),
            changes=loader.changes,
        )
        for name, loader in job.of(Tunings).loaders.items()
    ]


# ---- what may be a hang --------------------------------------------------------------------------


def suspicion(job: Job, now: Time) -> SuspicionReport | None:
    """Report what may be a hang; None while the job moves."""
    known, open = job.of(Hangs), job.of(Hangs).suspicion
    if open is None:
        return None
    scene = hang_scene(job)
    ahead = hangs.outlook(known, scene)
    standing = known.late.get(ahead.rank) if ahead.rank is not None else None
    place = known.place_of(ahead.rank) if ahead.rank is not None else ""
    still_s = now - standing.still_since if standing is not None else 0.0
    return SuspicionReport(
        rank=ahead.rank,
        place=place or (open.verdict.place if open.verdict is not None else ""),
        for_s=round(max(0.0, now - open.since), 3),
        waiting=sorted(hangs.waiting(known) - set(hangs.suspects(known))),
        signs=list(standing.stall.signs) if standing is not None else [],
        still_s=round(max(0.0, still_s), 3),
        proof=ahead.proof,
        acts_in_s=None if ahead.act_at is None else round(max(0.0, ahead.act_at - now), 3),
        until=ahead.reason,
        sentence=open.verdict.sentence if open.verdict is not None else "",
        line=hangs.line(known, scene, now),
    )


# ---- pieces of the status ------------------------------------------------------------------------


def _state(job: Job, alive: bool) -> JobState:
    state = job.state.name
    return state if alive or state == "ended" else "lost"


def _no_step_s(job: Job, now: Time) -> Seconds | None:
    """Time since the last finished step, once it is longer than a step and its report usually take."""
    if job.stepped_at is None or job.unfinished == 0:
        return None
    since_s = now - job.stepped_at
    usual_s = job.usual_wait_s or 0.0
    return since_s if since_s > max(REPORTED_WITHIN_S, usual_s) else None


def _speed(job: Job, no_step_s: Seconds | None) -> JobSpeed:
    """Speed of training, which falls while no step is finished."""
    speed = job.speed
    if not speed.steps_per_s or no_step_s is None:
        return speed
    share = min(1.0, 1.0 / (no_step_s * speed.steps_per_s))
    samples_per_s = None if speed.samples_per_s is None else speed.samples_per_s * share
    steps_per_s = speed.steps_per_s * share
    return replace(speed, steps_per_s=steps_per_s, samples_per_s=samples_per_s, stable=False)


def _until(job: Job, now: Time) -> Time:
    """The time up to which a report accounts: the job's end, if it has come."""
    return job.state.result.at if isinstance(job.state, Ended) else now


def _world_size(job: Job) -> int:
    return job.world.size if job.world is not None else len(job.ranks)


def _nodes(job: Job) -> list[NodeReport]:
    ranks, samples = _ranks(job), job.of(NodeSamples).newest
    m = job.membership
    found = []
    for node in m.nodes():
        candidate = m.find(node)
        assert candidate is not None
        overload = stragglers.overload(job.of(Stragglers), candidate.spec.host)
        sample = samples.get(node)
        found.append(
            NodeReport(
                node=node,
                host=candidate.spec.host,
                state=node_state(job, node),
                ranks=ranks.get(node, []),
                overload=str(overload) if overload is not None and node in ranks else None,
                usage=sample.usage if sample is not None else None,
                usage_at=sample.at if sample is not None else None,
            )
        )
    return found


def node_state(job: Job, node: NodeId) -> NodeState:
    check = job.of(Checking).check
    if check is not None and node in check.owed:
        return "testing"
    if node in job.membership.placed:
        return "placed"
    return "busy" if node in job.membership.busy else "waiting"


def _suspects(job: Job) -> dict[str, str]:
    known = job.of(Suspects).all.values()
    return {one.node: one.line for one in known if one.told or one.state != "named"}


def _ranks(job: Job) -> dict[NodeId, list[RankReport]]:
    """Group the ranks by node."""
    found: dict[NodeId, list[RankReport]] = {}
    scores = stragglers.scores(job.of(Stragglers))
    for number, rank in job.ranks.items():
        score = scores.get(number, stragglers.RankScores(None, None))
        window = job.speeds.windows.get(number)
        shown = RankReport(
            rank=number,
            pid=rank.pid,
            step=rank.step,
            finished=rank.finished,
            score=_rounded(score.relative),
            own_score=_rounded(score.individual),
            straggler=score.straggler,
            steps_per_s=_rounded(window.steps_per_s, 3) if window is not None else None,
            samples_per_s=_rounded(window.samples_per_s, 3) if window is not None else None,
        )
        found.setdefault(rank.node, []).append(shown)
    return found


def _checkpoints(job: Job) -> list[CheckpointerReport]:
    found = []
    for name, book in job.of(Commits).books.items():
        committed = [s.id.step for s in book.snapshots if s.counts and s.alive]
        found.append(
            CheckpointerReport(
                checkpointer=name,
                in_memory=max(committed, default=None),
                on_storage=book.stored.step if book.stored is not None else None,
                writing=book.writing.snapshot.step if book.writing is not None else None,
                failures=book.failures,
                skipped=book.lost.get("skipped", 0),
                failed=book.lost.get("failed", 0),
            )
        )
    return found


def _rounded(value: float | None, digits: int = 6) -> float | None:
    return None if value is None else round(value, digits)
