"""A rank's file on storage.

    ┌ extents of the body ──────────────┬ trailer ──────────────────┬ footer ──────────────┐
    │ own part, slice of the shared     │ whose and what it is, a   │ how long the trailer │
    │ part, tail: see `layout`          │ digest for each block     │ is, and its digest   │
    └───────────────────────────────────┴───────────────────────────┴──────────────────────┘

Reading starts at the end: footer, trailer, and then any block by itself. The footer's digest guards
the trailer, the trailer's digests guard the blocks, and the manifest, which has the trailer's digest,
guards against a file that is whole but another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from struct import Struct as Packed
from typing import Final

import msgspec
from msgspec import Struct

from holdfast.checkpoint.state.layout import BLOCK_BYTES, Contents, Extent, Span, Trailer, blocks_of
from holdfast.checkpoint.storage.backends import Readable, Reader
from holdfast.checkpoint.storage.digests import DIGEST_BYTES, digest, digest_of
from holdfast.errors import NotThere, Refused

MAGIC: Final = b"HOLDFAST"
VERSION: Final = 1
_FOOTER: Final = Packed("<8sQQ16s")
_TRAILER_MOST: Final = 1 << 20
"""Bytes of a trailer without its digests."""

_encoder = msgspec.msgpack.Encoder()
_trailer_decoder = msgspec.msgpack.Decoder(Trailer)
_contents_decoder = msgspec.msgpack.Decoder(Contents)


class FileRecord(Struct, frozen=True):
    """A rank's file as the manifest lists it."""

    rank: int
    name: str
    size: int
    trailer: str
    """Its digest, in hexadecimal."""
    contents: str
    """The digest of the encoded contents: they can be had without reading whole blocks."""


def place(span: Span, extents: Sequence[Extent]) -> int | None:
    """Where a stretch of the body is in the file; None when the file has not all of it."""
    for extent in extents:
        if extent.body_at <= span.at and span.end <= extent.body_at + extent.size:
            return span.at - extent.body_at + extent.file_at
    return None


def ending(trailer: Trailer) -> tuple[bytes, bytes]:
    """What a file ends with, and the trailer's digest."""
    encoded = _encoder.encode(trailer)
    own = digest(encoded)
    return encoded + _FOOTER.pack(MAGIC, VERSION, len(encoded), own), own


class RankFile:
    """A rank's file, open. Its trailer was verified, and nothing else yet.

    It is a `reading.Source`: name, size, digests and `read_into`.
    """

    def __init__(self, name: str, file: Reader, trailer: Trailer, trailer_digest: bytes) -> None:
        self.name = name
        self.size = trailer.size
        self.digests = trailer.digests
        self.trailer = trailer
        self.trailer_digest = trailer_digest.hex()
        self.file_size = file.size
        self._file = file

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        self._file.read_into(at, views)

    def read_block(self, block: int, buffer: memoryview) -> memoryview:
        """Read a block into a buffer; the part of the buffer that it fills, verified."""
        start = block * BLOCK_BYTES
        view = buffer[: min(BLOCK_BYTES, self.size - start)]
        self._file.read_into(start, [view])
        if digest(view) != digest_of(self.digests, block):
            raise Refused(
                f"{self.name}: block {block} (bytes {start} to {start + len(view)}) is not what"
                " its digest says"
            )
        return view

    def contents(self, expected: str) -> Contents:
        """What the body holds, if it has that digest."""
        span = self.trailer.contents
        at = place(span, self.trailer.extents)
        if at is None:
            raise Refused(f"{self.name}: it does not hold its own contents")
        data = bytearray(span.size)
        self._file.read_into(at, [memoryview(data)])
        if digest(memoryview(data)).hex() != expected:
            raise Refused(f"{self.name}: its contents are not what their digest says")
        try:
            return _contents_decoder.decode(data)
        except msgspec.DecodeError as error:
            raise Refused(f"{self.name}: its contents cannot be read: {error}") from None


@contextmanager
def open_file(storage: Readable, path: str) -> Iterator[RankFile]:
    with storage.open(path) as file:
        where = storage.where(path)
        yield RankFile(where, file, *_read_trailer(where, file))


def read_trailer(storage: Readable, path: str) -> Trailer:
    with open_file(storage, path) as file:
        return file.trailer


def is_ours(storage: Readable, path: str) -> bool:
    """Whether a file ends as those that are written here do; not when it is gone."""
    footer = bytearray(_FOOTER.size)
    try:
        with storage.open(path) as file:
            if file.size < len(footer):
                return False
            file.read_into(file.size - len(footer), [memoryview(footer)])
    except NotThere:
        return False
    return footer.startswith(MAGIC)


def _read_trailer(where: str, file: Reader) -> tuple[Trailer, bytes]:
    end = file.size - _FOOTER.size
    if end < 0:
        raise Refused(f"{where}: {file.size} bytes are too short for a file of ours")
    footer = bytearray(_FOOTER.size)
    file.read_into(end, [memoryview(footer)])
    magic, version, size, own = _FOOTER.unpack(footer)
    if magic != MAGIC:
        raise Refused(f"{where}: does not end as files of ours do; it is cut off, or another's")
    if version != VERSION:
        raise Refused(f"{where}: has version {version}, and this Holdfast reads {VERSION}")
    if size > min(end, _TRAILER_MOST + DIGEST_BYTES * blocks_of(end)):
        raise Refused(f"{where}: its footer is damaged: a trailer of {size} bytes cannot be")
    data = bytearray(size)
    file.read_into(end - size, [memoryview(data)])
    if digest(memoryview(data)) != own:
        raise Refused(f"{where}: its trailer is not what its digest says")
    try:
        trailer = _trailer_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise Refused(f"{where}: its trailer cannot be read: {error}") from None
    if trailer.size + size != end or len(trailer.digests) != DIGEST_BYTES * blocks_of(trailer.size):
        raise Refused(f"{where}: its trailer is of a file of another size")
    return trailer, own
