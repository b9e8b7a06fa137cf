"""Defines how a rank's state is laid out as bytes, and how they are digested.

A rank's state at a step becomes one run of bytes, its *body*:

    ┌ own ───────────────┬ shared ───────────────┬ tail ─────────────────────────────┐
    │ shards and small   │ large plain tensors,  │ values, skeleton, contents        │
    │ tensors, this      │ the same on all ranks │ (what changes its size from save  │
    │ rank's alone       │                       │  to save is here, at the end)     │
    └────────────────────┴───────────────────────┴───────────────────────────────────┘

Each tensor is stored as `torch.save` would have written it: a short constant header, then its raw
bytes, 64-byte aligned. So a body, or a part of it, is a `.distcp` file of
`torch.distributed.checkpoint` as it is, and persisting it is one sequential copy.

The *skeleton* is the state without its tensors: nested containers, plain values, and a reference to an
item in place of each tensor. The *contents* list where everything is; they come last.

On storage, each rank writes only a slice of what all share: a rank file holds the own part, one slice
of the shared part, and the tail. Its *trailer* lists which extents of the body it has, with a digest
of every block. The trailer's own digest is in the manifest.

Digests are xxh3-128 of each block, so any range can be checked without reading the rest. They guard
against accidents (a torn write, a flipped bit, a wrong file), not against forgery; for that there are
file permissions and the job's token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final, Literal

import xxhash
from msgspec import Struct

ALIGNMENT = 64
BLOCK_BYTES = 16 << 20
"""Size of a block with a digest, counted from the start of a body or file; the last is shorter."""

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
    """Header and raw bytes together: what `torch.load` reads."""
    raw: ByteSpan
    """The raw bytes, contiguous in the order of `sizes`."""
    also: tuple[str, ...] = ()
    """Other names of the same tensor, if it is tied."""
    strides: tuple[int, ...] | None = None
    """Strides of the tensor in memory, if it was dense but not contiguous."""


class ValueItem(Struct, frozen=True, array_like=True):
    """A plain value as `torch.save` would write it, for readers other than Holdfast."""

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
    """Item of each tensor that the skeleton refers to; empty: in their order."""
    paths: tuple[tuple[str, tuple[str | int, ...]], ...] = ()
    """Dotted names whose path is not the name split at its dots, and that path."""
    parameters: dict[str, tuple[str, ...]] = {}
    """Optimizers whose state is under the names of their parameters: these, in the order in which the
    optimizer had them."""


class Extent(Struct, frozen=True, array_like=True):
    """A range of a body, and where it is in a file."""

    body_at: int
    file_at: int
    size: int


class Trailer(Struct, frozen=True):
    """The end of a rank file."""

    step: int
    round: int
    rank: int
    world_size: int
    extents: tuple[Extent, ...]
    contents: ByteSpan
    """Where the encoded contents are in the body."""
    size: int
    """Bytes of the file before the trailer, which the digests cover."""
    digests: bytes
    """16 bytes for each block of the file."""


class FileRecord(Struct, frozen=True):
    """A rank file as the manifest lists it."""

    rank: int
    name: str
    size: int
    trailer: str
    """Digest of its trailer, in hexadecimal."""
    contents: str
    """Digest of the encoded contents, so that they can be read without whole blocks."""


def offset_in_file(span: ByteSpan, extents: Sequence[Extent]) -> int | None:
    """Return where a range of the body is in a file; None if the file lacks some of it."""
    for extent in extents:
        if extent.body_at <= span.at and span.end <= extent.body_at + extent.size:
            return span.at - extent.body_at + extent.file_at
    return None


def blocks_of(size: int) -> int:
    """Return the number of blocks in a body or file of that size."""
    return -(-size // BLOCK_BYTES)


def aligned(at: int, to: int = ALIGNMENT) -> int:
    return -(-at // to) * to


# ---- digests -------------------------------------------------------------------------------------

DIGEST_BYTES: Final = 16


def digest(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def block_digests(
    view: memoryview,
    threads: Executor | None = None,
    on_progress: Callable[[], object] = lambda: None,
) -> bytes:
    """Return the concatenated digests of all blocks of a view."""

    def one(index: int) -> bytes:
        on_progress()
        return digest(view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES])

    indices = range(blocks_of(len(view)))
    return b"".join(threads.map(one, indices) if threads is not None else map(one, indices))


def digest_of(digests: bytes, block: int) -> bytes:
    return digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
