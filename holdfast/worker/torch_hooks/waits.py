"""Measures how long a rank waits for other ranks, where that is visible.

A wait for a collective in Python is a call of `Work.wait`: torch's own functions, FSDP and scripts all
use it; DTensors call `wait_tensor`. Both are wrapped, so that waiting can be told from a rank's own
work, and a thread that is in here is one that waits (see `heartbeat`). DDP waits in C++: for its
gradients, within the backward pass, which is not visible; and for rank 0's buffers, from its call to
that of the module inside it, which is.

What a script does between the phases (logging, metrics, its own augmentation) is one duration for each
step that is followed from its start, however many pieces it is in. With a GPU it is not timed: there a
script also waits for the GPU, which may be waiting for other ranks.

With a GPU those calls return at once and the stream waits instead, as after `Stream.wait_event`, by
which FSDP waits for its communication stream. `DeviceTimes` then records events around such a wait.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from holdfast.shm.vital_signs import BETWEEN, OWN_WORK, Vitals
from holdfast.worker.torch_hooks.device_times import DeviceTimes
from holdfast.worker.torch_hooks.imports import when_imported

_NO_BACKWARD: Final = -1
"""Graph task id of a thread that is in no backward pass. With a GPU, torch has threads for these."""

Call = Callable[..., Any]


class OwnTimes:
    """Books the own work of phases: their times on the CPU or the GPU, without visible waits."""

    def __init__(self, vitals: Vitals, trains: Callable[[], bool]) -> None:
        self.waited_s = 0.0
        """Time that the training thread has waited so far."""
        self.device: DeviceTimes | None = None
        """Times on the GPU, if there is one."""
        self._vitals = vitals
        self._trains = trains
        """Returns whether the calling thread is the training thread."""
        self._within = False
        self._phase = -1
        self._began_at = self._waited_before_s = 0.0
        self._waits_since: float | None = None
        """When a wait began that ends with the next mark."""
        self._between_s: float | None = None
        """Own work between the phases of this step; None if its start was not followed."""

    def mark(self, phase: int, now: float) -> None:
        """Book the phase that ends, and begin another."""
        if self.device is not None:
            self.device.mark(phase)
            return
        if self._waits_since is not None:
            self.waited_s += now - self._waits_since
            self._waits_since = None
        if self._phase in OWN_WORK:
            own_s = max(0.0, now - self._began_at - (self.waited_s - self._waited_before_s))
            if self._phase != BETWEEN:
                self._vitals.took_itself(self._phase, own_s)
            elif self._between_s is not None:
                self._between_s += own_s
        self._phase, self._began_at, self._waited_before_s = phase, now, self.waited_s

    def waits_until_marked(self, now: float) -> None:
        """Count the time from now to the next mark as a wait."""
        self._waits_since = now

    def step_ended(self) -> None:
        """Book what a followed step did between its phases."""
        if self._between_s is not None and self.device is None:
            self._vitals.took_itself(BETWEEN, self._between_s)
        self._between_s = None

    def step_begins(self, now: float) -> None:
        """Follow a step from its start, after steps that were not followed or one that was."""
        self._phase, self._began_at, self._waited_before_s = BETWEEN, now, self.waited_s
        self._waits_since, self._between_s = None, 0.0

    def install(self) -> None:
        when_imported("torch.distributed.distributed_c10d", self._on_collectives)
        when_imported("torch.distributed._functional_collectives", self._on_functional)
        when_imported("torch.cuda.streams", self._on_streams)

    def _on_collectives(self, module: ModuleType) -> None:
        module.Work.wait = self._wrapped(module.Work.wait)

    def _on_functional(self, module: ModuleType) -> None:
        module.__dict__["wait_tensor"] = self._wrapped(module.wait_tensor)

    def _wrapped(self, real: Call) -> Call:
        torch = sys.modules["torch"]
        is_compiling, backward_pass = torch.compiler.is_compiling, torch._C._current_graph_task_id

        @functools.wraps(real)
        def wait(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._within:
                return real(*args, **kwargs)
            device = self.device
            if not (self._trains() or (device is not None and backward_pass() != _NO_BACKWARD)):
                return real(*args, **kwargs)
            if device is not None:
                return device.wait(real, *args, **kwargs)
            self._within = True
            began = time.monotonic()
            try:
                return real(*args, **kwargs)
            finally:
                self.waited_s += time.monotonic() - began
                self._within = False

        return wait

    def _on_streams(self, module: ModuleType) -> None:
        real = module.Stream.wait_event

        @functools.wraps(real)
        def wait_event(stream: Any, event: Any) -> None:
            if self.device is not None and stream == self.device.stream:
                self.device.wait(real, stream, event)
            else:
                real(stream, event)

        wait_event._torchdynamo_disable = True  # type: ignore[attr-defined]
        module.Stream.wait_event = wait_event
