"""What comes of ranks that slow the others down.

`stragglers` says who is slow; here it becomes an incident that breaks no round, an answer to scripts
that want to know, and, if the user wants that and a spare waits, the end of the node's place.
"""

from __future__ import annotations

from holdfast.core.repair import send_off
from holdfast.core.requests import desk as requests
from holdfast.core.state import Job, rank_in_force
from holdfast.core.stragglers import windows as stragglers
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import Asked, Progress
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.records import Incident
from holdfast.messages.requests import AwaitStragglers, StragglersFound
from holdfast.messages.timings import Finding
from holdfast.messages.units import Time

KEPT_FINDINGS = 32
QUICK_STEPS_PER_S = 20.0


def on_timings(job: Job, event: Progress, now: Time) -> list[AnyAction]:
    """A node tells what its ranks' steps consist of."""
    current = job.ended is None and job.fault is None and job.membership.world is not None
    if not event.timings or not current or event.round != job.membership.round:
        return []
    own = [
        timings
        for timings in event.timings
        if rank_in_force(job, event.node, event.round, timings.rank) is not None
    ]
    findings = stragglers.take(job.stragglers, own, job.highest)
    if not findings:
        return []
    job.found += len(findings)
    job.findings = [*job.findings, *findings][-KEPT_FINDINGS:]
    actions: list[AnyAction] = [*_tell_scripts(job)]
    for finding in findings:
        if finding.began and _worth_telling(job, finding):
            actions += _mind(job, finding, now)
    return actions


def _worth_telling(job: Job, finding: Finding) -> bool:
    """A rank that is slower than it was, in steps of milliseconds, shares its machine with somebody:
    that shows in its score, and is no incident. Nor is it news of a rank that is known to be slower
    than the others."""
    if finding.kind == "relative":
        return True
    per_s = job.pace.per_s if job.pace is not None else None
    quick = per_s is not None and per_s >= QUICK_STEPS_PER_S
    return not quick and not job.stragglers.ranks[finding.rank].relative.flagged


def _mind(job: Job, finding: Finding, now: Time) -> list[AnyAction]:
    rank = job.ranks[finding.rank]
    replace = _replaceable(job, finding)
    percent = round(100 * finding.score)
    beside = "the best rank" if finding.kind == "relative" else "its own best"
    what = f"is slow: {percent} % of the speed of {beside}, most of all in {finding.section}"
    job.incidents.append(
        Incident(
            id=len(job.incidents) + 1,
            kind="straggler",
            node=rank.node,
            rank=finding.rank,
            round=job.membership.round,
            step=finding.step,
            signature=what,
            action="its node makes place for a spare" if replace else "training goes on",
            fault_at=now,
            opened_at=now,
            closed_at=now,
        )
    )
    if not replace:
        return []
    candidate = job.membership.placed[rank.node]
    why = f"rank {finding.rank} {what}"
    job.excluded[candidate.spec.host] = why
    return send_off(job, "exclude", rank.node, EXIT_DO_NOT_REQUEUE, why, now)


def _replaceable(job: Job, finding: Finding) -> bool:
    """Only a rank that is slower than the others, and only if somebody can take its place."""
    wanted = job.terms.exclude_stragglers and finding.kind == "relative"
    node = job.ranks[finding.rank].node
    return wanted and bool(job.membership.waiting) and node in job.membership.placed


# ---- scripts that want to know -------------------------------------------------------------------


def on_stragglers_asked(job: Job, event: Asked, now: Time) -> list[AnyAction]:
    asker, before = requests.hold(job.desk, event, now)
    return [*before] if asker is None else [*_tell_scripts(job)]


def _tell_scripts(job: Job) -> list[AnyAction]:
    """Answer everybody who has not heard of the newest findings."""
    answers = []
    for asker, held in job.desk.open.items():
        request = held.asked.request
        if isinstance(request, AwaitStragglers) and request.after < job.found:
            fresh = min(job.found - request.after, len(job.findings))
            found = StragglersFound(total=job.found, findings=tuple(job.findings[-fresh:]))
            answers.append((asker, found))
    return [*requests.answer(job.desk, answers)]
