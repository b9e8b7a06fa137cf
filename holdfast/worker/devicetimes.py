"""How long the phases of a step take on a GPU, without waiting for it.

A script only puts work into the GPU's queue, so the time between two marks says how long that took, and
not how long the work did. So an event goes into the queue with each mark, which the GPU stamps when it
comes to it; a few steps later the stamps are read. Nothing is ever waited for.

While a script records a CUDA graph nothing is put there, or asked: that would end up in the graph, or
break it. A GPU that has failed is the script's to complain about; here it only ends the looking.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from holdfast.vitals import ON_DEVICE, OPTIMIZER, Vitals

MOST_UNREAD: Final = 64
"""Phases whose stamps are not there yet; a GPU that is further behind is not asked more."""


class DeviceTimes:
    def __init__(self, vitals: Vitals, cuda: Any) -> None:
        self._vitals = vitals
        self._cuda = cuda
        """torch.cuda"""
        self._phase = -1
        self._began: Any = None
        """The event with which the phase began, if it is one that is timed."""
        self._ended: deque[tuple[int, Any, Any]] = deque()

    def mark(self, phase: int) -> None:
        """The training thread came to another phase."""
        before, self._phase = self._phase, phase
        timed = phase in ON_DEVICE and len(self._ended) < MOST_UNREAD
        try:
            if self._cuda.is_current_stream_capturing():
                self._began = None
                return
            if timed or self._began is not None:
                self._stamp(before, timed)
            if before == OPTIMIZER:
                self._read()
        except RuntimeError:
            self._began = None
            self._ended.clear()

    def _stamp(self, before: int, timed: bool) -> None:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        if self._began is not None:
            self._ended.append((before, self._began, event))
        self._began = event if timed else None

    def _read(self) -> None:
        while self._ended and self._ended[0][2].query():
            phase, began, ended = self._ended.popleft()
            self._vitals.took_on_device(phase, began.elapsed_time(ended) / 1000)
