"""Where a node keeps images: its own ranks', and copies of other nodes'.

A *shelf* is what the transfer of replicas knows of a node's memory. An image that is whole is *held*
and can be sent; one that is on its way in has a *place*, which nobody else sees until every byte that
was wanted has been checked against its digest.

An image may be held in part: a restore that needs little of it fetches little. What was not fetched
reads as zeros, or as whatever the memory was used for before, so a part is never told from the bytes
that are there. It is the record of fetched blocks that counts, and it goes wherever the image goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Protocol

from msgspec import Meta, Struct

from holdfast.checkpoint.layout import BLOCK_BYTES, Span, blocks_of
from holdfast.messages.checkpoints import CheckpointerId

Number = Annotated[int, Meta(ge=0, le=1 << 53)]


class ImageKey(Struct, frozen=True, order=True):
    """Which image: the same step saved again in a later round is another one."""

    checkpointer: CheckpointerId
    step: Number
    round: Number
    rank: Number
    world_size: Number


class Outline(Struct, frozen=True):
    """All there is to know of an image before its bytes."""

    key: ImageKey
    size: Annotated[int, Meta(ge=1, le=1 << 53)]
    """Bytes of the body."""
    digests: bytes
    """16 bytes for each block of the body."""
    contents: Span
    """Where in the body it says what is where."""


class Held(Struct):
    """An image that can be sent. Its descriptor stays open until it is released."""

    key: ImageKey
    fd: int
    body_at: int
    """Where in the file the body begins."""
    size: int
    digests: bytes
    contents: Span
    blocks: frozenset[int] | None = None
    """Those that are there; None: all of them."""

    def has(self, blocks: Iterable[int]) -> bool:
        return self.blocks is None or self.blocks.issuperset(blocks)

    @property
    def outline(self) -> Outline:
        return Outline(self.key, self.size, self.digests, self.contents)


class Place(Struct):
    """Room for an image that is on its way in. A shelf may have a subclass that knows more."""

    key: ImageKey
    fd: int
    body_at: int
    size: int
    digests: bytes
    contents: Span
    blocks: frozenset[int] | None = None
    """Those that will be there when it is complete; None: all of them."""

    @property
    def wanted(self) -> frozenset[int]:
        return frozenset(range(blocks_of(self.size))) if self.blocks is None else self.blocks

    @property
    def view(self) -> memoryview | None:
        """The body, where a shelf has it mapped and memory for all that is wanted is there."""
        return None


class Shelf(Protocol):
    """A node's images. Its methods are called from several threads at once."""

    def find(self, key: ImageKey) -> Held | None:
        """The image, which the caller releases; None when it is not here."""

    def release(self, held: Held) -> None:
        """The caller has done with it."""

    def place(
        self,
        key: ImageKey,
        size: int,
        digests: bytes,
        contents: Span,
        blocks: frozenset[int] | None = None,
    ) -> Place:
        """Make room, for those blocks only where they are named; StorageError or OSError when there
        is none. A file that is used again, and is mapped already, is filled twice as fast."""

    def complete(self, place: Place) -> Held:
        """All that was wanted is there and verified: from now on it can be found. The caller
        releases it. If this fails, the place is still to be dropped."""

    def drop(self, place: Place) -> None:
        """It will not become complete; nobody writes to it any more."""

    def keys(self) -> Iterable[ImageKey]:
        """The images that are here as a whole."""


def blocks_covering(spans: Iterable[Span]) -> frozenset[int]:
    """The blocks that have any byte of these stretches of a body."""
    return frozenset(
        block
        for span in spans
        if span.size
        for block in range(span.at // BLOCK_BYTES, blocks_of(span.end))
    )
