"""Measures the speed of training, of each rank and of all: steps and samples a second.

A rank's worker reports how many steps and samples it has behind it and how long those steps took:
`RankProgress.trained_s` has no evaluation in it, no save, and nothing of a stall. So the speed is that
of the training alone, and time in which nothing was trained does not make it lower.

Each rank has a window of the latest minute or two of training. A window begins with a process, so it
never spans two rounds: neither a step that is taken again after a roll-back nor a change of the world
size can distort it, and the first report after one gives the first mark of the new one. Three marks are
all that is kept: the window's begin, its middle and its end. When the second half is long enough, the
middle becomes the begin. That costs the same for a rank that reports every millisecond and for one
that takes an hour for a step.

A speed is *stable*, fit to decide the size of the world by, when every rank that still trains has a
window with a full half in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from msgspec import Struct, field

from holdfast.core.view import JobSpeed, RankState
from holdfast.messages.records import RankProgress
from holdfast.messages.units import Rank, Seconds

HALF_S: Seconds = 60.0
HALF_STEPS = 5
"""Training in each half of a window, at least: so long, and so many steps."""
LEAST_S: Seconds = 0.5
"""A shorter window says nothing."""


class Mark(Struct, frozen=True, array_like=True):
    """What a rank's process had behind it at the end of a step."""

    trained_s: Seconds
    steps: int
    samples: int | None


class Window(Struct, array_like=True):
    """The latest training of a rank."""

    begin: Mark
    middle: Mark
    end: Mark

    @property
    def seconds(self) -> Seconds:
        return self.end.trained_s - self.begin.trained_s

    @property
    def steps(self) -> int:
        return self.end.steps - self.begin.steps

    @property
    def steps_per_s(self) -> float | None:
        return self.steps / self.seconds if self.seconds >= LEAST_S else None

    @property
    def samples_per_s(self) -> float | None:
        if self.begin.samples is None or self.end.samples is None or self.seconds < LEAST_S:
            return None
        return (self.end.samples - self.begin.samples) / self.seconds

    @property
    def full(self) -> bool:
        """Whether there is a full half in it."""
        return self.seconds >= HALF_S and self.steps >= HALF_STEPS


class TrainingSpeeds(Struct):
    """The windows of the newest round."""

    windows: dict[Rank, Window] = field(default_factory=dict)
    lead: Rank | None = None
    """The lowest rank that has a window."""


def begin_round(speeds: TrainingSpeeds) -> None:
    speeds.windows = {}
    speeds.lead = None


def progressed(speeds: TrainingSpeeds, progress: RankProgress) -> None:
    """Move the end of a rank's window to its latest step."""
    mark = Mark(progress.trained_s, progress.steps, progress.samples)
    window = speeds.windows.get(progress.rank)
    if window is None:
        speeds.windows[progress.rank] = Window(mark, mark, mark)
        speeds.lead = min(progress.rank, progress.rank if speeds.lead is None else speeds.lead)
    elif mark.steps > window.end.steps:
        _extend(window, mark)


def _extend(window: Window, mark: Mark) -> None:
    if not _continues(window, mark):
        window.begin = window.middle = window.end = mark
        return
    window.end = mark
    since = window.middle
    if mark.trained_s - since.trained_s >= HALF_S and mark.steps - since.steps >= HALF_STEPS:
        window.begin, window.middle = since, mark


def _continues(window: Window, mark: Mark) -> bool:
    """Return whether a mark can be compared with the window's begin.

    It cannot if samples are counted only since then, or if the worker now knows that what it took for
    its first steps were pauses.
    """
    began = window.begin.samples
    counted = mark.samples is None or (began is not None and mark.samples >= began)
    return counted and mark.trained_s >= window.end.trained_s


# ---- what it amounts to ----


def steps_per_s(speeds: TrainingSpeeds) -> float | None:
    """Return the job's speed: that of its lowest rank that steps, as all of them step together."""
    return None if speeds.lead is None else speeds.windows[speeds.lead].steps_per_s


def total(speeds: TrainingSpeeds, ranks: Mapping[Rank, RankState]) -> JobSpeed:
    """Add up the speeds of all ranks."""
    training = [speeds.windows.get(rank) for rank, state in ranks.items() if not state.finished]
    counted = [window.samples_per_s for window in training if window is not None]
    known = [per_s for per_s in counted if per_s is not None]
    return JobSpeed(
        world_size=len(ranks),
        steps_per_s=steps_per_s(speeds),
        samples_per_s=sum(known) if known else None,
        stable=bool(training) and all(w is not None and w.full for w in training),
    )


def validate(speeds: TrainingSpeeds, ranks: Mapping[Rank, RankState]) -> None:
    """Check that marks ascend, and that no window is of another round's rank."""
    assert speeds.windows.keys() <= ranks.keys(), "a window of a rank that is not in the round"
    assert speeds.lead == min(speeds.windows, default=None), "the wrong rank leads"
    for rank, window in speeds.windows.items():
        marks = (window.begin, window.middle, window.end)
        for before, after in pairwise(marks):
            assert before.steps <= after.steps, f"the window of rank {rank} goes back in steps"
            assert before.trained_s <= after.trained_s, f"the window of rank {rank} goes back"
