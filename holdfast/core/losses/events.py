"""Keeps the loss that the script told last, for reports; nothing is decided by it.

Every rank may tell a loss, and each has its own: that of its part of the batch. The job's is that of
the lowest rank which has told one in the newest round, so that values that are shown one after the
other are of the same rank. That is rank 0, or with a pipeline the first rank of the last stage.

A round begins without a loss. What an earlier one told may be of steps that are taken again.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.core.machine import NONE, Effects, Machine
from holdfast.core.view import JobLoss, View
from holdfast.messages.losses import Loss
from holdfast.messages.records import RankProgress, World
from holdfast.messages.units import Rank, StepNumber, Time


class ToldLoss(Struct, frozen=True):
    """The newest loss of a rank."""

    rank: Rank
    value: Loss
    age: int
    """Steps that the rank has finished since. Where these count from may turn out later: see
    `core.ranks`."""


class Losses(Struct):
    newest: ToldLoss | None = None
    """Of the lowest rank that has told one in the newest round."""


class LossesMachine(Losses, Machine):
    def round_began(self, job: View, world: World, now: Time) -> Effects:
        self.newest = None
        return NONE

    def rank_stepped(self, job: View, progress: RankProgress, first: bool, now: Time) -> Effects:
        if progress.loss is None:
            return NONE
        if self.newest is None or progress.rank <= self.newest.rank:
            self.newest = ToldLoss(progress.rank, progress.loss, progress.loss_age)
        return NONE

    def validate(self, job: View) -> None:
        told = self.newest
        assert told is None or told.rank in job.ranks, "a loss of a rank that is not in the round"


def loss_of(losses: Losses, job: View) -> JobLoss | None:
    """Return the job's loss and its step; None if none was told in the newest round."""
    told = losses.newest
    if told is None:
        return None
    return JobLoss(told.value, StepNumber(max(0, job.ranks[told.rank].step - told.age)))
