"""What scripts ask for: a store, barriers and votes, and to part with their node or the job.

Everything that the scripts of a round share ends with the round.
"""

from __future__ import annotations

from holdfast.core.decisions import NOT_A_MEMBER, Asker, EndJob, Exclude, Refused, SendAway
from holdfast.core.faults import Fault, subject
from holdfast.core.machine import Effects, Machine, on, tell
from holdfast.core.requests import pending
from holdfast.core.requests.barriers import Attendance
from holdfast.core.requests.pending import Requests
from holdfast.core.states import ALWAYS, LIVE, Running
from holdfast.core.view import View, rank_in_force
from holdfast.messages.actions import Answered
from holdfast.messages.events import Asked, ExcludeAsked, NodeExcludeAsked, StopAsked, WorkerExited
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.records import JobResult
from holdfast.messages.requests import AnyAnswer, HeldRequest
from holdfast.messages.units import Time

NOT_IN_FORCE = Refused(reason="the rank is not in the round in force")


class RequestsMachine(Requests, Machine):
    # ---- events ----

    @on(Asked, *ALWAYS)
    def on_asked(self, job: View, event: Asked, now: Time) -> Effects:
        rank = rank_in_force(job, event.node, event.round, event.rank)
        if job.world is None or rank is None or rank.finished:
            why = f"rank {event.rank} of round {event.round} is not in force"
            now_in = f"the job is in round {job.membership.round}"
            return [pending.fenced(event, f"{why} ({now_in})")]
        if not isinstance(event.request, HeldRequest):
            return pending.take(self, event, attendance(job), now)
        asker, before = pending.hold(self, event, now)
        return before if asker is None else [tell(Machine.request_held, asker, event)]

    @on(ExcludeAsked, *LIVE, refusal="the job is ending")
    def on_exclude_asked(self, job: View, event: ExcludeAsked, now: Time) -> Effects | Refused:
        """Go on without a node that its own script found unfit."""
        in_force = rank_in_force(job, event.node, event.round, event.rank) is not None
        if not in_force or event.node not in job.membership.placed:
            return NOT_IN_FORCE
        why = f"excluded by rank {event.rank}: {event.reason}"
        code = EXIT_DO_NOT_REQUEUE
        return [
            Exclude(node=event.node, why=event.reason),
            SendAway(node=event.node, kind="exclude", code=code, why=why),
        ]

    @on(NodeExcludeAsked, *LIVE, refusal="the job is ending")
    def on_node_exclude_asked(
        self, job: View, event: NodeExcludeAsked, now: Time
    ) -> Effects | Refused:
        """Go on without a node that a person does not want."""
        if not job.membership.has(event.node):
            return NOT_A_MEMBER
        why = f"excluded by {event.by or 'a user'}: {event.reason}"
        return [
            Exclude(node=event.node, why=why),
            SendAway(node=event.node, kind="exclude", code=EXIT_DO_NOT_REQUEUE, why=why),
        ]

    @on(StopAsked, *LIVE, refusal="the job is ending")
    def on_stop_asked(self, job: View, event: StopAsked, now: Time) -> Effects | Refused:
        if rank_in_force(job, event.node, event.round, event.rank) is None:
            return NOT_IN_FORCE
        reason = f"rank {event.rank} stopped the job: {event.reason}"
        return [EndJob(code=event.code, reason=reason)]

    # ---- moments ----

    def request_held(self, job: View, asker: Asker, event: Asked, now: Time) -> Effects:
        return pending.times_up(self, now)  # It may not want to wait at all.

    def rank_exited(self, job: View, event: WorkerExited, now: Time) -> Effects:
        if event.code != 0 or not isinstance(job.state, Running) or job.unfinished == 0:
            return ()
        return pending.rank_ended(self, event.rank, attendance(job))

    def round_ended(self, job: View, fault: Fault, now: Time) -> Effects:
        denied = pending.close(self, f"{subject(fault)} {fault.signature}")
        # The ranks of a hang are looked at as they wait, and ended then.
        return [] if fault.kind == "hang" else denied

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        return pending.close(self, result.reason)

    def tick(self, job: View, now: Time) -> Effects:
        return pending.times_up(self, now)

    def deadline(self, job: View) -> Time | None:
        return self.until

    def validate(self, job: View) -> None:
        pending.validate(self, attendance(job))
        if job.world is None:
            assert not self.open, "a request outlived its round"
            assert not self.last, "an answer outlived its round"

    # ---- for the job, which carries decisions out ----

    def answer(self, asker: Asker, answer: AnyAnswer) -> list[Answered]:
        return pending.answer(self, [(asker, answer)])


def attendance(job: View) -> Attendance:
    return Attendance(present=job.unfinished, ended=len(job.ranks) - job.unfinished)
