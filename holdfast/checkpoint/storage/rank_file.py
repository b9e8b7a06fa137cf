"""Writes and reads rank files.

    ┌ extents of the body ──────────────┬ trailer ──────────────────┬ footer ──────────────┐
    │ own part, slice of the shared     │ whose and what it is, a   │ how long the trailer │
    │ part, tail: see `layout`          │ digest for each block     │ is, and its digest   │
    └───────────────────────────────────┴───────────────────────────┴──────────────────────┘

Reading starts at the end: footer, trailer, and then any block by itself. The footer's digest guards
the trailer, the trailer's digests guard the blocks, and the manifest, which has the trailer's digest,
guards against a file that is whole but the wrong one.

Writing is one sequential pass over the mapped body, without a copy in between; another thread computes
digests of the same memory. What all ranks have in common is written once: each rank writes a slice, and
the slices follow from the contents alone, so that all ranks agree on them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from struct import Struct as Packed
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from holdfast.checkpoint.state.layout import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    ByteSpan,
    Contents,
    Extent,
    FileRecord,
    Trailer,
    blocks_of,
    digest,
    digest_of,
    offset_in_file,
)
from holdfast.checkpoint.storage.backends import Buffer, Readable, Reader, Storage, step_directory
from holdfast.checkpoint.storage.manifest import find_step
from holdfast.errors import NotThere, StepTaken, StorageError, Unusable

MAGIC: Final = b"HOLDFAST"
VERSION: Final = 1
_FOOTER: Final = Packed("<8sQQ16s")
_TRAILER_MOST: Final = 1 << 20
"""Maximum bytes of a trailer without its digests."""

_encoder = msgspec.msgpack.Encoder()
_trailer_decoder = msgspec.msgpack.Decoder(Trailer)
_contents_decoder = msgspec.msgpack.Decoder(Contents)


def ending(trailer: Trailer) -> tuple[bytes, bytes]:
    """Encode trailer and footer; return them with the trailer's digest."""
    encoded = _encoder.encode(trailer)
    own = digest(encoded)
    return encoded + _FOOTER.pack(MAGIC, VERSION, len(encoded), own), own


class RankFile:
    """An open rank file: a `verified_read.Source`. Only its trailer is verified so far."""

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
        """Read and verify a block; return the part of the buffer that it fills."""
        start = block * BLOCK_BYTES
        view = buffer[: min(BLOCK_BYTES, self.size - start)]
        self._file.read_into(start, [view])
        if digest(view) != digest_of(self.digests, block):
            raise Unusable(
                f"{self.name}: block {block} (bytes {start} to {start + len(view)}) is not what"
                " its digest says"
            )
        return view

    def contents(self, expected: str) -> Contents:
        """Read the contents, if they have that digest."""
        span = self.trailer.contents
        at = offset_in_file(span, self.trailer.extents)
        if at is None:
            raise Unusable(f"{self.name}: the contents are missing")
        data = bytearray(span.size)
        self._file.read_into(at, [memoryview(data)])
        if digest(memoryview(data)).hex() != expected:
            raise Unusable(f"{self.name}: its contents are not what their digest says")
        try:
            return _contents_decoder.decode(data)
        except msgspec.DecodeError as error:
            raise Unusable(f"{self.name}: its contents cannot be read: {error}") from None


@contextmanager
def open_file(storage: Readable, path: str) -> Iterator[RankFile]:
    with storage.open(path) as file:
        where = storage.where(path)
        yield RankFile(where, file, *_read_trailer(where, file))


@contextmanager
def open_listed(storage: Readable, directory: str, record: FileRecord) -> Iterator[RankFile]:
    """Open a rank file that a manifest lists; refuse another one of that name."""
    with open_file(storage, f"{directory}/{record.name}") as file:
        if (file.file_size, file.trailer_digest) != (record.size, record.trailer):
            is_of = file.trailer
            raise Unusable(
                f"{file.name}: is another file than the one that was committed: it is the file of rank"
                f" {is_of.rank} at step {is_of.step} in round {is_of.round}"
            )
        yield file


def is_ours(storage: Readable, path: str) -> bool:
    """Return whether a file has Holdfast's footer; False if it is gone."""
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
        raise Unusable(f"{where}: {file.size} bytes are too short for a rank file")
    footer = bytearray(_FOOTER.size)
    file.read_into(end, [memoryview(footer)])
    magic, version, size, own = _FOOTER.unpack(footer)
    if magic != MAGIC:
        raise Unusable(f"{where}: has no Holdfast footer; it is cut off, or not a rank file")
    if version != VERSION:
        raise Unusable(f"{where}: has version {version}, and this Holdfast reads {VERSION}")
    if size > min(end, _TRAILER_MOST + DIGEST_BYTES * blocks_of(end)):
        raise Unusable(f"{where}: its footer is damaged: a trailer of {size} bytes is impossible")
    data = bytearray(size)
    file.read_into(end - size, [memoryview(data)])
    if digest(memoryview(data)) != own:
        raise Unusable(f"{where}: its trailer is not what its digest says")
    try:
        trailer = _trailer_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise Unusable(f"{where}: its trailer cannot be read: {error}") from None
    if trailer.size + size != end or len(trailer.digests) != DIGEST_BYTES * blocks_of(trailer.size):
        raise Unusable(f"{where}: its trailer is of a file of another size")
    return trailer, own


# ---- which rank writes what ----------------------------------------------------------------------


def slices(contents: Contents, world_size: int) -> list[ByteSpan]:
    """Divide the shared part among the ranks: whole items, about the same bytes each."""
    shared = contents.shared
    inside = (i.framed.at for i in contents.items if shared.at <= i.framed.at < shared.end)
    places = [*sorted(inside), shared.end]
    cuts = [shared.at]
    for rank in range(1, world_size):
        ideal = shared.at + shared.size * rank // world_size
        after = bisect_left(places, ideal)
        near = min(places[max(after - 1, 0) : after + 1], key=lambda at: abs(at - ideal))
        cuts.append(max(cuts[-1], near))
    return [ByteSpan(a, b - a) for a, b in zip(cuts, [*cuts[1:], shared.end], strict=True)]


def extents_of(
    contents: Contents, rank: int, world_size: int, shared: Literal["slice", "all"]
) -> tuple[Extent, ...]:
    """Return which extents of a body go into a rank file."""
    common = slices(contents, world_size)[rank] if shared == "slice" else contents.shared
    extents: list[Extent] = []
    file_at = 0
    for part in (contents.own, common, contents.tail):
        if not part.size:
            continue
        before = extents[-1] if extents else Extent(0, 0, 0)
        if extents and before.body_at + before.size == part.at:
            extents[-1] = Extent(before.body_at, before.file_at, before.size + part.size)
        else:
            extents.append(Extent(part.at, file_at, part.size))
        file_at += part.size
    return tuple(extents)


# ---- writing ------------------------------------------------------------------------------------


def write_file(
    storage: Storage,
    directory: str,
    name: str,
    body: memoryview,
    extents: Sequence[Extent],
    contents_span: ByteSpan,
    step: int,
    round: int,
    rank: int,
    world_size: int,
    on_progress: Callable[[int], None],
    once: bool = True,
) -> FileRecord:
    """Write a rank file durably; `on_progress` is called with the size of each piece written.

    With `once`, a step that is committed already is refused.
    """
    assert offset_in_file(contents_span, extents) is not None, "a file has the contents in it"
    if once:
        _refuse_if_taken(storage, step)
    size = sum(extent.size for extent in extents)
    trailer = Trailer(step, round, rank, world_size, tuple(extents), contents_span, size, b"")
    try:
        storage.make_directory(directory)
        with ThreadPoolExecutor(1, "digest") as beside:
            writing = _Writing(body, trailer, beside, on_progress)
            size = storage.write(f"{directory}/{name}", writing.pieces())
    except StorageError:
        # The writer that committed the step first removes the others' files; that is no failure.
        if once:
            _refuse_if_taken(storage, step)
        raise
    contents = digest(body[contents_span.at : contents_span.end])
    return FileRecord(rank, name, size, writing.digest.hex(), contents.hex())


def _refuse_if_taken(storage: Storage, step: int) -> None:
    found = find_step(storage, step)
    if found.state == "complete" and found.manifest is not None:
        raise StepTaken(
            f"{storage.where(step_directory(step))}: step {step} was committed in round"
            f" {found.manifest.round} already, and is not written again; move it away or save"
            " elsewhere"
        )


def _blocks(body: memoryview, extents: Sequence[Extent]) -> Iterator[list[memoryview]]:
    """Yield the file's blocks, each as the ranges of the body that it consists of."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for extent in extents:
        rest = body[extent.body_at : extent.body_at + extent.size]
        while rest:
            block.append(rest[:room])
            rest, room = rest[room:], room - len(block[-1])
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


def _digest_of_block(parts: list[memoryview]) -> bytes:
    return digest(parts[0] if len(parts) == 1 else b"".join(parts))


class _Writing:
    """The bytes of a rank file in order; the trailer depends on all before it."""

    def __init__(
        self,
        body: memoryview,
        trailer: Trailer,
        beside: ThreadPoolExecutor,
        on_progress: Callable[[int], None],
    ) -> None:
        self.digest = b""
        """Digest of the trailer, once all was written."""
        self._body = body
        self._trailer = trailer
        self._beside = beside
        self._went_on = on_progress

    def pieces(self) -> Iterator[Buffer]:
        digests: list[Future[bytes]] = []
        for parts in _blocks(self._body, self._trailer.extents):
            digests.append(self._beside.submit(_digest_of_block, parts))
            for part in parts:
                yield part
                self._went_on(len(part))
        found = b"".join(future.result() for future in digests)
        end, self.digest = ending(replace(self._trailer, digests=found))
        yield end
