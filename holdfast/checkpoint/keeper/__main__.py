"""Runs a keeper, `python -m holdfast.checkpoint.keeper FD`, for the process at the other end of FD."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import signal
import socket
import sys

import msgspec

from holdfast import kernel
from holdfast.checkpoint.keeper.orders import Keeper
from holdfast.messages.keeper import KeeperTerms
from holdfast.messages.local import PACKET_BYTES

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_BEST_EFFORT_LAST = (2 << 13) | 7


def run_keeper(control: socket.socket) -> None:
    """Serve until the other end of the socket is closed."""
    kernel.name_process("holdfast-keeper")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _yield_to_training()
    kernel.open_many_files()  # A whole world may ask one node for its images.
    terms = msgspec.msgpack.decode(control.recv(PACKET_BYTES), type=KeeperTerms)
    keeper = Keeper(terms, control)
    keeper.run()
    keeper.end()


def _yield_to_training() -> None:
    """Lower the priority for CPU and disk below that of the ranks."""
    os.nice(10)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT_LAST)


def main() -> None:
    logging.basicConfig(format="[holdfast keeper] %(message)s", level=logging.WARNING)
    run_keeper(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
