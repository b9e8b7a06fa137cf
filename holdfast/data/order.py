"""Translates positions of an epoch into records, and back.

    order = Order(10_000_000_000, "records", seed=7, epoch=3)
    order.record(0), order.position(42), order.records(range(0, 4096, 8))

The order is a seeded permutation that is computed and never stored: a Feistel network over pairs of
digits, about the square root of the size each. Its domain exceeds the size by at most that root, so
walking the few values that fall outside back in (cycle walking) costs next to nothing.

It must be the same for ever: a checkpoint holds a position, and a later version has to find the
same records behind it. `tests/data_library/test_order.py` pins it down. With numpy and without it
the results are the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from hashlib import shake_256
from math import isqrt
from typing import Any, Final, get_args

from holdfast.errors import UsageError
from holdfast.messages.data import OrderKind

MAX_SIZE: Final = 1 << 53
MAX_SEED: Final = (1 << 63) - 1
_ROUNDS: Final = 8
_ROUNDS_OF_SMALL: Final = 16
_SMALL: Final = 1 << 16
"""Size below which a round has so few outcomes that more rounds are needed."""
_MASK: Final = (1 << 64) - 1
_MIX: Final = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
"""Odd multipliers whose products spread a difference in any bit over the upper half."""
_FEW: Final = 16
"""Number of positions up to which numpy costs more than it saves."""


class Order:
    """The order of an epoch of `size` records; another `seed` or `epoch` gives another one.

    `kind` says what is shuffled: nothing ("plain"), shards of `shard` records, which stay together
    ("shards"), or all records ("records"). The last shard may be short, wherever it comes.
    """

    def __init__(self, size: int, kind: OrderKind, seed: int, epoch: int, shard: int = 1) -> None:
        _check(size, kind, seed, epoch, shard)
        self.size, self.kind = size, kind
        self._shard = shard if kind == "shards" else 1
        self._shards = -(-size // self._shard)
        self._shuffle = None if kind == "plain" else _Shuffle(self._shards, seed, epoch)
        self._gap = self._shards * self._shard - size
        """Records that the last shard lacks."""
        self._gap_slot = self._shards - 1
        """Where the last shard comes among the shards."""
        if self._shuffle is not None and self._gap:
            self._gap_slot = self._shuffle.inverse(self._shards - 1)

    def record(self, position: int) -> int:
        """Return the record at a `position`."""
        self._check_bounds(position, position)
        if self._shuffle is None:
            return position
        if position >= (self._gap_slot + 1) * self._shard - self._gap:
            position += self._gap
        slot, within = divmod(position, self._shard)
        return self._shuffle.forward(slot) * self._shard + within

    def position(self, record: int) -> int:
        """Return the position of a `record`."""
        self._check_bounds(record, record)
        if self._shuffle is None:
            return record
        shard, within = divmod(record, self._shard)
        slot = self._shuffle.inverse(shard)
        return slot * self._shard + within - (self._gap if slot > self._gap_slot else 0)

    def records(self, positions: Sequence[int]) -> list[int]:
        """Return the records at many `positions`; a range costs least."""
        if not len(positions):
            return []
        self._check_bounds(min(positions), max(positions))
        if self._shuffle is None:
            return list(positions)
        if len(positions) <= _FEW or _numpy() is None:
            return [self.record(position) for position in positions]
        return self._records_by_numpy(self._shuffle, positions)

    def _records_by_numpy(self, shuffle: _Shuffle, positions: Sequence[int]) -> list[int]:
        np = _numpy()
        if isinstance(positions, range):
            at = np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
        else:
            at = np.array(positions, dtype=np.int64)
        if self._shard == 1:
            return shuffle.forward_many(at.astype(np.uint64)).tolist()  # type: ignore[no-any-return]
        at += self._gap * (at >= (self._gap_slot + 1) * self._shard - self._gap)
        slots, within = np.divmod(at.astype(np.uint64), np.uint64(self._shard))
        found = shuffle.forward_many(slots) * np.uint64(self._shard) + within
        return found.tolist()  # type: ignore[no-any-return]

    def _check_bounds(self, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= self.size:
            wrong = lowest if lowest < 0 else highest
            raise IndexError(f"{wrong} is outside a data set of {self.size} records")


class _Shuffle:
    """A pseudo-random permutation of the numbers below a size."""

    __slots__ = ("_high", "_keys", "_low", "_size")

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        # Even, because shifts of an odd number of values are all even permutations.
        self._high = isqrt(size - 1) // 2 * 2 + 2
        self._low = -(-size // self._high)
        rounds = _ROUNDS_OF_SMALL if size < _SMALL else _ROUNDS
        digest = shake_256(b"holdfast order 1" + struct.pack("<QQ", seed, epoch))
        self._keys = struct.unpack(f"<{rounds}Q", digest.digest(8 * rounds))

    def forward(self, value: int) -> int:
        while True:
            high, low = divmod(value, self._low)
            for index in range(0, len(self._keys), 2):
                high = (high + self._drawn(low, index, self._high)) % self._high
                low = (low + self._drawn(high, index + 1, self._low)) % self._low
            value = high * self._low + low
            if value < self._size:
                return value

    def inverse(self, value: int) -> int:
        while True:
            high, low = divmod(value, self._low)
            for index in range(len(self._keys) - 2, -1, -2):
                low = (low - self._drawn(high, index + 1, self._low)) % self._low
                high = (high - self._drawn(low, index, self._high)) % self._high
            value = high * self._low + low
            if value < self._size:
                return value

    def _drawn(self, digit: int, index: int, below: int) -> int:
        """Return a number below a bound that depends on a digit and the key of a round."""
        mixed = (digit + self._keys[index]) * _MIX[0] & _MASK
        mixed = (mixed ^ mixed >> 32) * _MIX[1] & _MASK
        drawn: int = (mixed >> 32) * below >> 32
        return drawn

    def forward_many(self, values: Any) -> Any:
        """Do the same as `forward` to an array of uint64."""
        np = _numpy()
        values = self._forward_once(values)
        while True:
            outside = np.flatnonzero(values >= np.uint64(self._size))
            if not outside.size:
                return values
            values[outside] = self._forward_once(values[outside])

    def _forward_once(self, values: Any) -> Any:
        np = _numpy()
        high, low = np.divmod(values, np.uint64(self._low))
        for index in range(0, len(self._keys), 2):
            self._add_drawn(high, low, index, self._high)
            self._add_drawn(low, high, index + 1, self._low)
        high *= np.uint64(self._low)
        high += low
        return high

    def _add_drawn(self, to: Any, digits: Any, index: int, below: int) -> None:
        """Do in place what a round of `forward` does; sums stay below twice the bound."""
        np = _numpy()
        half = np.uint64(32)
        mixed = digits + np.uint64(self._keys[index])
        mixed *= np.uint64(_MIX[0])
        mixed ^= mixed >> half
        mixed *= np.uint64(_MIX[1])
        mixed >>= half
        mixed *= np.uint64(below)
        mixed >>= half
        to += mixed
        to -= np.uint64(below) * (to >= np.uint64(below))


@cache
def _numpy() -> Any:
    """Return numpy; None where it is not installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _check(size: int, kind: str, seed: int, epoch: int, shard: int) -> None:
    if kind not in get_args(OrderKind):
        raise UsageError(f"order {kind!r} is none of {', '.join(get_args(OrderKind))}")
    limits = {
        "size": (size, 1, MAX_SIZE),
        "seed": (seed, 0, MAX_SEED),
        "epoch": (epoch, 0, MAX_SIZE),
        "shard": (shard, 1, MAX_SIZE),
    }
    for name, (value, least, most) in limits.items():
        if type(value) is not int or not least <= value <= most:
            raise UsageError(f"{name}={value!r} is no whole number from {least} to {most}")
