"""Simulates loaders whose settings are changed while ranks train.

Ranks save at the same steps, so these are the boundaries at which they may change. A user wants other
settings now and then, by the step alone: the same seed has the same changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.messages.requests import AnyAnswer, AwaitTuning, SettleTuning, Truth, TuningNotice
from holdfast.messages.tuning import LoaderConfig
from holdfast.messages.units import StepNumber
from holdfast.sim.training import SimRound

if TYPE_CHECKING:
    from holdfast.sim.rank import SimRank

DATASET = "sim"
OWN = LoaderConfig(micro_batch=8, workers=2, prefetch=2)
LISTENING, SETTLING = 100, 101
"""Lanes of a loader's threads."""
MOST_RANKS = 64
"""Larger rounds are simulated for their size, and have no loaders."""
ASKED_EVERY = 3
"""Saves between two wishes of the user."""


class SimLoader:
    """The loader of one rank."""

    def __init__(self, rank: SimRank) -> None:
        self.rank = rank
        self.step = 0
        self.proposal: TuningNotice | None = None
        self._listen(0)

    def _listen(self, after: int) -> None:
        at = StepNumber(self.step)
        about = {"opening": 1, "own": OWN, "most": 64, "at": at, "after": after}
        self.rank.ask(LISTENING, AwaitTuning(dataset=DATASET, **about), self._heard)  # type: ignore[arg-type]

    def _heard(self, answer: AnyAnswer) -> None:
        if not isinstance(answer, TuningNotice):
            return  # The round is over.
        if answer.at_step and self.step < answer.at_step:
            self.proposal = answer
        self._listen(answer.number)

    def pass_boundary(self, step: int) -> None:
        self.step = step
        proposal = self.proposal
        if proposal is None or proposal.at_step is None or step < proposal.at_step:
            return
        self.proposal = None
        number = proposal.number

        def settled(answer: AnyAnswer) -> None:
            if isinstance(answer, Truth):
                self._settled(number, step, answer.so)

        self.rank.ask(SETTLING, SettleTuning(dataset=DATASET, number=number), settled)

    def _settled(self, number: int, step: int, so: bool) -> None:
        agreed = self.rank.round.settled.setdefault(number, (step, so))
        same = agreed == (step, so)
        what = f"rank {self.rank.rank} was told {so} at step {step} of a change, others {agreed}"
        self.rank.agent.cluster.invariants.demand(same, what)


def tune(round: SimRound, step: int, saves: int) -> None:
    """Let all ranks pass a boundary; their user may want other settings."""
    ranks = list(round.ranks.values())
    if not ranks or round.size > MOST_RANKS:
        return
    for one in ranks:
        if one.rank not in round.loaders:
            round.loaders[one.rank] = SimLoader(one)
        round.loaders[one.rank].pass_boundary(step)
    if saves % ASKED_EVERY == 0:
        config = LoaderConfig(micro_batch=1 + saves % 7)
        ranks[0].agent.cluster.coordinator.ask_tune(DATASET, config)
