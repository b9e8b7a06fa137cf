"""Messages over a packet socket, of any size.

A packet cannot be larger than the socket's buffer, and how large that may be is for the machine's
administrator to say (net.core.wmem_max, 208 KiB unless changed). So a message that does not fit into
`PACKET_BYTES` goes in pieces, each a packet of its own. Small messages may come in between; two large
ones may not, and a large one that was never finished ends where the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
from msgspec import Struct

from holdfast.messages.local import PACKET_BYTES, Piece
from holdfast.messages.requests import MAX_MESSAGE_BYTES

PIECE_BYTES = PACKET_BYTES - 64

_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


def packets_of(message: Struct) -> Iterator[bytes]:
    """The packets to send, in this order."""
    body = _encoder.encode(message)
    if len(body) <= PACKET_BYTES:
        yield body
        return
    count = -(-len(body) // PIECE_BYTES)
    for index in range(count):
        data = body[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
        yield _encoder.encode(Piece(index=index, of=count, data=data))


class Joiner:
    """Puts pieces together again; keeps at most one unfinished message."""

    def __init__(self, most_bytes: int | None = MAX_MESSAGE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def message(self, packet: bytes, decode: Callable[[bytes], T]) -> T | None:
        """The message that a packet is, or that it completes; None: there is none yet."""
        found = decode(packet)
        if not isinstance(found, Piece):
            return found
        whole = self.add(found)
        return None if whole is None else decode(whole)

    def add(self, piece: Piece) -> bytes | None:
        """The whole message, with its last piece. Pieces that do not go on from the last are lost."""
        if piece.index == 0:
            self._forget()
        if piece.index != len(self._pieces):
            return None
        self._pieces.append(piece.data)
        self._size_bytes += len(piece.data)
        if self._most_bytes is not None and self._size_bytes > self._most_bytes:
            self._forget()
        elif len(self._pieces) == piece.of:
            whole = b"".join(self._pieces)
            self._forget()
            return whole
        return None

    def _forget(self) -> None:
        self._pieces, self._size_bytes = [], 0
