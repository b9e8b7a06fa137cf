"""Keeps where a loader stands in its data, and which of its iterations may deliver.

Only one may: when a state is loaded, the epoch set or another iteration begun, the one before is out
of date, and what it has read ahead must not reach the script.
"""

from __future__ import annotations

from typing import NoReturn

from holdfast.data.lockstep import BatchInfo, Division
from holdfast.data.open_step import OpenStep, StepShare
from holdfast.errors import UsageError


class LoaderPlace:
    __slots__ = (
        "current",
        "division",
        "epoch",
        "finished",
        "handed_out",
        "iteration",
        "loads",
        "position",
        "share",
        "stop",
    )

    def __init__(self) -> None:
        self.epoch, self.position = 0, 0
        self.finished = False
        """Whether this process iterated to the end of the epoch, so that the next one comes next."""
        self.iteration = 0
        """Number of the iteration that may deliver; every other one is out of date."""
        self.loads = 0
        """States that were loaded."""
        self.current: BatchInfo | None = None
        """The batch last handed out, in this iteration."""
        self.stop = 0
        """Position after the step of that batch."""
        self.division: Division | None = None
        """What that batch was planned by, unless it is one of `share`."""
        self.share: StepShare | None = None
        """What this rank has to do in a step that was interrupted."""
        self.handed_out = False
        """Whether the last batch of `share` was handed out."""

    def go_to(self, epoch: int, position: int) -> None:
        if self.handed_out:
            self.complete(None)
        self.epoch, self.position, self.finished = epoch, position, False
        self.iteration += 1
        self.current, self.division = None, None

    def load(self, epoch: int, position: int) -> None:
        """Go where a state says."""
        self.go_to(epoch, position)
        self.loads += 1

    def begin(self) -> int:
        """Begin an iteration, in the next epoch if this one is finished; return its number."""
        if self.finished:
            self.go_to(self.epoch + 1, 0)
        self.iteration += 1
        self.current, self.division = None, None
        return self.iteration

    def complete(self, share: StepShare | None) -> None:
        """Hand out that share where its step begins, instead of the whole step."""
        self.share, self.handed_out = share, False

    def due(self) -> StepShare | None:
        """Return the share that begins here, if there is one."""
        share = self.share
        if share is None or self.handed_out:
            return None
        here = share.step.epoch == self.epoch and share.step.start == self.position
        return share if here else None

    def current_share(self) -> StepShare | None:
        """Return what this rank has to do in the step of the batch last handed out."""
        info = self.current
        if info is None or self.division is None:
            return self.due()
        if self.share is not None and _begins(self.share.step) == (info.epoch, info.position):
            return self.share
        step = OpenStep(info.epoch, info.position, info.global_records, self.stop)
        return StepShare(step, self.division.parts_at(step.start, step.size), ())

    def next_share(self) -> StepShare | None:
        """Return what this rank has to do in the step that comes next in this iteration."""
        at = self.position if self.current is None else self.stop
        found = self.division.step_at(at) if self.division is not None else None
        if self.division is None or found is None or self.due() is not None:
            return self.due()
        step = OpenStep(self.division.epoch, at, *found)
        return StepShare(step, self.division.parts_at(step.start, step.size), ())

    def comes_to(self, step: OpenStep, size: int) -> bool:
        """Return whether the next step is that one, in an epoch of `size` positions."""
        if self.position >= size:
            return _begins(step) == (self.epoch + 1, 0)
        return _begins(step) == (self.epoch, self.position)

    def refuse(self, name: str) -> NoReturn:
        """Raise because an iteration over that data set is out of date."""
        raise UsageError(
            f"data set {name!r}: this iteration is out of date, because a state was "
            "loaded, the epoch set or another iteration begun since; what it has read ahead is "
            "not delivered: iterate over the loader again"
        )


def _begins(step: OpenStep) -> tuple[int, int]:
    return step.epoch, step.start
