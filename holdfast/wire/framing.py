"""Frames: four bytes of length, big-endian, then that many bytes of msgpack.

The length is checked before anything is allocated for the body. This is all there is between a
stranger's bytes and the decoder, so it stays small and is fuzzed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from holdfast.errors import BadFrame, FrameTooLarge

MAX_FRAME_BYTES = 1 << 20
_HEADER_BYTES = 4

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One frame, ready to be written."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a {type(message).__name__} of {len(body)} bytes is too large to send")
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


class FrameDecoder(Generic[T]):
    """Bytes in, messages out; keeps at most one unfinished frame."""

    def __init__(
        self,
        kind: type[T],
        max_bytes: int = MAX_FRAME_BYTES,
        unreadable: Callable[[bytes, BadFrame], T] | None = None,
    ) -> None:
        """`unreadable` makes what stands for a frame that is not a message, in its place among them;
        without it, such a frame raises."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._unreadable = unreadable
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def __len__(self) -> int:
        """Bytes of an unfinished frame that are being kept."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[T]:
        """All messages that are whole with these bytes."""
        self._buffer += data
        messages: list[T] = []
        position = 0
        while len(self._buffer) - position >= _HEADER_BYTES:
            body = position + _HEADER_BYTES
            length = int.from_bytes(self._buffer[position:body], "big")
            if length > self.max_bytes:
                raise FrameTooLarge(
                    f"a frame of {length} bytes; at most {self.max_bytes} are taken"
                )
            if len(self._buffer) < body + length:
                break
            messages.append(self._decode(bytes(self._buffer[body : body + length])))
            position = body + length
        del self._buffer[:position]
        return messages

    def _decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            bad = BadFrame(f"a frame that is not a message: {error}")
            if self._unreadable is None:
                raise bad from None
            return self._unreadable(body, bad)
