"""Where a node keeps images: its own ranks', and copies of other nodes'.

A *shelf* is what the transfer of replicas knows of a node's memory. An image that is whole is *held*
and can be sent; one that is on its way in has a *place*, which nobody else sees until every byte that
was wanted has been checked against its digest.
"""

from __future__ import annotations

from typing import Annotated, Protocol

from msgspec import Meta, Struct

from holdfast.checkpoint.state.layout import Span
from holdfast.messages.checkpoints import ImageId


class Outline(Struct, frozen=True):
    """All there is to know of an image before its bytes."""

    id: ImageId
    size: Annotated[int, Meta(ge=1, le=1 << 53)]
    """Bytes of the body."""
    digests: bytes
    """16 bytes for each block of the body."""
    contents: Span
    """Where in the body it says what is where."""


class Held(Struct):
    """An image that can be sent. Its descriptor stays open until it is released."""

    id: ImageId
    fd: int
    body_at: int
    """Where in the file the body begins."""
    size: int
    digests: bytes
    contents: Span

    @property
    def view(self) -> memoryview | None:
        """The body, where a shelf has it mapped."""
        return None

    @property
    def outline(self) -> Outline:
        return Outline(self.id, self.size, self.digests, self.contents)


class Place(Struct):
    """Room for an image that is on its way in. A shelf has a subclass that knows where it is."""

    id: ImageId
    size: int
    digests: bytes
    contents: Span

    @property
    def view(self) -> memoryview:
        """The body, mapped; its memory is there."""
        raise NotImplementedError


class Shelf(Protocol):
    """A node's images. Its methods are called from several threads at once."""

    def find(self, id: ImageId) -> Held | None:
        """The image, which the caller releases; None when it is not here."""

    def release(self, held: Held) -> None:
        """The caller has done with it."""

    def place(self, outline: Outline) -> Place:
        """Make room; StorageError or OSError when there is none. Memory that is used again is filled
        twice as fast."""

    def complete(self, place: Place) -> Held:
        """All of it is there and verified: from now on it can be found. The caller releases it. If
        this fails, the place is still to be dropped."""

    def drop(self, place: Place) -> None:
        """It will not become complete; nobody writes to it any more."""
