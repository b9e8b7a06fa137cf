"""Holds what ranks saved, opened for reading: an image in memory or a file on storage each.

A rank seldom needs what all others saved, and then not for long. So each is opened when first used, and
what is only looked into is closed after that: thousands of open files or connections are more than a
process may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import overload

import msgspec

from holdfast.checkpoint.restore.verified_read import Source, Want, read
from holdfast.checkpoint.state.layout import ByteSpan, Contents, Extent, offset_in_file
from holdfast.errors import Unusable

_contents = msgspec.msgpack.Decoder(Contents)


@dataclass
class StoredState:
    """One rank's state, or some extents of it, in memory or on storage."""

    source: Source
    contents: Contents
    extents: tuple[Extent, ...]
    _skeleton: bytes | None = None

    @property
    def skeleton(self) -> bytes:
        """The skeleton, read once."""
        if self._skeleton is None:
            self._skeleton = _bytes(self, self.contents.skeleton)
        return self._skeleton

    def at(self, span: ByteSpan) -> ByteSpan | None:
        """Return where a range of the body is in the source; None if it is not there."""
        at = offset_in_file(span, self.extents)
        return None if at is None else ByteSpan(at, span.size)


def open_stored(source: Source, contents: ByteSpan, extents: tuple[Extent, ...]) -> StoredState:
    """Read the contents of a source."""
    found = StoredState(source, _NOTHING, extents)
    try:
        found.contents = _contents.decode(_bytes(found, contents))
    except msgspec.DecodeError as error:
        raise Unusable(f"{source.name}: its contents cannot be read: {error}") from None
    return found


_NOTHING = Contents(
    0, 0, 0, 0, ByteSpan(0, 0), ByteSpan(0, 0), ByteSpan(0, 0), ByteSpan(0, 0), (), ()
)


def _bytes(stored: StoredState, span: ByteSpan) -> bytes:
    where = stored.at(span)
    if where is None:
        raise Unusable(f"{stored.source.name} lacks a part that its contents list")
    data = bytearray(span.size)
    read(stored.source, [Want(where, lambda: memoryview(data))])
    return bytes(data)


class OpenedLazily(Sequence[StoredState]):
    """The states of several ranks; each is opened when first used, and stays open as `until` does."""

    def __init__(
        self, count: int, open_one: Callable[[int, ExitStack], StoredState], until: ExitStack
    ) -> None:
        self._count = count
        self._open_one = open_one
        self._until = until
        self._open: dict[int, StoredState] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, rank: int) -> StoredState: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[StoredState]: ...
    def __getitem__(self, rank: int | slice) -> StoredState | Sequence[StoredState]:
        if isinstance(rank, slice):
            return [self[one] for one in range(*rank.indices(len(self)))]
        if rank not in self._open:
            if not 0 <= rank < self._count:
                raise IndexError(rank)
            self._open[rank] = self._open_one(rank, self._until)
        return self._open[rank]

    @contextmanager
    def briefly(self, rank: int) -> Iterator[StoredState]:
        """Open what one rank saved for a look; leave it as it was."""
        with ExitStack() as until:
            yield self._open.get(rank) or self._open_one(rank, until)


@contextmanager
def briefly_open(stored: Sequence[StoredState], rank: int) -> Iterator[StoredState]:
    """Open what one rank saved for a look, if it is not open anyway."""
    if isinstance(stored, OpenedLazily):
        with stored.briefly(rank) as one:
            yield one
    else:
        yield stored[rank]
