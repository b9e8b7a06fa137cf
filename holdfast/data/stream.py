"""Reads streams: partitions whose offsets grow without end.

A subclass says which partitions there are and reads one of them from an offset on. Partitions are
divided among ranks, and those of a rank among its loader processes; each is read in order by one
process. A record carries its partition and offset through batching, so the state counts what was
handed to the script and not what loader processes have read ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from holdfast.data.lockstep import Replicas
from holdfast.data.reading import Collate, UnreadBatch, as_unreadable
from holdfast.data.state import VERSION, check_agreement
from holdfast.errors import DataError, UsageError
from holdfast.messages.data import Span
from holdfast.messages.spans import SpanSet

Taken = tuple[int, int, int]
"""Of a partition: the offset from which a batch took records, that after the last, and their number."""


class StreamRecord(NamedTuple):
    """A record whose successor may not have the next offset: for streams whose offsets have gaps."""

    value: Any
    """The record."""
    next_offset: int
    """Offset to go on from after this record."""


class ElasticIterableDataset(IterableDataset):  # type: ignore[misc]
    """Stream of records in partitions. Implement `partitions` and `read`.

    Give it to an `ElasticDataLoader`. A stream may end or not; ranks whose partitions have fewer
    records end earlier, so a script whose ranks step together stops when one of them does. There
    must be at least as many partitions as ranks.

    - `name`: name of the stream in states, errors and reports.
    """

    def __init__(self, *, name: str = "data") -> None:
        self.name = name
        self._offsets: dict[str, int] = {}

    def partitions(self) -> Sequence[str]:
        """Return the names of all partitions, in the same order on all ranks."""
        raise NotImplementedError(f"{type(self).__name__} must implement partitions()")

    def read(self, partition: str, offset: int) -> Iterable[Any]:
        """Iterate over the records of a `partition` from an `offset` on, in order.

        A record takes one offset, unless it is a `StreamRecord` that says from where to go on.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement read(partition, offset)")

    def first_offset(self, partition: str) -> int:
        """Return the offset from which a `partition` is read that was never read before."""
        return 0

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the offset of each partition after what was handed out, as plain values."""
        return {"version": VERSION, "name": self.name, "offsets": dict(self._offsets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the offsets of a `state`."""
        check_agreement(self.name, state, {"name": self.name})
        offsets = state.get("offsets")
        if not isinstance(offsets, Mapping) or not all(map(_is_offset, offsets.items())):
            raise DataError(f"data set {self.name!r}: the state has no offsets of partitions")
        gone = sorted(set(offsets) - set(self.partition_list()))
        if gone:
            raise DataError(
                f"data set {self.name!r}: the state has offsets of partitions that the stream does "
                f"not have: {', '.join(gone)}"
            )
        self._offsets = dict(offsets)

    def merge_state_dicts(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all ranks from the `parts` of each: the largest offsets."""
        if not parts:
            raise DataError(f"data set {self.name!r}: there is no state to merge")
        offsets: dict[str, int] = {}
        for part in parts:
            check_agreement(self.name, part, {"name": self.name})
            for partition, offset in part["offsets"].items():
                offsets[partition] = max(offset, offsets.get(partition, offset))
        return {"version": VERSION, "name": self.name, "offsets": offsets}

    # ---- for loaders ----

    def partition_list(self) -> list[str]:
        """Return the partitions, checked."""
        found = list(self.partitions())
        if not found:
            raise DataError(f"data set {self.name!r} has no partitions")
        if len(set(found)) < len(found) or not all(isinstance(name, str) for name in found):
            raise DataError(f"data set {self.name!r}: partitions() must return names, each once")
        return found

    def offset(self, partition: str) -> int:
        """Return the offset from which a `partition` goes on."""
        known = self._offsets.get(partition)
        return self.first_offset(partition) if known is None else known

    def delivered(self, taken: Mapping[str, Taken]) -> None:
        """Note that a batch was handed to the script, and what was `taken` from each partition."""
        for partition, (_, stop, _) in taken.items():
            self._offsets[partition] = stop

    def used(self) -> SpanSet:
        """Return the offsets that were used, by the index of the partition."""
        lines = {name: line for line, name in enumerate(self.partition_list())}
        return SpanSet.of(
            Span(lines[name], self.first_offset(name), offset)
            for name, offset in self._offsets.items()
            if name in lines
        )

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the records of this rank, without batches."""
        if get_worker_info() is not None:
            raise UsageError(
                f"data set {self.name!r}: loader processes of torch's DataLoader would read ahead "
                "without telling: use holdfast.data.ElasticDataLoader"
            )
        for partition, start, stop, value in StreamReader(self, Replicas.of(None, None)):
            if isinstance(value, UnreadBatch):
                raise value.to_raise()
            self.delivered({partition: (start, stop, 1)})
            yield value


class StreamReader(IterableDataset):  # type: ignore[misc]
    """Reads this rank's partitions by turns, from the offsets of the moment."""

    def __init__(self, stream: ElasticIterableDataset, world: Replicas) -> None:
        self.dataset = stream
        names = stream.partition_list()
        if len(names) < world.size:
            raise DataError(
                f"data set {stream.name!r} has {len(names)} partitions for {world.size} ranks, and "
                "each rank needs one: use fewer ranks or more partitions"
            )
        mine = names[world.rank :: world.size]
        self._begin = {name: stream.offset(name) for name in mine}

    def __iter__(self) -> Iterator[tuple[str, int, int, Any]]:
        info = get_worker_info()
        mine = list(self._begin)
        if info is not None:
            mine = mine[info.id :: info.num_workers]
        turns = [self._records(name) for name in mine]
        while turns:
            left = []
            for turn in turns:
                found = next(turn, None)
                if found is not None:
                    left.append(turn)
                    yield found
            turns = left

    def _records(self, partition: str) -> Iterator[tuple[str, int, int, Any]]:
        at = self._begin[partition]
        try:
            for record in self.dataset.read(partition, at):
                start, at = at, at + 1
                if isinstance(record, StreamRecord):
                    record, at = record
                    if at <= start:
                        raise ValueError(f"next_offset {at} does not come after {start}")
                yield partition, start, at, record
        except Exception as error:  # A user's code: the error goes on, with the place's name.
            said = (
                f"data set {self.dataset.name!r}: partition {partition!r} cannot be read at offset "
                f"{at}: {type(error).__name__}: {error}"
            )
            yield partition, at, at, as_unreadable(said, error)

    @staticmethod
    def collate(
        collate: Collate, records: list[tuple[str, int, int, Any]]
    ) -> tuple[dict[str, Taken], Any]:
        """Make a batch and say what it took from which partition."""
        taken: dict[str, Taken] = {}
        for partition, start, stop, value in records:
            if isinstance(value, UnreadBatch):
                return {}, value
            first, _, count = taken.get(partition, (start, stop, 0))
            taken[partition] = first, stop, count + 1
        return taken, collate([value for *_, value in records])


def _is_offset(item: tuple[Any, Any]) -> bool:
    name, offset = item
    return isinstance(name, str) and type(offset) is int and offset >= 0
