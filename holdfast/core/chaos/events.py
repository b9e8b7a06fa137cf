"""What the machine of injected faults hears: requests, reports of agents, and the round's progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.chaos import plans
from holdfast.core.chaos.plans import Chaos
from holdfast.core.decisions import Refused
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.states import ALWAYS, LIVE, Running
from holdfast.core.view import View
from holdfast.messages.events import FaultAsked, FaultTold, NodeResumed, Progress
from holdfast.messages.records import Place, Terms, World
from holdfast.messages.units import Time


class ChaosMachine(Chaos, Machine):
    @classmethod
    def opened(cls, terms: Terms, at: Time) -> ChaosMachine:
        return cls(plans=plans.opened(terms.chaos).plans)

    @on(FaultAsked, *LIVE, refusal="the job is ending")
    def on_asked(self, job: View, event: FaultAsked, now: Time) -> Effects | Refused:
        if plans.refusal(self, event.injection, job.world, job.highest, job.ranks):
            return Refused(reason="a fault was requested, and then the job changed")
        return plans.asked(self, event, job.world, job.highest, now)

    @on(FaultTold, *ALWAYS)
    def on_told(self, job: View, event: FaultTold, now: Time) -> Effects:
        return plans.told(self, event, now)

    @on(Progress, Running, refusal="no round is in force")
    def on_progress(self, job: View, event: Progress, now: Time) -> Effects:
        steps = [rank.step for rank in event.ranks if rank.steps]
        if not self.plans or not steps or job.world is None or event.round != job.world.round:
            return NONE
        return plans.stepped(self, job.world, min(steps))

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        plans.begin_round(self, world)
        return NONE

    def part_of(self, job: View, world: World, place: Place) -> Mapping[str, Any]:
        return {"traps": plans.set_on(self, place.node)}

    def node_resumed(self, job: View, event: NodeResumed, now: Time) -> Effects:
        return NONE if job.world is None else plans.resumed(self, job.world, event.node)

    def validate(self, job: View) -> None:
        plans.validate(self)
