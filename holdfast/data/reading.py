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
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import get_worker_info

from holdfast.errors import DataError

Seeding = Literal["batches", "records", "off"]
Collate = Callable[[list[Any]], Any]


class BatchRequest(NamedTuple):
    """A batch to read."""

    epoch: int
    positions: Sequence[int]
    records: Sequence[Any]


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
        in_loader_process = get_worker_info() is not None
        try:
            if not in_loader_process or self._seeding == "off":
                samples = self._read(request)
            elif self._seeding == "batches":
                seed_process(self._seed, request.epoch, request.positions[0])
                samples = self._read(request)
            else:
                samples = self._read_seeded(request)
        except _NotRead as found:
            return _unreadable(found.message, found.error, in_loader_process)
        return self._collate(samples)

    def _read(self, request: BatchRequest) -> Any:
        dataset, records = self.dataset, request.records
        left = iter(records)
        try:
            if self._read_many is not None:
                return self._read_many(records)
            return [dataset[record] for record in left]
        except Exception as error:  # A user's code: the error goes on, with the record's name.
            if self._read_many is not None:
                raise _NotRead(self._said(request, slice(None), error), error) from None
            at = len(records) - operator.length_hint(left) - 1
            raise _NotRead(self._said(request, slice(at, at + 1), error), error) from None

    def _read_seeded(self, request: BatchRequest) -> list[Any]:
        samples: list[Any] = []
        for position, record in zip(request.positions, request.records, strict=True):
            seed_process(self._seed, request.epoch, position)
            samples += self._read(BatchRequest(request.epoch, [position], [record]))
        return samples

    def _said(self, request: BatchRequest, which: slice, error: Exception) -> str:
        """Name what could not be read."""
        records, positions = request.records[which], request.positions[which]
        what = ", ".join(map(str, records))
        noun = "record" if len(records) == 1 else "one of the records"
        file = self._file(records[0], error) if len(records) == 1 else ""
        return (
            f"data set {self.name!r}: {noun} {what} cannot be read{file} "
            f"(position {positions[0]} of epoch {request.epoch}): {type(error).__name__}: {error}"
        )

    def _file(self, record: Any, error: Exception) -> str:
        """Name the file of a record, where the data set or the error does."""
        where = getattr(self.dataset, "where", None)
        try:
            found = where(record) if where is not None else getattr(error, "filename", None)
        except Exception:  # A user's code that only helps to explain: the first error matters more.
            found = None
        return f" from {found}" if found else ""


class _NotRead(Exception):
    """An exception of the data set, and what it means."""

    def __init__(self, message: str, error: Exception) -> None:
        super().__init__(message)
        self.message, self.error = message, error


def as_unreadable(message: str, error: Exception) -> UnreadBatch:
    """Pack an error of this process so that it survives the way out of a loader process."""
    return _unreadable(message, error, get_worker_info() is not None)


def _unreadable(message: str, error: Exception, in_loader_process: bool) -> UnreadBatch:
    if not in_loader_process:
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
