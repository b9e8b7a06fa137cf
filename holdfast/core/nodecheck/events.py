"""When nodes are checked, and what comes of the verdicts.

A check is due before a round is frozen, and holds the round until it is over. A node whose own health
checks fail goes too, as soon as the job can do without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.core.decisions import (
    NOT_A_MEMBER,
    Effect,
    EndJob,
    Exclude,
    Note,
    Refused,
    SendAway,
    Settle,
)
from holdfast.core.faults import Fault
from holdfast.core.machine import NONE, Effects, Machine, on, tell
from holdfast.core.nodecheck import schedule
from holdfast.core.nodecheck.schedule import Checking
from holdfast.core.states import LIVE, OVER
from holdfast.core.view import Candidate, View, can_spare_a_node, earliest
from holdfast.messages.events import HealthFound, NodeResumed, NodeTested
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.records import JobResult, World
from holdfast.messages.units import NodeId, Time

GOES_ON_WITHOUT = "the job goes on without it"


class NodecheckMachine(Checking, Machine):
    # ---- events ----

    @on(NodeTested, *LIVE, refusal="the job is ending")
    def on_tested(self, job: View, event: NodeTested, now: Time) -> Effects | Refused:
        """A node has tested itself, alone and with another."""
        m = job.membership
        if event.node not in m.waiting or event.result.node != event.node:
            return Refused(reason="the node is not being checked")
        actions = schedule.take(self, m, event.check, event.result, now)
        if actions is None:
            return Refused(reason="the test is of an older check")
        return self._go_on(job, now) if schedule.is_over(self) else actions

    @on(HealthFound, *LIVE, refusal="the job is ending")
    def on_health(self, job: View, event: HealthFound, now: Time) -> Effects | Refused:
        """A node's own checks failed: it goes if the job can do without it, now or later."""
        if not job.membership.has(event.node):
            return NOT_A_MEMBER
        failed = [result for result in event.results if result.verdict == "fail"]
        if not failed:
            return NONE
        why = "; ".join(f"{result.check}: {result.reason}" for result in failed)
        if not can_spare_a_node(job):
            if self.sick.get(event.node) == why:
                return NONE
            self.sick[event.node] = why
            return [_unfit(job, event.node, why, "it stays until the job can do without it")]
        note = _unfit(job, event.node, why, GOES_ON_WITHOUT)
        return [note, *_away(event.node, why, f"unfit: {why}")]

    # ---- moments ----

    def before_round(self, job: View, now: Time) -> Effects:
        effects = self._part_with_sick(job, now)
        if effects or not job.terms.node_check or not job.membership.is_complete(now):
            return effects
        if not schedule.due(self, job.membership, job.terms.min_nodes):
            return NONE
        return [tell(Machine.round_awaited), *schedule.begin(self, job.membership, now)]

    def holds_round(self) -> bool:
        return self.check is not None

    def withheld(self, job: View, waiting: Mapping[NodeId, Candidate]) -> Collection[NodeId]:
        return schedule.unchecked(self, job.membership) if job.terms.node_check else ()

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        self.row = 0
        return NONE

    def round_ended(self, job: View, fault: Fault, now: Time) -> Effects:
        schedule.abandon(self)
        return NONE

    def round_stopped(self, job: View, fault: Fault, now: Time) -> Effects:
        if not fault.wanted:
            self.done.clear()  # Whatever it was, look again.
        return NONE

    def node_warmed(self, job: View, node: NodeId, now: Time) -> Effects:
        schedule.warmed(self, node, now)
        return NONE

    def node_lost(self, job: View, node: NodeId, placed: bool, now: Time) -> Effects:
        return self._forget(job, node, now)

    def node_sent_away(self, job: View, node: NodeId, now: Time) -> Effects:
        return self._forget(job, node, now)

    def node_resumed(self, job: View, event: NodeResumed, now: Time) -> Effects:
        return schedule.remind(self, job.membership, event.node)

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        schedule.abandon(self)
        return NONE

    def coordinator_restarted(self, job: View, now: Time) -> Effects:
        schedule.restarted(self, now)
        return NONE

    def tick(self, job: View, now: Time) -> Effects:
        if not schedule.is_late(self, now):
            return NONE
        actions = schedule.hurry(self, job.membership, now)
        return [*actions, *self._go_on(job, now)] if schedule.is_over(self) else actions

    def deadline(self, job: View) -> Time | None:
        return earliest(self.until)

    def validate(self, job: View) -> None:
        schedule.validate(self, job.membership)

    # ---- verdicts ----

    def _go_on(self, job: View, now: Time) -> Effects:
        """A round of tests is over: order the next one, or act on the verdicts."""
        actions = schedule.go_on(self, job.membership, now)
        if self.until is not None:
            return actions
        verdicts = schedule.take_verdicts(self)
        faulty = {one.node: one.reason for one in verdicts if one.verdict == "faulty"}
        if faulty and len(faulty) == job.membership.count():
            return _nobody_passed(job, faulty)
        effects: list[Effect] = [*actions, Settle()]
        left = job.membership.count() - len(faulty)
        for node, why in faulty.items():
            effects += _send_away(job, node, why)
        for one in verdicts:
            slow = one.verdict == "slow" and job.terms.exclude_stragglers
            if slow and left - 1 >= max(1, job.terms.min_nodes):
                effects += _send_away(job, one.node, one.reason)
                left -= 1
            elif one.verdict not in ("healthy", "faulty"):
                why = f"{one.verdict}: {one.reason}"
                effects.append(_unfit(job, one.node, why, "training goes on with it"))
        return effects

    def _forget(self, job: View, node: NodeId, now: Time) -> Effects:
        """Go on without a node that took part in the running check."""
        actions = schedule.lost(self, job.membership, node)
        if not isinstance(job.state, OVER) and schedule.is_over(self):
            return self._go_on(job, now)
        return actions

    def _part_with_sick(self, job: View, now: Time) -> list[Effect]:
        """Send away a node that the job could not do without when its own checks failed, if it can
        now. One at a time: what the job can do without is asked again after each."""
        m = job.membership
        for node, why in self.sick.items():
            if node in m.waiting and can_spare_a_node(job) and m.is_complete(now):
                return _send_away(job, node, why)
        return []


def _unfit(job: View, node: NodeId, why: str, action: str) -> Note:
    return Note(
        kind="unfit",
        node=node,
        round=job.membership.round,
        step=job.highest,
        signature=f"is unfit: {why}",
        action=action,
    )


def _away(node: NodeId, why: str, told: str) -> list[Effect]:
    away = SendAway(node=node, kind="exclude", code=EXIT_DO_NOT_REQUEUE, why=told)
    return [Exclude(node=node, why=why), away]


def _send_away(job: View, node: NodeId, why: str) -> list[Effect]:
    """Give a node that is not fit no place, nor its host from now on."""
    note = _unfit(job, node, why, GOES_ON_WITHOUT)
    return [note, *_away(node, why, f"this node is unfit: {why}")]


def _nobody_passed(job: View, faulty: dict[NodeId, str]) -> Effects:
    """No node is left that could wait for better ones."""
    notes = [_unfit(job, node, why, "the job ends") for node, why in faulty.items()]
    node, why = next(iter(faulty.items()))
    others = f", and so did {len(faulty) - 1} more" if len(faulty) > 1 else ""
    reason = f"no node is fit to train: node {node} {why}{others}"
    excluded = [Exclude(node=node, why=why) for node, why in faulty.items()]
    return [*excluded, *notes, EndJob(code=EXIT_DO_NOT_REQUEUE, reason=reason)]
