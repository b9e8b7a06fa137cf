"""Keeps where a loader stands in its data, and which of its iterations may deliver.

Only one may: when a state is loaded, the epoch set or another iteration begun, the one before is out
of date, and what it has read ahead must not reach the script.
"""

from __future__ import annotations

from typing import NoReturn

from holdfast.data.lockstep import BatchInfo
from holdfast.errors import UsageError


class LoaderPlace:
    __slots__ = (
        "current",
        "epoch",
        "finished",
        "iteration",
        "loads",
        "position",
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

    def go_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position, self.finished = epoch, position, False
        self.iteration += 1
        self.current = None

    def load(self, epoch: int, position: int) -> None:
        """Go where a state says."""
        self.go_to(epoch, position)
        self.loads += 1

    def begin(self) -> int:
        """Begin an iteration, in the next epoch if this one is finished; return its number."""
        if self.finished:
            self.go_to(self.epoch + 1, 0)
        self.iteration += 1
        self.current = None
        return self.iteration

    def refuse(self, name: str) -> NoReturn:
        """Raise because an iteration over that data set is out of date."""
        raise UsageError(
            f"data set {name!r}: this iteration is out of date, because a state was "
            "loaded, the epoch set or another iteration begun since; what it has read ahead is "
            "not delivered: iterate over the loader again"
        )
