"""Defines what keepers say to each other when they replicate images, and the connections they use.

A connection carries one request:

    Push           keep a copy ──▶ Go, and when all blocks have arrived Kept
    PushedBlocks   blocks of an image that is being pushed, then raw bytes ──▶ Arrived
    Pull           send these blocks ──▶ Sending, then raw bytes; or Missing
    More           after that: send these, too ──▶ raw bytes

and any may be answered by Declined. The answer to a push or a pull may be preceded by Queued,
repeatedly, while other peers are served first.

A push is one request that decides, and any number of connections that only carry blocks; so its
answer is never stuck behind gigabytes. A restore reads an image block by block, and asks for more
until it has enough. The outline of an image travels with a digest of its own: a flipped bit in it
would file good bytes under a wrong step.

No wait on a connection is unbounded. A frame must be whole within a time, so a slow sender cannot
hold a thread; raw bytes must move at least every few seconds. A transfer that keeps moving may take
any time.

On plain TCP an image is sent from its mapping: `sendfile`, page by page, takes longer than copying.
With TLS the bytes have to be encrypted, so they are read into a buffer: a mapped file that is
truncated would kill the process there, while a system call only fails.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from holdfast import errors
from holdfast.checkpoint.memory.images import Held, Outline
from holdfast.checkpoint.state.layout import DIGEST_BYTES, blocks_of, digest
from holdfast.errors import BadFrame, HoldfastError, NotThere, StorageError, Unusable, WireError
from holdfast.kernel import keep_alive
from holdfast.messages.checkpoints import ImageId
from holdfast.wire import framing
from holdfast.wire.framing import FrameDecoder

PROTOCOL: Final = 4

Number = Annotated[int, Meta(ge=0, le=1 << 53)]
Stretch = tuple[Number, Number]
"""Block numbers, from the first up to but excluding the last."""
TransferId = Annotated[str, Meta(max_length=32)]


class PeerHello(Struct, frozen=True, kw_only=True, tag=True):
    """The first message on every connection."""

    protocol: int
    token: str


class Push(Struct, frozen=True, kw_only=True, tag=True):
    """Ask the peer to keep a copy of this image."""

    outline: bytes


class PushedBlocks(Struct, frozen=True, kw_only=True, tag=True):
    """Announce the blocks that follow on this connection."""

    transfer: TransferId
    blocks: tuple[Stretch, ...]


class Pull(Struct, frozen=True, kw_only=True, tag=True):
    """Ask for blocks of an image; with none, for its outline alone."""

    image: ImageId
    blocks: tuple[Stretch, ...]


class More(Struct, frozen=True, kw_only=True, tag=True):
    """Ask for further blocks of the same image."""

    blocks: tuple[Stretch, ...]


class Go(Struct, frozen=True, kw_only=True, tag=True):
    """Accept a push: memory is allocated."""

    transfer: TransferId


class Arrived(Struct, frozen=True, kw_only=True, tag=True):
    """Confirm that the blocks of this connection arrived and verified."""


class Kept(Struct, frozen=True, kw_only=True, tag=True):
    """Confirm that the whole image verified and can be pulled."""


class Sending(Struct, frozen=True, kw_only=True, tag=True):
    """Announce the blocks that were asked for."""

    outline: bytes


class Queued(Struct, frozen=True, kw_only=True, tag=True):
    """Say that other peers are served first; the answer will come."""


class Missing(Struct, frozen=True, kw_only=True, tag=True):
    """Say that the image is not here."""


class Declined(Struct, frozen=True, kw_only=True, tag=True):
    """Refuse a request, or give up."""

    why: Literal["changed", "no room", "broken off"]
    reason: str


Request = Push | PushedBlocks | Pull
Reply = Go | Arrived | Kept | Sending | Missing | Declined | Queued

# ---- images ----

_outlines = msgspec.msgpack.Decoder(Outline)


def sealed(outline: Outline) -> bytes:
    """Encode an outline with its digest."""
    data = msgspec.msgpack.encode(outline)
    return digest(data) + data


def unsealed(data: bytes) -> Outline:
    """Decode an outline, if its digest matches and its fields agree."""
    if digest(data[DIGEST_BYTES:]) != data[:DIGEST_BYTES]:
        raise BadFrame("the outline of an image was damaged in transit")
    try:
        outline = _outlines.decode(data[DIGEST_BYTES:])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"not an outline of an image: {error}") from None
    contents = outline.contents
    if len(outline.digests) != blocks_of(outline.size) * DIGEST_BYTES:
        raise BadFrame(f"{outline.size} bytes with {len(outline.digests)} bytes of digests")
    if min(contents.at, contents.size) < 0 or contents.end > outline.size:
        raise BadFrame(f"the contents are at {contents}, outside of {outline.size} bytes")
    return outline


# ---- blocks ----


def stretches(blocks: Sequence[int]) -> tuple[Stretch, ...]:
    """Encode ascending block numbers as ranges."""
    found: list[Stretch] = []
    for block in blocks:
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return tuple(found)


def blocks_in(found: Sequence[Stretch], size: int) -> list[int]:
    """Decode ranges of block numbers; they must ascend, and exist in an image of that size."""
    before = 0
    for first, last in found:
        if not before <= first < last <= blocks_of(size):
            raise BadFrame(f"blocks {first} to {last} are out of order or out of the image")
        before = last
    return [block for first, last in found for block in range(first, last)]


# ---- refusals ----

_ERRORS: Final[dict[str, type[HoldfastError]]] = {
    "changed": errors.Unusable,
    "no room": StorageError,
    "broken off": WireError,
}


def declined(error: HoldfastError | OSError) -> Declined:
    """Encode an error for the peer."""
    if isinstance(error, errors.Unusable):
        return Declined(why="changed", reason=str(error))
    if isinstance(error, StorageError | OSError):
        return Declined(why="no room", reason=str(error))
    return Declined(why="broken off", reason=str(error))


def error_in(reply: Reply, peer: str) -> HoldfastError:
    """Return the error that an unexpected answer stands for."""
    if isinstance(reply, Declined):
        return _ERRORS[reply.why](f"{peer}: {reply.reason}")
    if isinstance(reply, Missing):
        return NotThere(f"{peer} does not have that image")
    return BadFrame(f"{peer} answered {type(reply).__name__}, which was not expected")


# ---- connections ---------------------------------------------------------------------------------

STALL_S: Final = 5.0
"""Longest time without progress."""
CHUNK_BYTES: Final = 1 << 20
"""Bytes read, hashed and written at a time: large enough for few calls, small enough to stay in the
processor's cache."""

_HEADER_BYTES: Final = 4

R = TypeVar("R", Go, Arrived, Kept, Sending)
T = TypeVar("T")


class Connection:
    """A connection between keepers. One thread uses it; any thread may cut it."""

    def __init__(self, connected: socket.socket, peer: str, stall_s: float = STALL_S) -> None:
        self.peer = peer
        self.stall_s = stall_s
        self._socket = connected

    @classmethod
    def dial(cls, host: str, port: int, stall_s: float) -> Connection:
        """Connect to a peer."""
        name = f"{host}:{port}"
        try:
            return cls(socket.create_connection((host, port), stall_s), name, stall_s)
        except OSError as error:
            raise WireError(f"{name}: cannot be reached: {error}") from None

    def greet(self, tls: ssl.SSLContext | None, token: str) -> None:
        """Send the first message, as the side that connected."""
        self.begin(tls, server_side=False, limit_s=self.stall_s)
        self.send(PeerHello(protocol=PROTOCOL, token=token))

    def begin(self, tls: ssl.SSLContext | None, server_side: bool, limit_s: float) -> None:
        """Turn on TCP keepalive, and TLS if configured."""
        with self._moving(limit_s):
            keep_alive(self._socket)
            if tls is not None:
                secured = tls.wrap_socket(
                    self._socket, server_side=server_side, do_handshake_on_connect=False
                )
                self._socket = secured
                secured.settimeout(limit_s)
                secured.do_handshake()

    def cut(self) -> None:
        """Make pending and later calls on the connection fail.

        `SSLSocket.shutdown` is avoided: it would let the user go on in plain text.
        """
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    # ---- frames ----

    def send(self, message: Struct) -> None:
        with self._moving(self.stall_s):
            self._socket.settimeout(self.stall_s)
            self._socket.sendall(framing.encode(message))

    def receive(self, decoder: FrameDecoder[T], limit_s: float) -> T:
        """Receive one message, which must be whole within that time."""
        deadline = monotonic() + limit_s
        header = bytearray(_HEADER_BYTES)
        with self._moving(limit_s):
            self._fill(memoryview(header), deadline)
        # This checks the length, before anything is allocated for the rest.
        messages = decoder.feed(bytes(header))
        if not messages:
            body = bytearray(int.from_bytes(header, "big"))
            with self._moving(limit_s):
                self._fill(memoryview(body), deadline)
            messages = decoder.feed(bytes(body))
        return messages[0]

    def expect(self, kind: type[R], limit_s: float | None = None) -> R:
        """Receive an answer of that kind; raise the error that another one stands for. The time limit
        starts anew with each `Queued`."""
        replies = FrameDecoder[Reply](Reply)  # type: ignore[arg-type]
        limit_s = self.stall_s if limit_s is None else limit_s
        reply = self.receive(replies, limit_s)
        while isinstance(reply, Queued):
            reply = self.receive(replies, limit_s)
        if isinstance(reply, kind):
            return reply
        raise error_in(reply, self.peer)

    # ---- raw bytes ----

    def fill(self, view: memoryview) -> None:
        """Receive bytes until the view is full."""
        with self._moving(self.stall_s):
            self._socket.settimeout(self.stall_s)
            self._fill(view, None)

    def _fill(self, view: memoryview, deadline: float | None) -> None:
        got = 0
        while got < len(view):
            if deadline is not None:
                self._socket.settimeout(max(0.001, deadline - monotonic()))
            count = self._socket.recv_into(view[got:])
            if not count:
                raise ConnectionError("the peer closed it")
            got += count

    def send_part(self, held: Held, at: int, end: int) -> None:
        """Send a range of an image's body."""
        with self._moving(self.stall_s):
            self._socket.settimeout(self.stall_s)
            mapped = None if isinstance(self._socket, ssl.SSLSocket) else held.view
            if mapped is None:
                self._send_copies(held.fd, held.body_at + at, held.body_at + end)
            else:
                self._send_mapped(mapped, at, end)

    def _send_mapped(self, body: memoryview, at: int, end: int) -> None:
        with body:
            while at < end:
                with body[at:end] as rest:
                    at += self._socket.send(rest)

    def _send_copies(self, fd: int, at: int, end: int) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while at < end:
            count = _some(os.preadv(fd, [buffer[: end - at]], at))
            self._socket.sendall(buffer[:count])
            at += count

    @contextmanager
    def _moving(self, limit_s: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise WireError(
                f"{self.peer}: no progress for {limit_s:.3g} s: it is stopped, overloaded or cut off"
            ) from None
        except OSError as error:
            raise WireError(f"{self.peer}: the connection broke: {error}") from None


def _some(count: int) -> int:
    if not count:
        raise Unusable("an image became shorter while it was sent")
    return count
