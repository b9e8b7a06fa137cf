"""Reads the records of a batch, in the training process or in a loader process.

What is sent to a loader process is an epoch, a position and a list of records. So it can seed
random augmentation from them, and an error can name the record. An error travels as a value: torch
would keep only its text.
"""

from __future__ import annotations

import operator
import pickle
import random
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch.utils.data import get_worker_info

from holdfast.errors import DataError

Seeding = Literal["batches", "records", "off"]
Collate = Callable[[list[Any]], Any]


BatchRequest = tuple[int, int, int, list[Any], list[int] | None]
"""A batch to read: its epoch, the position of its first record, the distance between positions, the
records, and all their positions if these are not that far apart. A plain tuple of numbers, because a
loader process is sent one for each batch, and pickling a class takes longer than all the rest."""


class LoaderTraceback(Exception):
    """Traceback of an exception in a loader process, as text."""


@dataclass(frozen=True)
class UnreadBatch:
    """A batch that could not be read."""

    message: str
    error: Exception
    traceback: str
    """Empty if the error was raised in this process."""

    def to_raise(self) -> DataError:
        if self.traceback:
            self.error.__cause__ = LoaderTraceback(f"in a loader process:\n{self.traceback}")
        found = DataError(self.message)
        found.__cause__ = self.error
        return found


class BatchReader:
    """Data set of whole batches, for torch's DataLoader."""

    def __init__(
        self, dataset: Any, name: str, collate: Collate, seeding: Seeding, seed: int
    ) -> None:
        self.dataset, self.name = dataset, name
        self._collate, self._seeding, self._seed = collate, seeding, seed
        self._read_many = getattr(dataset, "__getitems__", None)

    def __getitem__(self, request: BatchRequest) -> Any:
        """Read a batch; an error is returned as an `UnreadBatch`."""
        if self._seeding != "off" and get_worker_info() is not None:
            if self._seeding == "records":
                return self._read_seeded(request)
            seed_process(self._seed, request[0], request[1])
        dataset, records = self.dataset, request[3]
        left = iter(records)
        try:
            if self._read_many is not None:
                samples = self._read_many(records)
            else:
                samples = [dataset[record] for record in left]
        except Exception as error:  # A user's code: the error goes on, with the record's name.
            at = len(records) - operator.length_hint(left) - 1
            which = slice(at, at + 1) if self._read_many is None else slice(None)
            return as_unreadable(self._said(request, which, error), error)
        return self._collate(samples)

    def _read_seeded(self, request: BatchRequest) -> Any:
        """Read a batch with a seed for each record."""
        samples: list[Any] = []
        for index, position in enumerate(_positions(request)):
            seed_process(self._seed, request[0], position)
            record = request[3][index]
            try:
                if self._read_many is not None:
                    samples += self._read_many([record])
                else:
                    samples.append(self.dataset[record])
            except Exception as error:  # A user's code: the error goes on, with the record's name.
                said = self._said(request, slice(index, index + 1), error)
                return as_unreadable(said, error)
        return self._collate(samples)

    def _said(self, request: BatchRequest, which: slice, error: Exception) -> str:
        """Name what could not be read."""
        records, positions = request[3][which], _positions(request)[which]
        what = ", ".join(map(str, records))
        noun = "record" if len(records) == 1 else "one of the records"
        file = self._file(records[0], error) if len(records) == 1 else ""
        return (
            f"data set {self.name!r}: {noun} {what} cannot be read{file} "
            f"(position {positions[0]} of epoch {request[0]}): {type(error).__name__}: {error}"
        )

    def _file(self, record: Any, error: Exception) -> str:
        """Name the file of a record, where the data set or the error does."""
        where = getattr(self.dataset, "where", None)
        try:
            found = where(record) if where is not None else getattr(error, "filename", None)
        except Exception:  # A user's code that only helps to explain: the first error matters more.
            found = None
        return f" from {found}" if found else ""


def _positions(request: BatchRequest) -> Sequence[int]:
    """Return the position of each record of a batch."""
    _, first, distance, records, listed = request
    if listed is not None:
        return listed
    return range(first, first + distance * len(records), distance)


def as_unreadable(message: str, error: Exception) -> UnreadBatch:
    """Pack an error of this process so that it survives the way out of a loader process."""
    if get_worker_info() is None:
        return UnreadBatch(message, error, "")
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # Whatever a user's exception does when it is pickled: its text is left.
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return UnreadBatch(message, error, text)


def seed_process(seed: int, epoch: int, position: int) -> None:
    """Seed the generators of this process, the same for the same position of an epoch.

    Only generators of the CPU: loader processes have no other.
    """
    drawn = derived_seed(seed, epoch, position)
    random.seed(drawn)
    torch.default_generator.manual_seed(drawn)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(drawn & 0xFFFFFFFF)


def derived_seed(seed: int, epoch: int, position: int) -> int:
    digest = blake2b(struct.pack("<QQQ", seed, epoch, position), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
