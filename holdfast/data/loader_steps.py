"""Tells the positions of a loader's steps, and has it hand out the rest of one that was interrupted."""

from __future__ import annotations

from holdfast.data.open_step import OpenStep, StepShare
from holdfast.data.place import LoaderPlace
from holdfast.data.records import OrderedRecords


class LoaderSteps:
    """The steps of one loader.

    `able` says whether the records of a step can be shared out anew, over any number of ranks."""

    def __init__(self, place: LoaderPlace, records: OrderedRecords, *, able: bool) -> None:
        self._place, self._records = place, records
        self.able = able

    def current(self) -> StepShare | None:
        """Return what this rank has to do in the step of the batch last handed out."""
        return self._place.current_share() if self.able else None

    def following(self) -> StepShare | None:
        """Return what this rank has to do in the step after that; None if that cannot be told."""
        return self._place.next_share() if self.able else None

    def comes_to(self, step: OpenStep) -> bool:
        """Return whether the loader's next step is that one."""
        return self.able and self._place.comes_to(step, self._records.size)

    def complete(self, share: StepShare | None) -> None:
        """Hand out the batches of a share where its step begins, instead of the whole step; with
        None, forget the one that was given before. All ranks do so alike."""
        self._place.complete(share)
