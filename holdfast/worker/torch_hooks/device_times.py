"""How long the phases of a step take on a GPU, without waiting for it.

A script only puts work into the GPU's queue, so the time between two marks says how long that took, and
not how long the work did. So an event goes into the queue with each mark, which the GPU stamps when it
comes to it; a few steps later the stamps are read. Nothing is ever waited for.

Where the script has the GPU's stream wait for other ranks (see `waits`), it is stamped before and after
as well, and what lies between is not counted.

While a script records a CUDA graph nothing is put there, or asked: that would end up in the graph, or
break it. A GPU that has failed is the script's to complain about; here it only ends the looking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.shm.vital_signs import OPTIMIZER, OWN_WORK, Vitals

COST_S: Final = 100e-6
"""Of timing a step, at most; and of each stamp of a wait in it:"""
WAIT_COST_S: Final = 5e-6
MOST_UNREAD: Final = 64
"""Phases whose stamps are not there yet; a GPU that is further behind is not asked more."""
MOST_WAITS: Final = 1024
"""In one phase; one that has more is not timed."""


@dataclass
class _Timed:
    """A phase with its stamps."""

    phase: int
    began: Any
    ended: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """The stamps before and after each."""

    def own_s(self) -> float:
        waited_ms = sum(began.elapsed_time(ended) for began, ended in self.waits)
        return max(0.0, float(self.began.elapsed_time(self.ended) - waited_ms) / 1000)


class DeviceTimes:
    def __init__(self, vitals: Vitals, cuda: Any) -> None:
        self.cost_s = COST_S
        """Of timing a step like the last one."""
        self.stream: Any = None
        """The one that the training thread's work goes to."""
        self._vitals = vitals
        self._cuda = cuda
        """torch.cuda"""
        self._phase = -1
        self._now: _Timed | None = None
        """The phase that is under way, if it is one that is timed."""
        self._unread: deque[_Timed] = deque()
        self._waits_now = False
        self._waits = 0
        """Stamps of waits in the step that is under way."""

    def mark(self, phase: int, now: float) -> None:
        """The training thread came to another phase."""
        before, self._phase = self._phase, phase
        timed = phase in OWN_WORK and len(self._unread) < MOST_UNREAD
        try:
            if self._cuda.is_current_stream_capturing():
                self._now = None
                return
            if timed or self._now is not None:
                self._turn(phase if timed else None)
            if before == OPTIMIZER:
                self._read()
                self.cost_s, self._waits = COST_S + WAIT_COST_S * self._waits, 0
        except RuntimeError:
            self._now = None
            self._unread.clear()

    def wait(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what makes the GPU, or the script that gives it its work, wait for other ranks."""
        timed = self._now
        if timed is None or self._waits_now or not self._is_waited_in(timed):
            return real(*args, **kwargs)
        self._waits_now = True
        began = self._stamp_wait()
        try:
            return real(*args, **kwargs)
        finally:
            timed.waits.append((began, self._stamp_wait()))
            self._waits_now = False

    def _is_waited_in(self, timed: _Timed) -> bool:
        """Whether a wait that begins now is one of that phase's."""
        if len(timed.waits) == MOST_WAITS:
            self._now = None
            return False
        try:
            return not self._cuda.is_current_stream_capturing()
        except RuntimeError:
            return False

    def _stamp_wait(self) -> Any:
        self._waits += 1
        try:
            return self._stamp()
        except RuntimeError:
            self._now = None  # Without all of its stamps it cannot be timed.

    def _turn(self, phase: int | None) -> None:
        """What was timed ends, and perhaps another phase begins."""
        self.stream = self._cuda.current_stream()
        event = self._stamp()
        if self._now is not None:
            self._now.ended = event
            self._unread.append(self._now)
        self._now = None
        if phase is not None:
            self._now = _Timed(phase, event)

    def _stamp(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def _read(self) -> None:
        while self._unread and self._unread[0].ended.query():
            timed = self._unread.popleft()
            self._vitals.took_itself(timed.phase, timed.own_s())
