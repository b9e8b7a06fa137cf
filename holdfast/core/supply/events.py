"""What supply hears: from the platform, from nodes, and from those who want another number of them.

a supplier comes ──▶ it is told all that is wanted
sightings, a node joins, is lost or sent away ──▶ positions change; a plan is due
the next tick ──▶ one plan for all that has changed
a request takes too long ──▶ it is reported; without enough nodes to train, the job asks for its
                             minimum only, and then ends with what is missing
"""

from __future__ import annotations

from holdfast.core.decisions import (
    AnswerRequest,
    Asker,
    Effect,
    EndJob,
    Note,
    Rescale,
    SendAway,
)
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.states import ALWAYS, LIVE, OVER
from holdfast.core.supply import rules
from holdfast.core.supply.reasons import GiveUp
from holdfast.core.supply.state import Supply, WantedNode
from holdfast.core.view import View, earliest
from holdfast.messages.actions import CarryOutPlan
from holdfast.messages.events import (
    Asked,
    NodeJoined,
    NodesSighted,
    RequestsRefused,
    ScaleAsked,
    SupplierJoined,
    SupplierLeft,
)
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_TRY_AGAIN
from holdfast.messages.records import JobResult, Terms, World
from holdfast.messages.requests import ChangeNodes, Denied, Granted
from holdfast.messages.supply import ExitReason, RequestId, SupplyPlan
from holdfast.messages.units import NodeId, Seconds, Time

NAMED = 8
"""Positions that a sentence names at most."""


class SupplyMachine(Supply, Machine):
    @classmethod
    def opened(cls, terms: Terms, at: Time) -> SupplyMachine:
        return cls(terms.supply)

    # ---- events ----

    @on(SupplierJoined, *ALWAYS)
    def on_supplier(self, job: View, event: SupplierJoined, now: Time) -> Effects:
        self.platform, self.connected, self.refusal = event.platform, True, ""
        self.together = event.together
        rules.note_change(self, now)
        whole = rules.whole_plan(self, job.membership.excluded)
        return [CarryOutPlan(plan=whole)]

    @on(SupplierLeft, *ALWAYS)
    def on_supplier_left(self, job: View, event: SupplierLeft, now: Time) -> Effects:
        self.connected = False
        return NONE

    @on(NodesSighted, *LIVE, refusal="the job is ending")
    def on_sighted(self, job: View, event: NodesSighted, now: Time) -> Effects:
        self.refusal = ""
        ended: list[tuple[WantedNode, GiveUp]] = []
        gone: list[WantedNode] = []
        for sighting in event.sightings:
            position = rules.find(self, sighting.request)
            stood = position is not None and position.stands
            gave_up = rules.sight(self, sighting, now)
            if position is not None and stood and not position.stands:
                gone.append(position)
                if gave_up is not None:
                    ended.append((position, gave_up))
        if event.whole:
            for position in rules.missing(self, event.sightings):
                rules.end(self, position, "deleted", "deleted", now)
                gone.append(position)
        self._look_by(Time(now + rules.pending_limit_s(self)))
        return [*self._relaunch_groups(gone, now), *self._give_up(job, ended)]

    @on(RequestsRefused, *LIVE, refusal="the job is ending")
    def on_refused(self, job: View, event: RequestsRefused, now: Time) -> Effects:
        """The platform takes no requests; for good, that is the end of those positions."""
        self.refusal = event.why
        if not event.for_good:
            return NONE
        standing = [p for p in self.positions.values() if p.stands and not p.node]
        meant = set(event.requests)
        ended = []
        for position in standing:
            if meant and position.request not in meant:
                continue
            position.detail = event.why
            gave_up = rules.end(self, position, "failed", "fatal", now)
            assert gave_up is not None
            ended.append((position, gave_up))
        return self._give_up(job, ended)

    @on(ScaleAsked, *LIVE, refusal="the job is ending")
    def on_scale(self, job: View, event: ScaleAsked, now: Time) -> Effects:
        return [self._rescale(job, event, now)]

    def request_held(self, job: View, asker: Asker, event: Asked, now: Time) -> Effects:
        """A script wants another number of nodes."""
        request = event.request
        if not isinstance(request, ChangeNodes):
            return NONE
        wrong = rules.refusal(job.terms, request.min_nodes, request.max_nodes)
        if wrong:
            return [AnswerRequest(asker=asker, answer=Denied(reason="nodes", detail=wrong))]
        granted = AnswerRequest(asker=asker, answer=Granted())
        return [granted, self._rescale(job, request, now)]

    def _rescale(self, job: View, event: ScaleAsked | ChangeNodes, now: Time) -> Rescale:
        spares = job.terms.spares if event.spares is None else event.spares
        for number in self.given_up:  # Somebody looked at it: what failed may go well now.
            rules.drop(self, number)
        self.given_up.clear()
        self.at_least, self.short_since = False, None
        rules.note_change(self, now)
        return Rescale(min_nodes=event.min_nodes, max_nodes=event.max_nodes, spares=spares)

    # ---- moments ----

    def coordinator_restarted(self, job: View, now: Time) -> Effects:
        self.connected = False  # Its stream died with the coordinator.
        return NONE

    def node_joined(self, job: View, event: NodeJoined, now: Time) -> Effects:
        """Note who fills a position. Nothing is planned for that: of 10,000 nodes that come, none
        changes what is wanted."""
        if isinstance(job.state, OVER):
            return NONE
        if not event.spec.request or not self.active:
            self.by_hand[event.node] = None
            rules.note_change(self, now)
            return NONE
        position = rules.find(self, event.spec.request)
        if position is not None and position.stands:
            rules.fill(self, position, event.node, event.spec.host, now)
            return NONE
        why = f"request {event.spec.request} was given up: another has its position"
        self._let_leave(event.node, event.spec.request, now)
        return [SendAway(node=event.node, kind="leave", code=EXIT_TRY_AGAIN, why=why)]

    def node_lost(self, job: View, node: NodeId, placed: bool, now: Time) -> Effects:
        if node in self.by_hand or node in self.leaving:
            rules.note_change(self, now)
        self.by_hand.pop(node, None)
        rules.left(self, node)
        number = self.members.pop(node, None)
        if number is None:
            return NONE
        position = self.positions[number]
        position.node, position.away_since = NodeId(""), now
        self._look_by(Time(now + rules.RETURN_S))
        return NONE

    def node_sent_away(self, job: View, node: NodeId, now: Time) -> Effects:
        self.by_hand.pop(node, None)
        rules.note_change(self, now)
        number = self.members.get(node)
        if number is None or isinstance(job.state, OVER):
            return NONE
        position = self.positions[number]
        self._let_leave(node, position.request, now)
        excluded = position.host in job.membership.excluded
        reason: ExitReason = "excluded" if excluded else "preempted"
        rules.end(self, position, "deleted", reason, now)
        return self._relaunch_groups([position], now)

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        self.at_least, self.short_since = False, None
        return NONE

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        """Release what has not joined; the others end by themselves."""
        self.due = self.look_at = None
        self.vacant.clear()
        waiting = [p for p in self.positions.values() if p.stands and not p.node]
        for position in waiting:
            rules.release(self, position, now)
        return self._released()

    def job_closed(self, job: View, result: JobResult, now: Time) -> Effects:
        for position in self.positions.values():
            if position.stands:
                rules.release(self, position, now)
        for node in list(self.leaving):
            rules.left(self, node)
        return self._released(final=True) if self.active else NONE

    def job_requeued(self, job: View, since: Time, now: Time) -> Effects:
        """Ask for all nodes anew: those of before are gone, and what was given up may go well now."""
        for number in list(self.positions):
            rules.drop(self, number)
        self.standing = 0
        self.vacant.clear()
        self.members.clear()
        self.by_hand.clear()
        self.given_up.clear()
        self.leaving.clear()
        self.parting.clear()
        self.to_release.clear()
        self.connected = self.at_least = False
        self.short_since = self.look_at = None
        rules.note_change(self, now)
        return NONE

    def tick(self, job: View, now: Time) -> Effects:
        if not self.active or isinstance(job.state, OVER):
            return NONE
        effects: list[Effect] = []
        if self.look_at is not None and self.look_at <= now:
            effects += self._look(job, now)
        if self._is_due(now):
            effects += self._plan(job, now)
        return effects

    def deadline(self, job: View) -> Time | None:
        if not self.active or isinstance(job.state, OVER):
            return None
        return earliest(self.due, self.look_at)

    def validate(self, job: View) -> None:
        rules.validate(self)

    # ---- plans ----

    def _is_due(self, now: Time) -> bool:
        return self.due is not None and self.due <= now

    def _plan(self, job: View, now: Time) -> list[Effect]:
        m = job.membership
        found, surplus = rules.plan(self, self.wanted(job), m.placed, m.excluded, now)
        actions: list[Effect] = []
        if found is not None:
            actions.append(CarryOutPlan(plan=found))
            self._look_by(Time(now + rules.pending_limit_s(self)))
        pauses = [self.positions[number].not_before for number in self.vacant]
        if pauses:
            self.due = earliest(*pauses)
        why = "the job was scaled down"
        for position in surplus:
            self._look_by(Time(now + rules.LEAVE_S))
            away = SendAway(node=position.node, kind="leave", code=EXIT_TRY_AGAIN, why=why)
            actions.append(away)
        return actions

    def wanted(self, job: View) -> int:
        """Count the nodes that are wanted of the platform: others may have come by themselves, and
        what was given up is not asked for."""
        most = self._possible(job)
        if self.at_least:
            most = min(most, max(1, job.terms.min_nodes))
        return max(0, most - len(self.by_hand))

    def _possible(self, job: View) -> int:
        """Count the nodes that the job could have if all came."""
        return job.membership.largest + job.terms.spares - len(self.given_up)

    def _released(self, final: bool = False) -> Effects:
        released = tuple(self.to_release)
        self.to_release.clear()
        if not released and not final:
            return NONE
        self.plans += 1
        plan = SupplyPlan(number=self.plans, release=released, final=final)
        return [CarryOutPlan(plan=plan)]

    # ---- what is given up ----

    def _relaunch_groups(self, gone: list[WantedNode], now: Time) -> list[Effect]:
        """Ask anew for all nodes of a group of which one is gone."""
        effects: list[Effect] = []
        for position in gone:
            for other in rules.others_of_group(self, position):
                node = other.node
                if node:
                    why = f"its group is started anew: request {position.request} ended"
                    self._let_leave(node, other.request, now)
                    effects.append(SendAway(node=node, kind="leave", code=EXIT_TRY_AGAIN, why=why))
                else:
                    self.to_release[other.request] = None
                rules.end(self, other, "deleted", "evicted", now)
        return effects

    def _give_up(self, job: View, ended: list[tuple[WantedNode, GiveUp]]) -> list[Effect]:
        """Report positions that are not asked for again; end the job that cannot do without them."""
        if not ended:
            return []
        position, gave_up = ended[0]
        why = self.given_up[position.number]
        more = f"; {len(ended) - 1} more" if len(ended) > 1 else ""
        note = self._note(job, f"position {position.number} is given up: {why}{more}")
        critical = [p for p, _ in ended if p.number in self.terms.critical]
        code = EXIT_DO_NOT_REQUEUE if gave_up.for_good else EXIT_TRY_AGAIN
        if critical:
            reason = (
                f"position {critical[0].number} is critical: {self.given_up[critical[0].number]}"
            )
            return [note, EndJob(code=code, reason=reason)]
        possible = self._possible(job)
        if possible < max(1, job.terms.min_nodes):
            reason = f"at most {possible} of at least {job.terms.min_nodes} nodes can be had: {why}"
            return [note, EndJob(code=code, reason=reason)]
        return [note]

    def _note(self, job: View, signature: str, action: str = "training goes on with fewer") -> Note:
        return Note(
            kind="supply",
            signature=signature,
            action=action,
            round=job.membership.round,
            step=job.highest,
        )

    # ---- what takes too long ----

    def _let_leave(self, node: NodeId, request: RequestId, now: Time) -> None:
        rules.let_leave(self, node, request, now)
        self._look_by(Time(now + rules.LEAVE_S))

    def _look_by(self, at: Time) -> None:
        self.look_at = at if self.look_at is None else min(self.look_at, at)

    def _look(self, job: View, now: Time) -> list[Effect]:
        """Find nodes that are away or leaving for too long, and requests that are overdue."""
        limit_s = rules.pending_limit_s(self)
        lost, overdue, next_at = self._late(now, limit_s)
        for node in rules.overstaying(self, now):
            rules.left(self, node)
            rules.note_change(self, now)
        self.look_at = earliest(next_at, *self.parting.values())
        effects: list[Effect] = []
        for position in lost:
            self.to_release[position.request] = None
            rules.end(self, position, "lost", "lost", now)
        effects += self._relaunch_groups(lost, now)
        if not overdue:
            return effects
        if job.world is None and job.membership.count() < job.terms.min_nodes:
            return effects + self._mind_shortage(job, overdue, limit_s, now)
        fresh = [p for p in overdue if not p.overdue]
        for position in fresh:
            position.overdue = True
        if fresh:
            effects.append(self._note(job, self._missing(fresh, now)))
        return effects

    def _late(
        self, now: Time, limit_s: Seconds
    ) -> tuple[list[WantedNode], list[WantedNode], Time | None]:
        """Return what is lost, what is overdue, and when to look again."""
        lost, overdue = [], []
        next_at: Time | None = None
        for position in self.positions.values():
            if not position.stands or position.node:
                continue
            away = position.away_since
            at = Time(position.asked_at + limit_s if away is None else away + rules.RETURN_S)
            if at > now:
                next_at = earliest(next_at, at)
            elif away is not None:
                lost.append(position)
            else:
                overdue.append(position)
        return lost, overdue, next_at

    def _mind_shortage(
        self, job: View, overdue: list[WantedNode], limit_s: Seconds, now: Time
    ) -> list[Effect]:
        """Ask for the minimum only, then end with what is missing."""
        if self.short_since is None:
            self.short_since = now
            fewest = max(1, job.terms.min_nodes)
            self.at_least = self.wanted(job) + len(self.by_hand) > fewest
            if self.at_least:
                rules.note_change(self, now)
                self._look_by(Time(now + limit_s))
                return []
        elif now < self.short_since + limit_s:
            self._look_by(Time(self.short_since + limit_s))
            return []
        there, needed = job.membership.count(), job.terms.min_nodes
        missing = self._missing(overdue, now)
        reason = f"{there} of at least {needed} nodes are there; {missing}"
        return [EndJob(code=EXIT_TRY_AGAIN, reason=reason)]

    def _missing(self, overdue: list[WantedNode], now: Time) -> str:
        """Name requests that are not filled, for how long, and what the platform says."""
        oldest = min(overdue, key=lambda p: p.asked_at)
        names = ", ".join(p.request for p in overdue[:NAMED])
        more = f" and {len(overdue) - NAMED} more" if len(overdue) > NAMED else ""
        what = f"request{'s' if len(overdue) > 1 else ''} {names}{more}"
        verb = "are" if len(overdue) > 1 else "is"
        said = oldest.detail or self.refusal
        told = f" ({said})" if said else ""
        silent = "" if self.connected else "; the supplier is away"
        waited_s = now - oldest.asked_at
        return f"{what} {verb} not filled after {waited_s:.0f} s: {oldest.status}{told}{silent}"
