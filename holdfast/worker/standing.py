"""Waits for a rank, as a standby.

Meanwhile the agent may tell a standby to take the GPU of the rank that it is meant for. It holds that
GPU until it gets the rank, or until free memory there runs low: then it exits, which frees its share,
and the agent keeps a standby without a GPU in its place. A standby whose GPU fails exits as well: an
error of CUDA sticks to the process.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Final

import msgspec

from holdfast.messages.local import (
    ASSIGN_FDS,
    GAVE_DEVICE_UP,
    Assign,
    Standing,
    TakeDevice,
    Test,
    ToWorker,
)
from holdfast.worker.channel import Channel

log = logging.getLogger("holdfast.worker")

LOOK_EVERY_S: Final = 2.0
"""How often a standby looks at the free memory of the GPU that it holds."""

_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


def await_order(channel: Channel) -> tuple[Assign | Test, list[int]]:
    """Wait until the agent has a use for this process; return the order and its descriptors."""
    held: TakeDevice | None = None
    while True:
        while held is not None and not channel.has_packet(LOOK_EVERY_S):
            _leave_if_needed(held)
        packet, fds = channel.receive(max_fds=ASSIGN_FDS)
        if not packet:
            os._exit(0)
        order = _decoder.decode(packet)
        if not isinstance(order, TakeDevice):
            return order, fds
        channel.send(Standing(device_bytes=_take(order)))
        held = order


def _take(order: TakeDevice) -> int:
    from holdfast.worker import device_rehearsal

    try:
        return device_rehearsal.take(sys.modules["torch"], order)
    except Exception as error:  # Of CUDA, in any way that it can fail: the ranks must not suffer.
        log.warning("GPU %d is not taken: %s", order.index, error)
        os._exit(GAVE_DEVICE_UP)


def _leave_if_needed(order: TakeDevice) -> None:
    from holdfast.worker.device_rehearsal import free_bytes

    torch: Any = sys.modules["torch"]
    try:
        free = free_bytes(torch, order.index)
    except Exception:  # As above.
        log.warning("GPU %d fails; leaving it", order.index, exc_info=True)
        os._exit(GAVE_DEVICE_UP)
    if free < order.leave_bytes:
        log.warning("GPU %d has %d MiB free; leaving it to the ranks", order.index, free >> 20)
        os._exit(GAVE_DEVICE_UP)
