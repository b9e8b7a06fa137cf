"""Carries out injected faults in a worker.

The thread that finishes a step checks whether a trap lies between the last step and this one, reports
that it springs, and does to itself what the trap says: the step is exact, and the fault is real, in
the thread that trains. Faults that strike the node spring here as well, and the agent does the rest.

This module is imported when the first trap is set.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Final, NoReturn

import msgspec

from holdfast import cgroups
from holdfast.errors import InjectedFault
from holdfast.messages.chaos import FAULTS, Sprung, Trap
from holdfast.messages.units import StepNumber

_decoder = msgspec.msgpack.Decoder(Trap)


class Traps:
    """The traps that are set for this process."""

    def __init__(
        self,
        log: Callable[[bytes], object],
        wake_agent: Callable[[], object],
        step_times: Callable[[], tuple[float, ...]] = tuple,
    ) -> None:
        self._log = log
        self._wake_agent = wake_agent
        self.drag = Drag(step_times)
        self._set: list[Trap] = []
        self._pid = os.getpid()

    def add(self, entries: Iterable[bytes]) -> None:
        """Set further traps; any thread may call this."""
        self._set.extend([_decoder.decode(entry) for entry in entries])

    def clear(self) -> None:
        """Forget the traps of the place that this process had before."""
        self._set.clear()

    def passed(self, before: int, step: int) -> None:
        """Spring the traps between two steps, in the calling thread, which has finished the second."""
        if os.getpid() != self._pid:
            return  # The script has forked this process.
        self.drag.at_end_of_step()
        due = [trap for trap in self._set if before < trap.step <= step or not trap.step]
        for trap in sorted(due, key=lambda trap: trap.step):
            self._set.remove(trap)
            self._log(msgspec.msgpack.encode(Sprung(*trap.key, StepNumber(step), time.monotonic())))
            self._wake_agent()
            self._strike(trap, step)

    def _strike(self, trap: Trap, step: int) -> None:
        fault = FAULTS[trap.kind]
        if fault.signal:
            os.kill(os.getpid(), fault.signal)
        elif trap.kind == "slow":
            self.drag.set(trap.value)
        elif trap.kind == "exception":
            raise InjectedFault(f"requested with `holdfast chaos`, at step {step}")
        elif fault.actor == "worker":
            _ACTS[trap.kind](trap.value)


class Drag:
    """Makes each step longer, in proportion to the usual time of a step.

    It sleeps in the forward pass, where a rank's own slowness shows; in scripts without one, at the
    end of the step.
    """

    def __init__(self, step_times: Callable[[], tuple[float, ...]]) -> None:
        self._step_times = step_times
        self._factor = 1.0
        self._step_s: float | None = None
        """Usual time of a step. Measured once: of several slow ranks, each would otherwise see the
        slowness of the others in its own steps, and slow down for that too."""
        self._since = 0.0
        self._dragged = False

    def set(self, factor: float) -> None:
        times = self._step_times()
        if factor == 1.0:
            self._step_s = None
        elif self._step_s is None and times:
            self._step_s = statistics.median(times)
        self._factor, self._since = factor, time.monotonic()

    def in_forward(self) -> None:
        if self._factor != 1.0 and self._step_s is not None and not self._dragged:
            self._dragged = True
            time.sleep((self._factor - 1.0) * self._step_s)

    def at_end_of_step(self) -> None:
        if self._factor != 1.0:
            self._step_s = self._step_s or time.monotonic() - self._since
            self.in_forward()
            self._dragged = False


def _hang(value: float) -> NoReturn:
    while True:
        time.sleep(3600)


def _loop(value: float) -> NoReturn:
    while True:
        pass


def _hold_gil(value: float) -> NoReturn:
    """Wait for a mutex that is never unlocked, without releasing the GIL."""
    mutex = ctypes.create_string_buffer(128)  # All zeros is an unlocked mutex.
    libc = ctypes.PyDLL(None)  # Unlike CDLL, this keeps the GIL during a call.
    while True:
        libc.pthread_mutex_lock(mutex)


def _exhaust_memory(value: float) -> NoReturn:
    """Allocate memory until the kernel kills this process, in a cgroup of its own if possible."""
    cgroups.enter(int(value) << 20)
    Path("/proc/self/oom_score_adj").write_text("1000")
    taken = []
    while True:
        taken.append(b"\1" * (4 << 20))


def _break_gpu(value: float) -> None:
    """Have a kernel write to an illegal address; every later CUDA call of this process fails too."""
    import torch

    valid = torch.zeros(1, device="cuda")
    wild = {"version": 3, "typestr": "|u1", "shape": (2,), "strides": (1 << 44,)}
    array = SimpleNamespace(__cuda_array_interface__={**wild, "data": (valid.data_ptr(), False)})
    torch.as_tensor(array, device="cuda").fill_(1)
    torch.cuda.synchronize()


_ACTS: Final[dict[str, Callable[[float], object]]] = {
    "hang": _hang,
    "gil": _hold_gil,
    "loop": _loop,
    "segfault": lambda value: ctypes.string_at(0),
    "abort": lambda value: os.abort(),
    "oom": _exhaust_memory,
    "exit": lambda value: sys.exit(int(value)),
    "gpu-error": _break_gpu,
}
