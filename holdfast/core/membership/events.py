"""What nodes do: they join, get ready, leave, vanish, and come back.

A node without a stream is absent, not lost: when it comes back it is told what it missed. It is lost
once its lease is over (`core.leases` says when); one that comes back later finds itself fenced, and
joins as another node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.core import faults
from holdfast.core.decisions import (
    NOT_A_MEMBER,
    BreakRound,
    EndJob,
    LoseNode,
    Refused,
    Repeat,
    SendAway,
    Settle,
)
from holdfast.core.machine import NONE, Effects, Machine, on, tell
from holdfast.core.membership import rounds, seating
from holdfast.core.membership.state import Membership
from holdfast.core.patience import StopGrace
from holdfast.core.states import ALWAYS, LIVE, OVER, Running
from holdfast.core.view import Candidate, View, earliest
from holdfast.messages.actions import Finish, Prepare, StopWorkers
from holdfast.messages.events import (
    LeaseEnded,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    NodeResumed,
    NodeWarm,
    Progress,
    SilenceRaised,
    StreamEnded,
    WorkersKilled,
)
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_TRY_AGAIN
from holdfast.messages.records import JobResult, Terms, World
from holdfast.messages.units import NodeId, RoundNumber, Time


class MembershipMachine(Membership, Machine):
    @classmethod
    def opened(cls, terms: Terms, at: Time) -> MembershipMachine:
        return cls(terms, grace=StopGrace(terms.grace_s))

    # ---- events ----

    @on(NodeJoined, *ALWAYS)
    def on_joined(self, job: View, event: NodeJoined, now: Time) -> Effects:
        gone = self._lose(event.replaces, "its agent died", event.at)
        if isinstance(job.state, OVER):
            return [*gone, self.dismiss(event.node, job.state.result)]
        host = event.spec.host
        if host in self.excluded:
            why = f"host {host} is excluded: {self.excluded[host]}"
            return [*gone, self.goodbye(event.node, EXIT_DO_NOT_REQUEUE, why)]
        joins = tell(Machine.node_joined, event)
        if event.node in self.placed:  # It lost its workers, and asks for a place again.
            return [LoseNode(node=event.node, why="it joined again", at=event.at), joins]
        return [*gone, joins]

    def _lose(self, node: NodeId, why: str, at: Time) -> Effects:
        """Lose a node whose workers are gone, since it was last there; nothing if it is not known."""
        if not self.has(node) and node not in self.leaving:
            return NONE
        return [LoseNode(node=node, why=why, at=self.absent.get(node, at))]

    def node_joined(self, job: View, event: NodeJoined, now: Time) -> Effects:
        if isinstance(job.state, OVER):
            return [self.dismiss(event.node, job.state.result)]
        rounds.join(self, event.node, event.spec, event.store_port, now)
        return [Prepare(node=event.node)] if job.world is not None else NONE

    @on(NodeWarm, *ALWAYS)
    def on_warm(self, job: View, event: NodeWarm, now: Time) -> Effects | Refused:
        candidate = self.find(event.node)
        if candidate is None:
            return NOT_A_MEMBER
        warmed = [] if candidate.warm else [tell(Machine.node_warmed, event.node)]
        candidate.warm = True  # Said once: a node that is placed now may wait for a place later.
        return [*warmed, *(self._grow(job, now) if event.node in self.waiting else NONE)]

    @on(NodeReady, *ALWAYS)
    def on_ready(self, job: View, event: NodeReady, now: Time) -> Effects | Refused:
        if not rounds.ready(self, event.node, event.round, event.store_port):
            return Refused(reason="the node was not asked to stop that round")
        self.waiting[event.node].parked = event.parked
        if event.slowest_stop_s is not None:
            self.grace.observe(event.slowest_stop_s)
        if event.slowest_leave_s is not None:
            self.leave.observe(event.slowest_leave_s)
        if self.dissolved_at is not None:
            self.patience.observe(max(0.0, now - self.dissolved_at))
        # The next round may have begun without it: then the world can grow.
        return [Settle(), *(self._grow(job, now) if job.world is not None else NONE)]

    @on(WorkersKilled, *LIVE, refusal="the job is ending")
    def on_killed(self, job: View, event: WorkersKilled, now: Time) -> Effects | Refused:
        held = self.busy.get(event.node) or self.leaving.get(event.node)
        if held is None or held.round != event.round:
            return Refused(reason="the node was not asked to stop that round")
        held.killed = True
        return [Settle()]

    @on(NodeLeaving, *LIVE, refusal="the job is ending")
    def on_leaving(self, job: View, event: NodeLeaving, now: Time) -> Effects | Refused:
        if not self.has(event.node):
            return NOT_A_MEMBER
        if self.count() - 1 < self.terms.min_nodes and not job.replaces_nodes:
            return [EndJob(code=event.code, reason=event.reason)]
        why = f"left: {event.reason}"
        return [SendAway(node=event.node, kind="leave", code=event.code, why=why)]

    @on(NodeLeft, *ALWAYS)
    def on_left(self, job: View, event: NodeLeft, now: Time) -> Effects:
        return [LoseNode(node=event.node, why="it left", at=event.at)]

    @on(StreamEnded, *ALWAYS)
    def on_stream_ended(self, job: View, event: StreamEnded, now: Time) -> Effects | Refused:
        if not self.has(event.node):
            return NOT_A_MEMBER
        self.absent[event.node] = event.at
        return NONE

    @on(LeaseEnded, *ALWAYS)
    def on_lease_ended(self, job: View, event: LeaseEnded, now: Time) -> Effects | Refused:
        return self._lose(event.node, event.why, event.at) or NOT_A_MEMBER

    @on(SilenceRaised, *ALWAYS)
    def on_silence_raised(self, job: View, event: SilenceRaised, now: Time) -> Effects:
        self.silence_s = max(self.silence_s, event.silence_s)
        return NONE

    @on(NodeResumed, *ALWAYS)
    def on_resumed(self, job: View, event: NodeResumed, now: Time) -> Effects:
        """Tell a node again what it may have missed while it had no stream."""
        back = self.absent.pop(event.node, None) is not None and job.world is None
        reminders = tell(Machine.node_resumed, event)
        if isinstance(job.state, OVER):
            return [reminders, self.dismiss(event.node, job.state.result)]
        if not self.has(event.node):
            return [_fence(event.node)]
        if event.round > self.round and event.node in self.waiting and job.world is not None:
            # If the journal lost that round, the members of the world know of it, too.
            why = "it knows a round that was never issued to it"
            return [LoseNode(node=event.node, why=why, at=event.at), _fence(event.node)]
        if event.round > self.round:
            return [reminders]
        again = Repeat(node=event.node, round=event.round)
        return [reminders, again, *([Settle()] if back else [])]

    @on(Progress, Running, refusal="no round is in force")
    def on_progress(self, job: View, event: Progress, now: Time) -> Effects:
        """Grow right after a checkpoint, if nodes wait for that."""
        wished = self.saves_at_wish is not None and job.saves != self.saves_at_wish
        return self._grow(job, now) if wished else NONE

    # ---- moments ----

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        if self.terms.node_check and rounds.can_grow(self):
            # Nodes that were not checked in time are warm already: no event will tell of them, and
            # no checkpoint of this round is worth waiting for.
            self.saves_at_wish = -1
        return NONE

    def round_ended(self, job: View, fault: faults.Fault, now: Time) -> Effects:
        rounds.dissolve(self, now, 0.0 if fault.kind == "hang" else self.grace.limit_s())
        return NONE

    def round_stopped(self, job: View, fault: faults.Fault, now: Time) -> Effects:
        self.dissolved_at = None  # How long stragglers take after this is not learnt from.
        return NONE

    def node_resumed(self, job: View, event: NodeResumed, now: Time) -> Effects:
        lost = event.missing > 0 and event.round == self.round and event.node in self.placed
        if event.round > self.round or lost:
            return self._relearn(job, event, now)
        held = self.busy.get(event.node)
        if held is not None and event.round != held.round and not event.busy:
            # It was never told to start the round that is being stopped: it has no workers of it.
            rounds.ready(self, event.node, held.round, held.store_port)
        elif event.node in self.waiting and job.world is not None:
            return [Prepare(node=event.node)]
        return NONE

    def coordinator_restarted(self, job: View, now: Time) -> Effects:
        self.absent = dict.fromkeys(self.nodes(), now)
        return NONE

    def tick(self, job: View, now: Time) -> Effects:
        if self.patient_until is not None and self.patient_until <= now:
            self.patient_until = None
            stopping = {**self.busy, **self.leaving}
            return [self._hurry(node, held.round) for node, held in stopping.items()]
        return NONE

    def withheld(self, job: View, waiting: Mapping[NodeId, Candidate]) -> Collection[NodeId]:
        return self.absent

    def deadline(self, job: View) -> Time | None:
        stopping = self.busy or self.leaving
        patient = self.patient_until if stopping and not isinstance(job.state, OVER) else None
        return earliest(self.closes_at, patient)

    def job_ended(self, job: View, *_: object) -> Effects:
        self.closes_at = None
        return NONE

    def validate(self, job: View) -> None:
        if not isinstance(job.state, OVER):  # The members of a job that ends stop one by one.
            rounds.validate(self, job.world)

    # ---- for other machines, by way of the view ----

    @property
    def largest(self) -> int:
        return rounds.most_nodes(self)

    def formable(self, candidates: Mapping[NodeId, Candidate]) -> int:
        return len(seating.choose(candidates, self.terms))

    def dispensable(self, nodes: Collection[NodeId]) -> bool:
        """Return whether a world could be formed without these nodes."""
        members = {**self.placed, **self.busy, **self.waiting}
        others = {node: one for node, one in members.items() if node not in nodes}
        return self.formable(others) >= max(1, self.terms.min_nodes)

    def is_complete(self, now: Time) -> bool:
        return rounds.may_close(self, now)

    # ---- for the job, which carries decisions out ----

    def dismiss(self, node: NodeId, result: JobResult) -> Finish:
        """Tell a node how the job ended."""
        return self.goodbye(node, result.code, result.reason)

    def goodbye(self, node: NodeId, code: int, reason: str) -> Finish:
        return Finish(node=node, code=code, reason=reason, grace_s=self.grace.limit_s())

    @property
    def hurries(self) -> bool:
        """Whether nodes that stop their workers have had all the time that they get."""
        return self.patient_until is None

    def rescaled(self, job: View, now: Time) -> Effects:
        """See whether a larger world can be formed, now that one is wanted."""
        return self._grow(job, now)

    def _hurry(self, node: NodeId, round: RoundNumber) -> StopWorkers:
        why = "it takes too long to stop, and others could go on"
        return StopWorkers(node=node, round=round, grace_s=0.0, why=why)

    def _grow(self, job: View, now: Time) -> Effects:
        """Form a larger world once nodes wait for it, right after a checkpoint if there are any.

        A script that never says when it saves gives no better moment than now. Once a rank has
        finished, or the restartable functions of a node have returned, training is about to end:
        nothing is begun again for more nodes.
        """
        training = job.world is not None and job.unfinished == len(job.ranks) and not job.returning
        size = rounds.can_grow(self) if training else 0
        if size == 0:
            self.saves_at_wish = None
            return NONE
        if self.saves_at_wish is None:
            self.saves_at_wish = job.saves
        if job.saves > 0 and job.saves == self.saves_at_wish:
            return NONE
        newest = next(reversed(self.waiting))
        why = f"joined: from {len(self.placed)} to {size} nodes"
        fault = faults.wanted("resize", newest, self.round, job.highest, why, now)
        return [BreakRound(fault=fault)]

    def _relearn(self, job: View, event: NodeResumed, now: Time) -> Effects:
        """Give up a round that a node knows and the journal lost, or of which it lost events (its
        disk was full when the coordinator died; it was damaged): what was agreed in it is unknown,
        so all nodes stop and meet anew."""
        why = f"knows round {event.round}, which the journal lost"
        if event.round == self.round:
            why = f"reported {event.missing} events that the journal lost"
        self.round = event.round
        for candidate in [*self.placed.values(), *self.busy.values()]:
            candidate.round = event.round
        if event.node in self.waiting:
            self.busy[event.node] = self.waiting.pop(event.node)
            self.busy[event.node].round = event.round
        fault = faults.wanted("resize", event.node, event.round, job.highest, why, now)
        return [BreakRound(fault=fault)]


def _fence(node: NodeId) -> Finish:
    """Tell a node that comes back after it was given up to end all, and to join afresh."""
    why = "this node was given up while it was away; it joins again as a new one"
    return Finish(node=node, code=EXIT_TRY_AGAIN, reason=why, grace_s=0.0, rejoin=True)


def shortage(m: Membership) -> str:
    """Say why no round can be formed."""
    there, needed = m.count(), m.terms.min_nodes
    reason = f"{there} of at least {needed} nodes are there and no more came in time"
    if there >= needed:
        reason = f"{there} nodes are there, but no {needed} of them form complete segments or units"
    if m.excluded:
        host, why = next(reversed(m.excluded.items()))
        more = f" and {len(m.excluded) - 1} more are" if len(m.excluded) > 1 else " is"
        reason += f"; host {host}{more} excluded ({why})"
    return reason
