"""Reads parts of bodies and files, and trusts no byte before its block's digest was right.

A block is read once: each wanted part goes straight to where it is wanted, what is between them (and
what nobody wants) to a scratch buffer, and the digest is computed over all of it in order, while it is
still in the cache. So verifying costs little more than reading.

What is read lands in its target before the digest is known. If it turns out wrong, `Refused` is
raised, and whoever asked must not use any of the targets.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from holdfast.checkpoint.digests import digest_of
from holdfast.checkpoint.layout import BLOCK_BYTES, Span, blocks_of
from holdfast.errors import Refused

_AT_ONCE_BYTES = 2 << 20
_VECTORS = 1000


class Source(Protocol):
    """Bytes with a digest for each block."""

    name: str
    size: int
    digests: bytes

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        """Fill the views, one after the other, from there on."""


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


@dataclass
class Want:
    """A stretch of a source, and where it shall go."""

    span: Span
    target: Callable[[], memoryview]
    """Called before the first byte arrives; memory may be made only then."""
    arrived: Callable[[], None] = lambda: None
    """Called once all of it is there and verified."""


def read(source: Source, wants: Sequence[Want], threads: Executor | None = None) -> None:
    """Read all that is wanted; `Refused` if a block is not what its digest says."""
    reading = _Reading(source, sorted(wants, key=lambda want: want.span.at))
    blocks = sorted(reading.by_block)
    run = threads.map if threads is not None else map
    for _ in run(reading.read_block, blocks):
        pass


class _Reading:
    def __init__(self, source: Source, wants: list[Want]) -> None:
        self._source = source
        self._wants = wants
        self._lock = threading.Lock()
        self._views: dict[int, memoryview] = {}
        self._left: list[int] = []
        self.by_block: dict[int, list[int]] = {}
        for index, want in enumerate(wants):
            last = want.span.end - 1 if want.span.size else want.span.at - 1
            touched = range(want.span.at // BLOCK_BYTES, last // BLOCK_BYTES + 1)
            self._left.append(len(touched))
            for block in touched:
                self.by_block.setdefault(block, []).append(index)
            if not touched:
                want.arrived()

    def read_block(self, block: int) -> None:
        start = block * BLOCK_BYTES
        size = min(BLOCK_BYTES, self._source.size - start)
        hasher = xxhash.xxh3_128()
        pieces = self._pieces(block, start, start + size)
        for at, views in _batches(start, pieces):
            self._source.read_into(at, views)
            for view in views:
                hasher.update(view)
        if hasher.digest() != digest_of(self._source.digests, block):
            raise Refused(
                f"{self._source.name}: block {block} of {blocks_of(self._source.size)} is not what"
                " its digest says"
            )
        for index in self.by_block[block]:
            with self._lock:
                self._left[index] -= 1
                last = self._left[index] == 0
            if last:
                del self._views[index]
                self._wants[index].arrived()

    def _pieces(self, block: int, start: int, end: int) -> list[memoryview]:
        """Where the bytes of a block go, in their order."""
        spans = [self._wants[index].span for index in self.by_block[block]]
        wanted = sum(min(span.end, end) - max(span.at, start) for span in spans)
        scratch = memoryview(bytearray(end - start - wanted))
        pieces = []
        at = start
        for index, span in zip(self.by_block[block], spans, strict=True):
            begin, stop = max(span.at, start), min(span.end, end)
            pieces.append(scratch[: begin - at])
            scratch = scratch[begin - at :]
            pieces.append(self._view(index)[begin - span.at : stop - span.at])
            at = stop
        return [piece for piece in (*pieces, scratch) if len(piece)]

    def _view(self, index: int) -> memoryview:
        with self._lock:
            view = self._views.get(index)
            if view is None:
                view = self._views[index] = self._wants[index].target()
            return view


def _batches(at: int, pieces: list[memoryview]) -> list[tuple[int, list[memoryview]]]:
    """As much at a time as stays in the cache."""
    batches: list[tuple[int, list[memoryview]]] = []
    views: list[memoryview] = []
    size = 0
    start = at
    for piece in pieces:
        for begin in range(0, len(piece), _AT_ONCE_BYTES):
            part = piece[begin : begin + _AT_ONCE_BYTES]
            if views and (size + len(part) > _AT_ONCE_BYTES or len(views) == _VECTORS):
                batches.append((start, views))
                start, views, size = start + size, [], 0
            views.append(part)
            size += len(part)
    if views:
        batches.append((start, views))
    return batches
