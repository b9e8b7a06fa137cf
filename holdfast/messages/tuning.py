"""Defines the settings of a data loader that may change while a job runs, and what is said of them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import asdict

from holdfast.messages.data import DataName
from holdfast.messages.units import Count, Rank, RoundNumber, StepNumber, Time, Word

MOST_MICRO_BATCH = 1 << 29
MOST_WORKERS = 4096
MOST_PREFETCH = 1 << 16

ConfigVersion = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Counts the settings that a data set's loaders have had; 0 for those of the script."""
NoticeNumber = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Counts what ranks are told of a data set's settings; 0 before the first."""


class LoaderConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of a loader; what is None stays as the script has it."""

    micro_batch: Annotated[int, Meta(ge=1, le=MOST_MICRO_BATCH)] | None = None
    """Most records that a rank works on at a time."""
    workers: Annotated[int, Meta(ge=0, le=MOST_WORKERS)] | None = None
    """Loader processes of a rank; 0 for none."""
    prefetch: Annotated[int, Meta(ge=1, le=MOST_PREFETCH)] | None = None
    """Batches that each of them reads ahead."""

    def over(self, other: LoaderConfig) -> LoaderConfig:
        """Return these settings, with `other`'s where they say nothing."""
        return LoaderConfig(**{**_given(other), **_given(self)})

    def __bool__(self) -> bool:
        return bool(_given(self))

    def __str__(self) -> str:
        said = (f"{name.replace('_', '-')} {value}" for name, value in _given(self).items())
        return ", ".join(said) or "as the script has it"


def _given(config: LoaderConfig) -> dict[str, int]:
    return {name: value for name, value in asdict(config).items() if value is not None}


class MemoryRoom(Struct, frozen=True, kw_only=True):
    """Memory of a rank at the busiest moment of its steps: of its GPU, or of its host without one."""

    free_bytes: Count
    """What it could have used beside."""
    total_bytes: Count
    """0 if it is not known."""


class LoaderMeasured(Struct, frozen=True, kw_only=True):
    """Speed and memory of one rank with one version of the settings."""

    version: ConfigVersion
    steps_per_s: Annotated[float, Meta(ge=0.0, le=1e9)]
    memory: MemoryRoom


ChangeOutcome = Literal["applied", "given up", "replaced"]


class TuningChange(Struct, frozen=True, kw_only=True):
    """A change of settings, and what became of it."""

    version: ConfigVersion
    """The version in force afterwards."""
    config: LoaderConfig
    """Settings that were asked for."""
    by: Word
    """Who asked: a user, or Holdfast itself."""
    at: Time
    """When it was decided."""
    outcome: ChangeOutcome
    """What became of it."""
    round: RoundNumber
    """The round in which that was decided."""
    step: StepNumber | None = None
    """The loader's step, counted in its round, from which it holds on all ranks; null if it holds
    from the start of the next round."""
    why: str = ""
    """Why it was given up or made; empty where that is plain."""
    visit: Count = 0
    """Number of the request; 0 if no user waits for it."""


class TuningReport(Struct, frozen=True, kw_only=True):
    """The settings of a data set's loaders."""

    dataset: DataName
    """The data set's name."""
    version: ConfigVersion
    """Version of the settings in force; 0 for those of the script."""
    config: LoaderConfig
    """Settings in force, where they differ from the script's."""
    script: LoaderConfig
    """The script's own settings, as rank 0 gave them."""
    ranks: Count
    """Ranks that have opened the data set in this round."""
    missing: list[Rank] = field(default_factory=list)
    """The first ranks that have not."""
    pending: str | None = None
    """The change that is under way, and what it waits for."""
    auto: str | None = None
    """What the automatic search for a micro-batch does, or why it ended; null if there is none."""
    changes: list[TuningChange] = field(default_factory=list)
    """The latest changes, oldest first."""
