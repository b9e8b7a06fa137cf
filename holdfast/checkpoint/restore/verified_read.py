"""Reads parts of bodies and files, and trusts no byte before its block's digest was right.

A block is read once, and its digest computed over all of it in order, while it is still in the cache;
so verifying costs little more than reading. What is large goes straight to where it is wanted. All
else goes to a scratch buffer, and what is wanted of it is copied from there once the digest was right:
of thousands of small tensors each costs one `memmove`.

What is large lands in its target before the digest is known. If it turns out wrong, `Refused` is
raised, and whoever asked must not use any of the targets.
"""

from __future__ import annotations

import ctypes
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from holdfast.checkpoint.state.layout import BLOCK_BYTES, ByteSpan, blocks_of, digest_of
from holdfast.errors import Refused

PIECE_BYTES = 128 << 10
"""Less than that is worth copying once more."""
_AT_ONCE_BYTES = 2 << 20
_VECTORS = 1000

_memmove = ctypes.PyDLL(None).memmove
"""Keeps the interpreter's lock: to let it go would take longer than to copy a little."""
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None


class Source(Protocol):
    """Bytes with a digest for each block."""

    name: str
    size: int
    digests: bytes

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        """Fill the views, one after the other, from there on. A block is read from its start to its
        end, by one thread."""


class FileSource:
    """A file that is open, or a part of it."""

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
        """The kernel gives at most so much at a time, and less at a file's end."""
        start = 0
        for view in views:
            begin = max(0, done - start)
            while begin < len(view):
                got = os.preadv(self._fd, [view[begin:]], self._start + at + start + begin)
                if got == 0:
                    raise Refused(f"{self.name} ends too early, at {at + start + begin}")
                begin += got
            start += len(view)

    def close(self) -> None:
        os.close(self._fd)


Piece = tuple[int, int, int]
"""A small stretch of a source: where it is, its size, and the address that it shall be copied to."""


@dataclass
class Want:
    """A stretch of a source, and where it shall go."""

    span: ByteSpan
    target: Callable[[], memoryview]
    """Called before the first byte arrives; memory may be made only then."""
    arrived: Callable[[], None] = lambda: None
    """Called once all of it is there and verified."""


def read(
    source: Source,
    wants: Sequence[Want],
    threads: Executor | None = None,
    pieces: Iterable[Piece] = (),
) -> None:
    """Read all that is wanted; `Refused` if a block is not what its digest says."""
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
    if again or pieces_again:  # Nobody wants the same bytes twice, but for once in a while.
        read(source, again, threads, pieces_again)


def _apart(wants: Sequence[Want]) -> tuple[list[Want], list[Want]]:
    """Wants in their order, and those that overlap one of them."""
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
    """Pieces, and those that overlap a want; wants have an order, and no overlap."""
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
    """All blocks of a source that have something wanted in them."""

    def __init__(self, source: Source, wants: list[Want], pieces: Iterable[Piece]) -> None:
        self._source = source
        self._wants = wants
        self._lock = threading.Lock()
        self._views: dict[int, memoryview] = {}
        self._left: list[int] = []
        self._scratch = threading.local()
        self.by_block: dict[int, list[int]] = {}
        """The wants that have bytes in a block."""
        self.pieces = _by_block(pieces)
        for index, want in enumerate(self._wants):
            touched = _blocks(want.span.at, want.span.size)
            self._left.append(len(touched))
            for block in touched:
                self.by_block.setdefault(block, []).append(index)
            if not touched:
                want.arrived()

    def read_block(self, block: int) -> None:
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self._source.size)
        scratch, address = self._scratch_of(end - start)
        hasher = xxhash.xxh3_128()
        for at, views in _batches(start, self._targets(block, start, end, scratch)):
            self._source.read_into(at, views)
            for view in views:
                hasher.update(view)
        if hasher.digest() != digest_of(self._source.digests, block):
            raise Refused(
                f"{self._source.name}: block {block} of {blocks_of(self._source.size)} is not what"
                " its digest says"
            )
        address -= start
        for at, size, to in self.pieces.get(block, ()):
            _memmove(to, address + at, size)
        self._tell_arrived(block)

    def _scratch_of(self, size: int) -> tuple[memoryview, int]:
        """Memory of this thread, as large as a block, and where it is."""
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = (ctypes.c_ubyte * min(BLOCK_BYTES, self._source.size))()
        memory = self._scratch.memory
        return memoryview(memory).cast("B")[:size], ctypes.addressof(memory)

    def _targets(self, block: int, start: int, end: int, scratch: memoryview) -> list[memoryview]:
        """Where the bytes of a block go, in their order."""
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
    """The blocks that a stretch has bytes in."""
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
    """As much at a time as stays in the cache."""
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
