"""`python -m holdfast.checkpoint.keeper FD`: be a keeper, for whoever has the socket's other end."""

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
from holdfast.messages.keeper import Begin
from holdfast.messages.local import PACKET_BYTES

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_BEST_EFFORT_LAST = (2 << 13) | 7


def run_keeper(control: socket.socket) -> None:
    """Be a keeper until the other end of the socket is closed."""
    kernel.name_process("holdfast-keeper")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _yield_to_training()
    kernel.open_many_files()  # A whole world may ask one node for its images.
    begin = msgspec.msgpack.decode(control.recv(PACKET_BYTES), type=Begin)
    keeper = Keeper(begin, control)
    keeper.run()
    keeper.end()


def _yield_to_training() -> None:
    """Take what time and disk the ranks leave."""
    os.nice(10)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT_LAST)


def main() -> None:
    logging.basicConfig(format="[holdfast keeper] %(message)s", level=logging.WARNING)
    run_keeper(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
