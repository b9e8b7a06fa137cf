"""Knows the records that a loader reads in lockstep: how many, in which order, and how to say so.

A position counts records, or the batches of a user's batch sampler. States, and what the job is told,
name everything that a position depends on, so that it is never taken for one of other data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from holdfast.data.lockstep import bounds
from holdfast.data.order import Order
from holdfast.errors import DataError
from holdfast.messages.data import DataSpec, OrderKind, Span, Task
from holdfast.messages.spans import SpanSet

_LINES_TOLD: Final = 1000
"""Epochs before this one that are told to the coordinator as used; the packed set is bounded."""


class OrderedRecords:
    """The records of a map-style data set, or the batches of a batch sampler, in order."""

    def __init__(
        self,
        dataset: Any,
        batches: Iterable[list[Any]] | None,
        *,
        name: str,
        kind: OrderKind,
        seed: int,
        shard: int,
        sub_epochs: int,
        task: Task,
    ) -> None:
        self._dataset, self._batches = dataset, batches
        self.name, self.kind, self.seed, self.shard = name, kind, seed, shard
        self._sub_epochs = sub_epochs
        self.task = task

    @property
    def size(self) -> int:
        return len(self._batches if self._batches is not None else self._dataset)  # type: ignore[arg-type]

    def part(self, position: int) -> tuple[int, int]:
        """Return start and stop of the sub-epoch that a position is in."""
        return bounds(self.size, self._sub_epochs, position)

    def order(self, epoch: int) -> Order:
        size = self.size
        if not size:
            raise DataError(f"data set {self.name!r} has no records")
        return Order(size, self.kind, self.seed, epoch, self.shard)

    def listed(self, epoch: int) -> list[list[Any]] | None:
        """Return the batches of the user's batch sampler in an epoch; None if there is none."""
        if self._batches is None:
            return None
        set_epoch = getattr(self._batches, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        listed = [list(batch) for batch in self._batches]
        if len(listed) != self.size:
            raise DataError(
                f"data set {self.name!r}: the batch sampler has {len(listed)} batches in epoch "
                f"{epoch} and says that it has {self.size}"
            )
        return listed

    def agreed(self) -> dict[str, int | str]:
        """Return what a state must have in common with these records."""
        return {
            "name": self.name,
            "unit": "records" if self._batches is None else "batches",
            "size": self.size,
            "order": self.kind,
            "seed": self.seed,
            "shard": self.shard,
        }

    def spec(self) -> DataSpec:
        """Return what the job is told of them."""
        return DataSpec(
            name=self.name,
            sharing="lockstep",
            size=self.size,
            shard=self.shard,
            epochs=0,
            sub_epochs=self._sub_epochs,
            order=self.kind,
            seed=self.seed,
            task=self.task,
            exact=self.task == "training",
        )

    def used_before(self, epoch: int, position: int) -> SpanSet:
        """Return the positions before that place."""
        size = self.size
        whole = range(max(0, epoch - _LINES_TOLD), epoch)
        spans = [Span(line, 0, size) for line in whole]
        return SpanSet.of([*spans, Span(epoch, 0, position)])
