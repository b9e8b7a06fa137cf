"""Faults that a training script has when it is told to.

SIGUSR1 makes a process read the file `PID` in the folder of orders: it names a fault, and the place in
a step where it strikes. When it does, the process leaves the time in `PID.struck`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist


class Orders:
    """The fault that this process was told to have, until it has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told = ""
        signal.signal(signal.SIGUSR1, self._read)

    def _read(self, _number: int, _frame: FrameType | None) -> None:
        path = self._folder / str(os.getpid())
        self._told = path.read_text()
        path.unlink()

    def strike(self, place: str) -> None:
        """Have the fault, if it is meant for this place of a step."""
        kind, _, where = self._told.partition("@")
        if kind and where == place:
            self._told = ""
            partial = self._folder / f"{os.getpid()}.striking"
            partial.write_text(str(time.monotonic()))
            partial.rename(partial.with_suffix(".struck"))
            FAULTS[kind]()


class PlannedError(RuntimeError):
    """An exception that was ordered."""


def _raise() -> None:
    # Each has a name of its own: the same exception again and again costs the process.
    raise type(f"{PlannedError.__name__}{time.monotonic_ns()}", (PlannedError,), {})("as ordered")


def _loop() -> None:
    while True:
        pass


def _keep_the_gil() -> None:
    ctypes.PyDLL(None).sleep(100_000)


def _other_collective() -> None:
    dist.broadcast(torch.zeros(1), src=dist.get_rank())


FAULTS = {
    "raise": _raise,
    "sleep": lambda: time.sleep(1e6),
    "lock": lambda: threading.Lock().acquire() and threading.Event().wait(),
    "loop": _loop,
    "gil": _keep_the_gil,
    "mismatch": _other_collective,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
