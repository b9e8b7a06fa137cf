"""What comes of ranks that slow the others down, and of nodes that have too little CPU time.

A finding becomes an incident that breaks no round, an answer to scripts that want to know, and, if the
user wants that and a spare waits, costs the rank's node its place. An overloaded node is an incident of
another kind: it blames what keeps the CPUs busy, not a rank, and costs nobody a place.
"""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.core.decisions import AnswerRequest, Asker, Effect, Exclude, Note, Refused, SendAway
from holdfast.core.faults import Fault
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.states import Running
from holdfast.core.stragglers import windows
from holdfast.core.stragglers.windows import Overload, Stragglers
from holdfast.core.view import View, rank_in_force
from holdfast.messages.events import Asked, Progress
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.records import JobResult, World
from holdfast.messages.requests import AwaitStragglers, StragglersFound
from holdfast.messages.timings import Finding
from holdfast.messages.units import Time

KEPT_FINDINGS = 32
QUICK_STEPS_PER_S = 20.0


class Findings(Struct):
    """What was found in the round in force, and which scripts wait to hear of it."""

    newest: list[Finding] = field(default_factory=list)
    total: int = 0
    askers: dict[Asker, int] = field(default_factory=dict)
    """Held requests, each with how many findings its script knows."""


class StragglersMachine(Stragglers, Machine):
    findings: Findings = field(default_factory=Findings)

    @on(Progress, Running, refusal="no round is in force")
    def on_progress(self, job: View, event: Progress, now: Time) -> Effects | Refused:
        if not event.timings:
            return NONE
        if event.round != job.membership.round:
            return Refused(reason="the timings are of another round")
        own = [
            timings
            for timings in event.timings
            if rank_in_force(job, event.node, event.round, timings.rank) is not None
        ]
        found, overloads = windows.take(self, own, job.highest, now)
        effects: list[Effect] = [_report_overload(job, one) for one in overloads if one.began]
        if not found:
            return effects
        known = self.findings
        known.total += len(found)
        known.newest = [*known.newest, *found][-KEPT_FINDINGS:]
        effects += self._answers()
        replaced = False  # One node at a time: the next round tells whether others are still slow.
        for finding in found:
            if finding.began and self._is_incident(job, finding):
                replace = not replaced and _replaceable(job, finding)
                effects += _report(job, finding, replace)
                replaced = replaced or replace
        return effects

    def request_held(self, job: View, asker: Asker, event: Asked, now: Time) -> Effects:
        if not isinstance(event.request, AwaitStragglers):
            return NONE
        self.findings.askers[asker] = event.request.after
        return self._answers()

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        """Begin afresh: what was found out about the ranks of another round is nothing to these."""
        hosts = {n: c.spec.host for n, c in job.membership.placed.items()}
        windows.renew(self, {r: hosts[s.node] for r, s in job.ranks.items()}, job.highest)
        self.findings = Findings()
        return NONE

    def round_ended(self, job: View, fault: Fault, now: Time) -> Effects:
        self.findings.askers.clear()
        return NONE

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        self.findings.askers.clear()
        return NONE

    def validate(self, job: View) -> None:
        windows.validate(self)

    def _answers(self) -> list[Effect]:
        """Answer every script that has not heard of the newest findings."""
        known, effects = self.findings, list[Effect]()
        for asker, after in list(known.askers.items()):
            if after < known.total:
                fresh = min(known.total - after, len(known.newest))
                found = StragglersFound(total=known.total, findings=tuple(known.newest[-fresh:]))
                effects.append(AnswerRequest(asker=asker, answer=found))
                del known.askers[asker]
        return effects

    def _is_incident(self, job: View, finding: Finding) -> bool:
        """A rank that is slower than it was, in steps of milliseconds, shares its machine with
        another process: that shows in its score, and is no incident. Nor is it news of a rank that
        is known to be slower than the others."""
        if finding.kind == "relative":
            return True
        quick = job.steps_per_s is not None and job.steps_per_s >= QUICK_STEPS_PER_S
        return not quick and not self.ranks[finding.rank].relative.flagged


def _report_overload(job: View, overload: Overload) -> Effect:
    placed = job.membership.placed.items()
    node = next(node for node, one in placed if one.spec.host == overload.host)
    return Note(
        kind="overload",
        node=node,
        rank=None,
        round=job.membership.round,
        step=job.highest,
        signature=f"is overloaded: {overload.shares}",
        action="training goes on; its ranks are not judged slow meanwhile",
    )


def _report(job: View, finding: Finding, replace: bool) -> list[Effect]:
    node = job.ranks[finding.rank].node
    percent = round(100 * finding.score)
    beside = "the best rank" if finding.kind == "relative" else "its own best"
    what = f"is slow: {percent} % of the speed of {beside}, most of all in {finding.section}"
    note = Note(
        kind="straggler",
        node=node,
        rank=finding.rank,
        round=job.membership.round,
        step=finding.step,
        signature=what,
        action="its node makes place for a spare" if replace else "training goes on",
    )
    if not replace:
        return [note]
    why, code = f"rank {finding.rank} {what}", EXIT_DO_NOT_REQUEUE
    away = SendAway(node=node, kind="exclude", code=code, why=why)
    return [note, Exclude(node=node, why=why), away]


def _replaceable(job: View, finding: Finding) -> bool:
    """Only a rank that is slower than the others, and only if another node can take its place. Once
    a rank has finished, training is about to end: nothing is begun again for speed."""
    wanted = job.terms.exclude_stragglers and finding.kind == "relative"
    wanted = wanted and job.unfinished == len(job.ranks)
    node = job.ranks[finding.rank].node
    return wanted and bool(job.membership.waiting) and node in job.membership.placed
