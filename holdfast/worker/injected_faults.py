"""What befalls a rank because somebody asked for it.

The thread that notes a finished step looks whether a trap lies between the last step and this one,
says that it is sprung, and does to itself what it says: so the step is exact, and what happens is the
real thing, in the thread that trains. A trap that befalls the node is sprung too, and its agent does
the rest.

This is imported when the first trap is laid, and by nobody else.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from holdfast import cgroups as memorybox
from holdfast.errors import InjectedFault
from holdfast.messages.chaos import FAULT_NAMES, FaultName
from holdfast.shm.traps import Laid, TrapArea

_CHUNK_BYTES: Final = 4 << 20
_MIB: Final = 1 << 20


class Traps:
    """Those that are laid for this process."""

    def __init__(
        self,
        area: TrapArea,
        tell: Callable[[], object],
        step_times: Callable[[], tuple[float, ...]] = tuple,
    ) -> None:
        self._area = area
        self._tell = tell
        """Says to the agent that something was sprung."""
        self.drag = Drag(step_times)
        self._laid: list[Laid] = []
        self._pid = os.getpid()

    def look(self) -> None:
        """See what was laid; any thread may do that."""
        self._laid = self._area.laid()

    def passed(self, before: int, step: int) -> None:
        """The calling thread finished that step."""
        if os.getpid() != self._pid:
            return  # Some process that the script forked.
        self.drag.at_end_of_step()
        for trap in self._laid:
            if (before < trap.step <= step) or not trap.step:
                self._spring(trap, step)

    def _spring(self, trap: Laid, step: int) -> None:
        if not self._area.spring(trap, time.monotonic(), step):
            return
        self._tell()
        name = FAULT_NAMES[trap.kind]
        if name == "slow":
            self.drag.set(trap.value)
        elif name in _ACTS:
            _ACTS[name](trap.value, f"step {step}")


class Drag:
    """Makes each step take longer, by what a step took before.

    It does so in the forward pass, where a rank's own slowness shows; in scripts without one, at the
    end of the step.
    """

    def __init__(self, step_times: Callable[[], tuple[float, ...]]) -> None:
        self._step_times = step_times
        self._factor = 1.0
        self._step_s: float | None = None
        """How long a step takes without it. Measured once: with more than one slow rank, each
        would see the others' slowness in its own steps, and slow down for that too."""
        self._since = 0.0
        self._dragged = False

    def set(self, factor: float) -> None:
        if self._step_s is None:
            times = self._step_times()
            self._step_s = statistics.median(times) if times else None
        self._factor = factor
        self._since = time.monotonic()
        if factor == 1.0:
            self._step_s = None

    def in_forward(self) -> None:
        if self._factor != 1.0 and self._step_s is not None and not self._dragged:
            self._dragged = True
            time.sleep((self._factor - 1.0) * self._step_s)

    def at_end_of_step(self) -> None:
        if self._factor == 1.0:
            return
        if self._step_s is None:
            self._step_s = time.monotonic() - self._since
        self.in_forward()
        self._dragged = False


def _kill(value: float, where: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _term(value: float, where: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(value: float, where: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(value: float, where: str) -> NoReturn:
    while True:
        time.sleep(3600)


def _loop(value: float, where: str) -> NoReturn:
    while True:
        pass


def _hold_gil(value: float, where: str) -> None:
    """Wait for a lock that nobody will give back, without letting go of the interpreter's."""
    lock = ctypes.create_string_buffer(128)  # All zeros is a lock that is free.
    libc = ctypes.PyDLL(None)  # Unlike CDLL, this holds the interpreter's lock while it calls.
    while True:
        libc.pthread_mutex_lock(lock)


def _segfault(value: float, where: str) -> None:
    ctypes.string_at(0)


def _abort(value: float, where: str) -> None:
    os.abort()


def _raise(value: float, where: str) -> NoReturn:
    raise InjectedFault(f"asked for with `holdfast chaos`, at {where}")


def _exit(value: float, where: str) -> NoReturn:
    sys.exit(int(value))


def _take_memory(value: float, where: str) -> None:
    """Take memory until the kernel ends it: this process, alone in a box if there can be one."""
    memorybox.enter(int(value * _MIB))
    Path("/proc/self/oom_score_adj").write_text("1000")
    taken = []
    while True:
        taken.append(b"\1" * _CHUNK_BYTES)


def _break_gpu(value: float, where: str) -> None:
    from holdfast.worker.gpu_fault import break_gpu

    break_gpu()


_ACTS: dict[FaultName, Callable[[float, str], None]] = {
    "kill": _kill,
    "term": _term,
    "stop": _stop,
    "hang": _hang,
    "gil": _hold_gil,
    "loop": _loop,
    "segfault": _segfault,
    "abort": _abort,
    "oom": _take_memory,
    "exception": _raise,
    "exit": _exit,
    "gpu-error": _break_gpu,
}
