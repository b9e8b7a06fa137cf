"""Times the own work of phases on a GPU, without ever synchronizing with it.

A script only queues work, so the time between two marks is not the time that the work takes. So each
mark records a CUDA event, which the GPU stamps when it reaches it; a few steps later the stamps are
read. Where the stream waits for other ranks (see `waits`), events before and after take that time out.

Nothing is recorded or queried while the script captures a CUDA graph: that would end up in the graph,
or break it. If a GPU has failed, the script reports it; here timing only stops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.shm.vital_signs import BACKWARD, FORWARD, OPTIMIZER, Vitals

PASSES: Final = (FORWARD, BACKWARD, OPTIMIZER)
"""Phases that queue work. Between them a script may also wait for the GPU itself."""
COST_S: Final = 100e-6
"""Upper bound of the cost of timing one step."""
WAIT_COST_S: Final = 5e-6
"""Upper bound of the cost of each event around a wait."""
MOST_UNREAD: Final = 64
"""Phases whose stamps are pending; a GPU that is further behind is not timed."""
MOST_WAITS: Final = 1024
"""Waits in one phase; a phase with more is not timed."""


@dataclass
class _Timed:
    """A phase and its events."""

    phase: int
    began: Any
    ended: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """Events before and after each wait."""

    def own_s(self) -> float:
        waited_ms = sum(began.elapsed_time(ended) for began, ended in self.waits)
        return max(0.0, float(self.began.elapsed_time(self.ended) - waited_ms) / 1000)


class DeviceTimes:
    """Times of the phases' own work on one GPU."""

    def __init__(self, vitals: Vitals, cuda: Any) -> None:
        self.cost_s = COST_S
        """Cost of timing a step like the last one."""
        self.stream: Any = None
        """Stream of the training thread."""
        self._vitals = vitals
        self._cuda = cuda
        """The module torch.cuda."""
        self._phase = -1
        self._now: _Timed | None = None
        """Phase that is being timed."""
        self._unread: deque[_Timed] = deque()
        self._waiting = False
        self._waits = 0
        """Events around waits in the current step."""

    def mark(self, phase: int) -> None:
        """End the timing of the current phase, and begin another."""
        before, self._phase = self._phase, phase
        timed = phase in PASSES and len(self._unread) < MOST_UNREAD
        try:
            if self._cuda.is_current_stream_capturing():
                self._now = None
                return
            if timed or self._now is not None:
                self._turn(phase if timed else None)
            if before == OPTIMIZER:
                while self._unread and self._unread[0].ended.query():
                    read = self._unread.popleft()
                    self._vitals.took_itself(read.phase, read.own_s())
                self.cost_s, self._waits = COST_S + WAIT_COST_S * self._waits, 0
        except RuntimeError:
            self._now = None
            self._unread.clear()

    def wait(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that makes the stream, or the script, wait for other ranks."""
        timed = self._now
        if timed is None or self._waiting or not self._is_waited_in(timed):
            return real(*args, **kwargs)
        self._waiting = True
        began = self._wait_event()
        try:
            return real(*args, **kwargs)
        finally:
            timed.waits.append((began, self._wait_event()))
            self._waiting = False

    def _is_waited_in(self, timed: _Timed) -> bool:
        """Return whether a wait that begins now can be timed as part of that phase."""
        if len(timed.waits) == MOST_WAITS:
            self._now = None
            return False
        try:
            return not self._cuda.is_current_stream_capturing()
        except RuntimeError:
            return False

    def _wait_event(self) -> Any:
        self._waits += 1
        try:
            return self._event()
        except RuntimeError:
            self._now = None  # Without all of its events the phase cannot be timed.

    def _turn(self, phase: int | None) -> None:
        self.stream = self._cuda.current_stream()
        event = self._event()
        if self._now is not None:
            self._now.ended = event
            self._unread.append(self._now)
        self._now = None if phase is None else _Timed(phase, event)

    def _event(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event
