"""What agents report of ranks that show no progress, and what it means for the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.decisions import BreakRound, Refused
from holdfast.core.faults import Fault
from holdfast.core.hangs import rules
from holdfast.core.hangs.rules import Hangs
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.states import ALWAYS, Running
from holdfast.core.view import View
from holdfast.messages.events import Progress, RanksStalled
from holdfast.messages.records import JobResult, Place, World
from holdfast.messages.units import NodeId, Rank, Seconds, Time

STALE_S: Seconds = 10.0
"""An older report waited for a coordinator that was gone; the agent repeats it if it still holds."""


class HangsMachine(Hangs, Machine):
    @on(RanksStalled, Running, refusal="no round is in force")
    def on_stalled(self, job: View, event: RanksStalled, now: Time) -> Effects | Refused:
        if event.round != job.membership.round or event.node not in job.membership.placed:
            return Refused(reason="the node is not in the round in force")
        if now - event.at > STALE_S:
            return Refused(reason="the report is too old")
        own = tuple(s for s in event.stalls if _is_of(job, event.node, s.rank))
        hang = rules.stalled(self, event.node, own, job.unfinished, now)
        if hang is None:
            return NONE
        stall = hang.stall
        fault = Fault(
            kind="hang",
            node=hang.node,
            rank=None if stall.kind == "waits" else stall.rank,
            round=event.round,
            step=job.ranks[stall.rank].step,
            signature=rules.sentence(hang),
            at=Time(max(0.0, event.at - stall.for_s)),
            outside=stall.kind == "stopped",
            doubtful=not hang.certain,
        )
        return [BreakRound(fault=fault)]

    @on(Progress, *ALWAYS)
    def on_progress(self, job: View, event: Progress, now: Time) -> Effects:
        if event.paces is not None:
            rules.note_paces(self, event.node, event.paces)
        return NONE

    def round_ended(self, job: View, fault: Fault, now: Time) -> Effects:
        rules.round_over(self)
        return NONE

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        rules.round_over(self)
        return NONE

    def part_of(self, job: View, world: World, place: Place) -> Mapping[str, Any]:
        return {"paces": rules.paces(self), "alarms": self.alarms}

    def validate(self, job: View) -> None:
        rules.validate(self)


def _is_of(job: View, node: NodeId, rank: Rank) -> bool:
    """Whether it is a rank of that node that has not finished."""
    found = job.ranks.get(rank)
    return found is not None and found.node == node and not found.finished
