"""What keepers say to each other when they copy images.

A connection carries one request:

    Push      keep a copy ──▶ Go, and when all parts are there Kept
    Part      blocks of what is being pushed, then raw bytes ──▶ Arrived
    Pull      give me these blocks ──▶ Sending, then raw bytes; or Missing
    More      after that: and these ──▶ raw bytes

and any may be answered by Declined. Before the answer to a push or a pull may come Queued, now and
then, for as long as others are served first.

A push is one request that decides and any number of parts that only carry, so the answer to it is never
stuck behind gigabytes. Whoever restores from an image reads it block by block, and asks for more until
it has enough.

The outline of an image travels under a digest of its own: a flipped bit in it would file good bytes
under a wrong step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from holdfast import errors
from holdfast.checkpoint.memory.image_store import Outline
from holdfast.checkpoint.state.layout import blocks_of
from holdfast.checkpoint.storage.digests import DIGEST_BYTES, digest
from holdfast.errors import BadFrame, HoldfastError, NotThere, StorageError, WireError
from holdfast.messages.checkpoints import ImageId

PROTOCOL: Final = 2

Number = Annotated[int, Meta(ge=0, le=1 << 53)]
Stretch = tuple[Number, Number]
"""Blocks, from the first up to and without the last."""
TransferId = Annotated[str, Meta(max_length=32)]


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    """The first word on every connection."""

    protocol: int
    token: str


class Push(Struct, frozen=True, kw_only=True, tag=True):
    """Keep a copy of this image."""

    outline: bytes


class Part(Struct, frozen=True, kw_only=True, tag=True):
    """On this connection come these blocks of an image that is being pushed."""

    transfer: TransferId
    blocks: tuple[Stretch, ...]


class Pull(Struct, frozen=True, kw_only=True, tag=True):
    """Send these blocks of an image; with none, its outline alone."""

    image: ImageId
    blocks: tuple[Stretch, ...]


class More(Struct, frozen=True, kw_only=True, tag=True):
    """Send these blocks of the same image."""

    blocks: tuple[Stretch, ...]


class Go(Struct, frozen=True, kw_only=True, tag=True):
    """There is room: send the parts of this transfer."""

    transfer: TransferId


class Arrived(Struct, frozen=True, kw_only=True, tag=True):
    """The blocks of this connection are here, and verified."""


class Kept(Struct, frozen=True, kw_only=True, tag=True):
    """The whole image is here, verified, and can be pulled."""


class Sending(Struct, frozen=True, kw_only=True, tag=True):
    """After this come the blocks."""

    outline: bytes


class Queued(Struct, frozen=True, kw_only=True, tag=True):
    """Others are served first; the answer will come."""


class Missing(Struct, frozen=True, kw_only=True, tag=True):
    """That image is not here."""


class Declined(Struct, frozen=True, kw_only=True, tag=True):
    why: Literal["changed", "no room", "broken off"]
    reason: str


Request = Push | Part | Pull
Reply = Go | Arrived | Kept | Sending | Missing | Declined | Queued

# ---- images ----

_outlines = msgspec.msgpack.Decoder(Outline)


def sealed(outline: Outline) -> bytes:
    """An outline as it travels."""
    data = msgspec.msgpack.encode(outline)
    return digest(data) + data


def unsealed(data: bytes) -> Outline:
    """The outline, if it is as it was sent and agrees with itself."""
    if digest(data[DIGEST_BYTES:]) != data[:DIGEST_BYTES]:
        raise BadFrame("the outline of an image was damaged on its way")
    try:
        outline = _outlines.decode(data[DIGEST_BYTES:])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"no outline of an image: {error}") from None
    contents = outline.contents
    if len(outline.digests) != blocks_of(outline.size) * DIGEST_BYTES:
        raise BadFrame(f"{outline.size} bytes with {len(outline.digests)} bytes of digests")
    if min(contents.at, contents.size) < 0 or contents.end > outline.size:
        raise BadFrame(f"the contents are at {contents}, outside of {outline.size} bytes")
    return outline


# ---- blocks ----


def stretches(blocks: Sequence[int]) -> tuple[Stretch, ...]:
    """Ascending block numbers, those in a row together."""
    found: list[Stretch] = []
    for block in blocks:
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return tuple(found)


def blocks_in(found: Sequence[Stretch], size: int) -> list[int]:
    """The block numbers, if they ascend and an image of that size has them."""
    before = 0
    for first, last in found:
        if not before <= first < last <= blocks_of(size):
            raise BadFrame(f"blocks {first} to {last} are out of order or out of the image")
        before = last
    return [block for first, last in found for block in range(first, last)]


# ---- refusals ----

_ERRORS: Final[dict[str, type[HoldfastError]]] = {
    "changed": errors.Refused,
    "no room": StorageError,
    "broken off": WireError,
}


def declined(error: HoldfastError | OSError) -> Declined:
    """An error as it is told to the peer."""
    if isinstance(error, errors.Refused):
        return Declined(why="changed", reason=str(error))
    if isinstance(error, StorageError | OSError):
        return Declined(why="no room", reason=str(error))
    return Declined(why="broken off", reason=str(error))


def error_in(reply: Reply, peer: str) -> HoldfastError:
    """The error that an answer stands for which was not the one hoped for."""
    if isinstance(reply, Declined):
        return _ERRORS[reply.why](f"{peer}: {reply.reason}")
    if isinstance(reply, Missing):
        return NotThere(f"{peer} does not have that image")
    return BadFrame(f"{peer} answered {type(reply).__name__}, which was not asked for")
