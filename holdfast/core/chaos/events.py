"""What comes of faults that were asked for, in the round in force."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.chaos import plans
from holdfast.core.chaos.plans import Chaos
from holdfast.core.decisions import Refused
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.states import ALWAYS, LIVE, Running
from holdfast.core.view import View
from holdfast.messages.actions import Inject
from holdfast.messages.chaos import Done, Trap
from holdfast.messages.events import FaultAsked, FaultTold, NodeResumed, Progress
from holdfast.messages.records import Place, Terms, World
from holdfast.messages.units import NodeId, Time

COORDINATOR = NodeId("")


class ChaosMachine(Chaos, Machine):
    @classmethod
    def opened(cls, terms: Terms, at: Time) -> ChaosMachine:
        asked = plans.opened(terms.chaos)
        return cls(plans=asked.plans)

    @on(FaultAsked, *LIVE, refusal="the job is ending")
    def on_asked(self, job: View, event: FaultAsked, now: Time) -> Effects | Refused:
        if plans.refusal(self, event.injection, job.world, job.highest):
            return Refused(reason="the job has changed since the fault was asked for")
        traps = plans.asked(self, event.injection, event.visit, job.world)
        if event.injection.kind == "kill-coordinator" and event.injection.now:
            (trap,) = traps
            done = Done(
                injection=trap.injection,
                occurrence=trap.occurrence,
                kind=trap.kind,
                node=trap.node,
                rank=trap.rank,
                round=job.membership.round,
                step=job.highest,
                at=now,
                known_at=now,
            )
            return self._happened(done)
        return _inject(job, traps)

    @on(FaultTold, *ALWAYS, refusal="")
    def on_told(self, job: View, event: FaultTold, now: Time) -> Effects | Refused:
        """An agent laid a trap, would not, or one was sprung."""
        if not 1 <= event.injection <= len(self.plans):
            return Refused(reason="that fault was not asked for")
        if event.outcome == "armed":
            plans.armed(self, event.injection)
        elif event.outcome == "refused":
            plans.refused(self, event.injection, event.detail)
        elif event.outcome == "missed":
            plans.missed(self, event.injection, event.occurrence, event.detail)
        else:
            done = Done(
                injection=event.injection,
                occurrence=event.occurrence,
                kind=self.plans[event.injection - 1].injection.kind,
                node=event.node,
                rank=event.rank,
                round=event.round,
                step=event.step,
                at=event.at,
                known_at=now,
            )
            return self._happened(done)
        return NONE

    @on(Progress, Running, refusal="no round is in force")
    def on_progress(self, job: View, event: Progress, now: Time) -> Effects:
        """Ranks have come further: lay what comes again and again further on."""
        steps = [rank.step for rank in event.ranks if rank.steps]
        if not self.plans or not steps or job.world is None or event.round != job.world.round:
            return NONE
        return _inject(job, plans.moved_on(self, job.world, min(steps)))

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        plans.begin_round(self, world)
        return NONE

    def part_of(self, job: View, world: World, place: Place) -> Mapping[str, Any]:
        return {"traps": plans.laid_on(self, place.node)}

    def node_resumed(self, job: View, event: NodeResumed, now: Time) -> Effects:
        """Lay the traps again: those on their way to the node may be lost."""
        if job.world is None:
            return NONE
        return _inject(job, list(plans.laid_on(self, event.node)))

    def validate(self, job: View) -> None:
        plans.validate(self)

    def _happened(self, done: Done) -> Effects:
        if not plans.happened(self, done) or done.kind != "kill-coordinator":
            return NONE
        own = Trap(
            injection=done.injection,
            occurrence=done.occurrence,
            kind=done.kind,
            node=COORDINATOR,
            rank=done.rank,
        )
        return [Inject(node=COORDINATOR, round=done.round, trap=own)]


def _inject(job: View, traps: list[Trap]) -> Effects:
    return [Inject(node=trap.node, round=job.membership.round, trap=trap) for trap in traps]
