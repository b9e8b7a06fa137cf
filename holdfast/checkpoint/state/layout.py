"""What is where in a rank's state, once it is bytes.

A rank's state at a step becomes one run of bytes, its *body*:

    ┌ own ───────────────┬ shared ───────────────┬ tail ─────────────────────────────┐
    │ shards and small   │ large plain tensors,  │ values, skeleton, contents        │
    │ tensors, this      │ the same on all ranks │ (what changes its size from save  │
    │ rank's alone       │                       │  to save is here, at the end)     │
    └────────────────────┴───────────────────────┴───────────────────────────────────┘

Each tensor stands there as `torch.save` would have written it: a short constant header, then its raw
bytes, 64-byte aligned. So a body, or a part of it, is a `.distcp` file of
`torch.distributed.checkpoint` as it is, and to persist it is one sequential copy.

The *skeleton* is the state with its tensors taken out: nested containers and plain values, and a
reference to an item where a tensor was. The *contents* say where everything is; they come last.

On storage, ranks need not all write what they share: a file holds the own part, one slice of the
shared part and the tail. Its *trailer* says which extents of the body it has, and has a digest of
every block. The trailer's own digest is in the manifest.

Digests are xxh3-128. They guard against what goes wrong by itself (a torn write, a flipped bit, a wrong
file), not against deception; for that there are file permissions and the job's token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final, Literal

import xxhash
from msgspec import Struct

ALIGNMENT = 64
BLOCK_BYTES = 16 << 20
"""Digests are of blocks of that size, counted from the start of a body or file; the last is shorter."""

Kind = Literal["own", "shared", "shard"]


class ByteSpan(Struct, frozen=True, array_like=True):
    at: int
    size: int

    @property
    def end(self) -> int:
        return self.at + self.size


class TensorItem(Struct, frozen=True, array_like=True):
    """A tensor, or the part of one that this rank has."""

    name: str
    """Its path in the state, dotted, as DCP names it."""
    kind: Kind
    dtype: str
    """As torch spells it, without "torch."."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Where this part begins in the whole; all 0 when it is the whole."""
    sizes: tuple[int, ...]
    """The shape of this part."""
    framed: ByteSpan
    """Header and raw bytes together: what `torch.load` wants to see."""
    raw: ByteSpan
    """The raw bytes, contiguous in the order of `sizes`."""
    also: tuple[str, ...] = ()
    """Other names of the same tensor: it is tied."""
    strides: tuple[int, ...] | None = None
    """Of the tensor in memory, when it was dense but not contiguous."""


class ValueItem(Struct, frozen=True, array_like=True):
    """A plain value as `torch.save` would write it, for readers that know nothing of us."""

    name: str
    framed: ByteSpan


class Contents(Struct, frozen=True):
    """What a body holds."""

    step: int
    round: int
    rank: int
    world_size: int
    own: ByteSpan
    shared: ByteSpan
    tail: ByteSpan
    skeleton: ByteSpan
    items: tuple[TensorItem, ...]
    values: tuple[ValueItem, ...]
    references: tuple[int, ...] = ()
    """For each tensor that the skeleton refers to, the item that it is; empty: in their order."""
    paths: tuple[tuple[str, tuple[str | int, ...]], ...] = ()
    """Dotted names whose path cannot be had by splitting at the dots, and that path."""


class Extent(Struct, frozen=True, array_like=True):
    """A stretch of a body, and where it is in a file."""

    body_at: int
    file_at: int
    size: int


class Trailer(Struct, frozen=True):
    """The end of a rank's file on storage."""

    step: int
    round: int
    rank: int
    world_size: int
    extents: tuple[Extent, ...]
    contents: ByteSpan
    """Where the encoded contents are, in the body."""
    size: int
    """Bytes of the file before the trailer: what the blocks' digests are of."""
    digests: bytes
    """16 bytes for each block of the file."""


class FileRecord(Struct, frozen=True):
    """A rank's file as the manifest lists it."""

    rank: int
    name: str
    size: int
    trailer: str
    """Its digest, in hexadecimal."""
    contents: str
    """The digest of the encoded contents: they can be had without reading whole blocks."""


def offset_in_file(span: ByteSpan, extents: Sequence[Extent]) -> int | None:
    """Return where a range of the body is in a file; None if the file lacks some of it."""
    for extent in extents:
        if extent.body_at <= span.at and span.end <= extent.body_at + extent.size:
            return span.at - extent.body_at + extent.file_at
    return None


def blocks_of(size: int) -> int:
    """How many blocks a body or file of that size has."""
    return -(-size // BLOCK_BYTES)


def aligned(at: int, to: int = ALIGNMENT) -> int:
    return -(-at // to) * to


# ---- digests -------------------------------------------------------------------------------------

DIGEST_BYTES: Final = 16


def digest(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def block_digests(
    view: memoryview, threads: Executor | None = None, went_on: Callable[[], object] = lambda: None
) -> bytes:
    """The digests of all blocks of a view, one after the other."""

    def one(index: int) -> bytes:
        went_on()
        return digest(view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES])

    indices = range(blocks_of(len(view)))
    return b"".join(threads.map(one, indices) if threads is not None else map(one, indices))


def digest_of(digests: bytes, block: int) -> bytes:
    return digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
