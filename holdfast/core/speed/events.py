"""What the speed monitor hears: rounds that begin, and ranks that finish steps."""

from __future__ import annotations

from holdfast.core.machine import NONE, Effects, Machine
from holdfast.core.speed import windows
from holdfast.core.speed.windows import TrainingSpeeds
from holdfast.core.view import View
from holdfast.messages.records import RankProgress, World
from holdfast.messages.units import Time


class SpeedMachine(TrainingSpeeds, Machine):
    def round_began(self, job: View, world: World, now: Time) -> Effects:
        windows.begin_round(self)
        return NONE

    def rank_stepped(self, job: View, progress: RankProgress, first: bool, now: Time) -> Effects:
        windows.progressed(self, progress)
        return NONE

    def validate(self, job: View) -> None:
        windows.validate(self, job.ranks)
