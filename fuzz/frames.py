"""Fuzzes what stands between a stranger's bytes and the coordinator: frames and their decoder.

    make fuzz            a minute of it
    python fuzz/frames.py -max_total_time=600 CORPUS

Whatever comes in, the decoder gives messages or raises a WireError, and keeps no more than one frame.
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
            assert len(decoder) <= LIMIT_BYTES + 4 + len(chunk), "more is kept than one frame"
    except WireError:
        pass


def main() -> None:
    atheris.Setup(sys.argv, feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
