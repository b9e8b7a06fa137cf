"""The settings of each data set's loaders, and the change that is under way."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Literal

from msgspec import Struct, field

from holdfast.core.decisions import Asker
from holdfast.core.tuning.auto import MicroBatchSearch
from holdfast.core.view import View
from holdfast.messages.data import DataName
from holdfast.messages.tuning import LoaderConfig, LoaderMeasured, TuningChange
from holdfast.messages.units import Rank, Seconds, StepNumber, Time

KEPT_CHANGES = 32
NAMED = 8
"""Ranks, or data sets, that a sentence names at most."""


class LoaderSeat(Struct):
    """The loader of one rank of the round."""

    opening: int
    own: LoaderConfig
    most: int = 0
    asker: Asker | None = None
    """The request that waits for a notice."""
    until: Time | None = None
    """When that request wants an answer at the latest."""
    after: int = 0
    at: StepNumber = StepNumber(0)
    heard_at: Time = Time(0.0)
    step_s: Seconds | None = None
    done: bool = False
    """Whether the rank has done what the proposal's phase waits for."""
    measured: LoaderMeasured | None = None
    """With the settings in force."""


class WantedConfig(Struct):
    """A change that was asked for and is not in force."""

    config: LoaderConfig
    by: str
    visit: int = 0
    tries: int = 0
    """Proposals that were cancelled."""
    anyway: bool = False
    """Whether ranks are to hear of it even if it changes nothing."""


Phase = Literal["survey", "proposed", "settled"]
"""Ranks are asked where they are; they have heard of the step; it is certain that they all change."""


class Proposal(Struct):
    """A change that ranks hear of."""

    phase: Phase
    number: int
    """Of the notice that ranks have, or are about to get."""
    missing: int
    """Ranks that the phase waits for."""
    at_step: StepNumber | None = None


class TunedLoader(Struct):
    """The loaders of one data set, on all ranks."""

    version: int = 0
    config: LoaderConfig = LoaderConfig()
    """In force, where it differs from the script's own."""
    issued: int = 0
    """Number of the newest notice."""
    wanted: WantedConfig | None = None
    proposal: Proposal | None = None
    seats: dict[Rank, LoaderSeat] = field(default_factory=dict)
    openings: dict[int, int] = field(default_factory=dict)
    """How many ranks have opened the data set how often."""
    unmeasured: int = 0
    """Ranks that have not measured the settings in force."""
    changes: list[TuningChange] = field(default_factory=list)
    before: LoaderConfig = LoaderConfig()
    """The settings before the newest raise of the micro-batch."""
    raised_at: Time | None = None
    """When the micro-batch was last raised, while that may turn out to be too much."""
    limit: int = 0
    """A micro-batch for which memory did not suffice; 0 if there was none."""
    search: MicroBatchSearch | None = None
    searched: bool = False
    """Whether the script's wish for a search was heeded; it is heeded once."""
    searched_in: int = 0
    """Size of the newest world."""


class Tunings(Struct):
    """All loaders that can be tuned."""

    loaders: dict[DataName, TunedLoader] = field(default_factory=dict)
    until: Time | None = None
    """No request wants an answer before this; it may be earlier than need be, never later."""


def is_open(loader: TunedLoader, job: View) -> bool:
    """Return whether all ranks have opened the data set, equally often. Once one has finished, training
    is about to end, and nothing is changed any more."""
    return len(loader.seats) == len(job.ranks) > 0 and len(loader.openings) == 1


def named(ranks: Iterable[Rank]) -> str:
    """Name the first ranks; empty if there is none."""
    found = [str(rank) for rank in islice(ranks, NAMED)]
    return f"rank{'s' * (len(found) > 1)} {', '.join(found)}" if found else ""
