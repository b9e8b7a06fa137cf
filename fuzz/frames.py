"""Fuzzes the frame decoder, which is all that stands between untrusted bytes and the coordinator.

    make fuzz                                            one minute
    python fuzz/frames.py -max_total_time=600 CORPUS     ten minutes, with a corpus

Whatever the input, the decoder returns messages or raises a WireError, and buffers at most one frame.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports():
    from holdfast.errors import WireError
    from holdfast.messages.wire import FromAgent, FromCoordinator
    from holdfast.wire import framing

LIMIT_BYTES = 1 << 14


def feed(data: bytes) -> None:
    pieces = atheris.FuzzedDataProvider(data)
    kind = FromAgent if pieces.ConsumeBool() else FromCoordinator
    decoder = framing.FrameDecoder[object](kind, LIMIT_BYTES)  # type: ignore[arg-type]
    try:
        while pieces.remaining_bytes():
            chunk = pieces.ConsumeBytes(pieces.ConsumeIntInRange(1, 64))
            for message in decoder.feed(chunk):
                framing.encode(message)  # type: ignore[arg-type]
            assert len(decoder) <= LIMIT_BYTES + 4 + len(chunk), "more than one frame is buffered"
    except WireError:
        pass


def main() -> None:
    atheris.Setup(sys.argv, feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
