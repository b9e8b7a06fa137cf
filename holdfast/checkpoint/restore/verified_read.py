"""Reads parts of bodies and files, and verifies each block against its digest.

A block is read once, and hashed in order while it is still in the cache; so verifying costs little more
than reading. Large ranges are read straight into their targets. Everything else goes to a scratch
buffer, and small ranges are copied from there once the digest matched: one `memmove` each.

Large ranges are in their targets before the digest is known. If it does not match, `Unusable` is
raised, and the caller must not use any of the targets.
"""

from __future__ import annotations

import ctypes
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from holdfast.checkpoint.state.layout import BLOCK_BYTES, ByteSpan, blocks_of, digest_of
from holdfast.errors import HoldfastError, Unusable

PIECE_BYTES = 128 << 10
"""Ranges smaller than this are copied out of the scratch buffer."""
_AT_ONCE_BYTES = 2 << 20
_VECTORS = 1000

_memmove = ctypes.PyDLL(None).memmove
"""Keeps the GIL: releasing it would take longer than a small copy."""
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None


class Source(Protocol):
    """Bytes with a digest for each block."""

    name: str
    size: int
    digests: bytes

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        """Fill the views in order, from that offset on. One thread reads a block from start to end."""


class FileSource:
    """An open file, or a part of it."""

    def __init__(self, name: str, fd: int, start: int, size: int, digests: bytes) -> None:
        self.name = name
        self.size = size
        self.digests = digests
        self._fd = fd
        self._start = start

    @classmethod
    def of_image(cls, path: Path, body_at: int, size: int, digests: bytes) -> FileSource:
        return cls(str(path), os.open(path, os.O_RDONLY | os.O_CLOEXEC), body_at, size, digests)

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        want = sum(map(len, views))
        got = os.preadv(self._fd, views, self._start + at)
        if got < want:
            self._read_rest(at, views, got)

    def _read_rest(self, at: int, views: Sequence[memoryview], done: int) -> None:
        """Read on where the kernel returned less than requested."""
        start = 0
        for view in views:
            begin = max(0, done - start)
            while begin < len(view):
                got = os.preadv(self._fd, [view[begin:]], self._start + at + start + begin)
                if got == 0:
                    raise Unusable(f"{self.name} ends too early, at {at + start + begin}")
                begin += got
            start += len(view)

    def close(self) -> None:
        os.close(self._fd)


class Alternatives:
    """The same bytes in several places. A block that one of them does not have whole is read from the
    next; one that cannot be read at all is not asked again."""

    def __init__(self, first: Source, others: Sequence[Callable[[], Source]]) -> None:
        self.name, self.size, self.digests = first.name, first.size, first.digests
        self._sources: list[Source] = [first]
        self._others = list(others)
        self._lock = threading.Lock()

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        next(self.each()).read_into(at, views)

    def each(self) -> Iterator[Source]:
        """Yield the sources, and open others as they are needed."""
        yield from list(self._sources)
        while (another := self._open_next()) is not None:
            yield another

    def give_up(self, source: Source) -> None:
        """Do not read from that source any more, if another is left."""
        with self._lock:
            if source in self._sources and len(self._sources) + len(self._others) > 1:
                self._sources.remove(source)

    def _open_next(self) -> Source | None:
        with self._lock:
            while self._others:
                with suppress(HoldfastError, OSError):
                    opened = self._others.pop(0)()
                    if (opened.size, opened.digests) == (self.size, self.digests):
                        self._sources.append(opened)
                        return opened
        return None


Piece = tuple[int, int, int]
"""A small range of a source: its offset, its size, and the address to copy it to."""


@dataclass
class Want:
    """A range of a source, and its target."""

    span: ByteSpan
    target: Callable[[], memoryview]
    """Called before the first byte is read, so that memory is allocated only then."""
    arrived: Callable[[], None] = lambda: None
    """Called once the whole range is read and verified."""


def read(
    source: Source,
    wants: Sequence[Want],
    threads: Executor | None = None,
    pieces: Iterable[Piece] = (),
) -> None:
    """Read all that is wanted; raise `Unusable` if a block does not match its digest."""
    wants, again = _apart(wants)
    pieces, pieces_again = _beside(pieces, wants)
    reading = _BlockReader(source, wants, pieces)
    blocks = sorted(reading.by_block.keys() | reading.pieces.keys())
    if threads is None or len(blocks) == 1:
        for block in blocks:
            reading.read_block(block)
    else:
        for _ in threads.map(reading.read_block, blocks):
            pass
    if again or pieces_again:  # Rare: the same bytes are wanted twice.
        read(source, again, threads, pieces_again)


def _apart(wants: Sequence[Want]) -> tuple[list[Want], list[Want]]:
    """Split wants into a sorted list without overlaps, and the rest."""
    first, again = [], []
    end = 0
    for want in sorted(wants, key=lambda want: want.span.at):
        if want.span.at < end and want.span.size:
            again.append(want)
        else:
            first.append(want)
            end = max(end, want.span.end)
    return first, again


def _beside(pieces: Iterable[Piece], wants: list[Want]) -> tuple[list[Piece], list[Piece]]:
    """Split pieces into those beside all wants (sorted, without overlaps), and the rest."""
    spans = [want.span for want in wants if want.span.size]
    if not spans:
        return list(pieces), []
    ends = [span.end for span in spans]
    beside: list[Piece] = []
    again: list[Piece] = []
    for piece in pieces:
        index = bisect_right(ends, piece[0])
        meets = index < len(spans) and spans[index].at < piece[0] + piece[1]
        (again if meets else beside).append(piece)
    return beside, again


class _BlockReader:
    """Reads the blocks of a source that contain something wanted."""

    def __init__(self, source: Source, wants: list[Want], pieces: Iterable[Piece]) -> None:
        self._source = source
        self._wants = wants
        self._lock = threading.Lock()
        self._views: dict[int, memoryview] = {}
        self._left: list[int] = []
        self._scratch = threading.local()
        self.by_block: dict[int, list[int]] = {}
        """Wants with bytes in a block."""
        self.pieces = _by_block(pieces)
        for index, want in enumerate(self._wants):
            touched = _blocks(want.span.at, want.span.size)
            self._left.append(len(touched))
            for block in touched:
                self.by_block.setdefault(block, []).append(index)
            if not touched:
                want.arrived()

    def read_block(self, block: int) -> None:
        if not isinstance(self._source, Alternatives):
            self._read_from(self._source, block)
            return
        errors: list[HoldfastError | OSError] = []
        for source in self._source.each():
            try:
                self._read_from(source, block)
                break
            except Unusable as error:
                errors.append(error)
            except (HoldfastError, OSError) as error:
                errors.append(error)
                self._source.give_up(source)
        else:
            raise errors[0]

    def _read_from(self, source: Source, block: int) -> None:
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self._source.size)
        scratch, address = self._scratch_of(end - start)
        hasher = xxhash.xxh3_128()
        for at, views in _batches(start, self._targets(block, start, end, scratch)):
            source.read_into(at, views)
            for view in views:
                hasher.update(view)
        if hasher.digest() != digest_of(source.digests, block):
            raise Unusable(
                f"{source.name}: block {block} of {blocks_of(source.size)} is not what its digest says"
            )
        address -= start
        for at, size, to in self.pieces.get(block, ()):
            _memmove(to, address + at, size)
        self._tell_arrived(block)

    def _scratch_of(self, size: int) -> tuple[memoryview, int]:
        """Return this thread's scratch buffer of a block, and its address."""
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = (ctypes.c_ubyte * min(BLOCK_BYTES, self._source.size))()
        memory = self._scratch.memory
        return memoryview(memory).cast("B")[:size], ctypes.addressof(memory)

    def _targets(self, block: int, start: int, end: int, scratch: memoryview) -> list[memoryview]:
        """Return the targets of a block's bytes, in order."""
        targets = []
        at = start
        for index in self.by_block.get(block, ()):
            span = self._wants[index].span
            begin, stop = max(span.at, start), min(span.end, end)
            targets.append(scratch[at - start : begin - start])
            targets.append(self._view(index)[begin - span.at : stop - span.at])
            at = stop
        return [view for view in (*targets, scratch[at - start :]) if len(view)]

    def _view(self, index: int) -> memoryview:
        with self._lock:
            view = self._views.get(index)
            if view is None:
                view = self._views[index] = self._wants[index].target()
            return view

    def _tell_arrived(self, block: int) -> None:
        for index in self.by_block.get(block, ()):
            with self._lock:
                self._left[index] -= 1
                last = self._left[index] == 0
            if last:
                del self._views[index]
                self._wants[index].arrived()


def _blocks(at: int, size: int) -> range:
    """Return the blocks that a range touches."""
    return range(at // BLOCK_BYTES, blocks_of(at + size)) if size else range(0)


def _by_block(pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for at, size, address in pieces:
        while size:
            block = at // BLOCK_BYTES
            here = min(size, (block + 1) * BLOCK_BYTES - at)
            found.setdefault(block, []).append((at, here, address))
            at, size, address = at + here, size - here, address + here
    return found


def _batches(at: int, targets: list[memoryview]) -> list[tuple[int, list[memoryview]]]:
    """Group targets into reads that stay in the cache."""
    batches: list[tuple[int, list[memoryview]]] = []
    views: list[memoryview] = []
    size = 0
    start = at
    for target in targets:
        for begin in range(0, len(target), _AT_ONCE_BYTES):
            part = target[begin : begin + _AT_ONCE_BYTES]
            if views and (size + len(part) > _AT_ONCE_BYTES or len(views) == _VECTORS):
                batches.append((start, views))
                start, views, size = start + size, [], 0
            views.append(part)
            size += len(part)
    if views:
        batches.append((start, views))
    return batches
