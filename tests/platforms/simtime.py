"""An event loop whose clock jumps: what would wait for a second waits for nothing.

It is a real event loop with real sockets, pipes and threads; only its time is made up. When nothing is
ready, the clock goes on to the next timer at once, unless something outside of the loop is under way
(a thread, a process): that is waited for. So asyncio code runs as fast as it computes, and in one
order for one seed as long as nothing real is involved.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

START_S = 1000.0
STUCK_S = 60.0
"""How long a thread or a process may take before the run counts as stuck, in real time."""


class JumpingSelector(selectors.DefaultSelector):
    """Waits in simulated time for timers, and in real time for the world outside."""

    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self.now = START_S
        self.outside = 0
        """Threads and processes that the loop waits for."""
        self._patience_s = patience_s

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.outside:
            ready = super().select(STUCK_S)
            assert ready, f"a thread or a process took longer than {STUCK_S:.0f} s"
            return ready
        if self._patience_s:
            ready = super().select(self._patience_s)
            if ready:
                return ready
        if timeout is None:
            ready = super().select(STUCK_S)
            assert ready, "nothing is left that could happen"
            return ready
        self.now += timeout
        return []


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop over a clock that jumps.

    `patience_s` is how long it waits in real time before each jump, for engines that are real servers
    or processes of which nobody can say whether an answer is on its way.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        self._jumping = JumpingSelector(patience_s)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = super().run_in_executor(executor, func, *args)
        self._hold(future)
        return future

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> Any:
        transport, protocol = await super().subprocess_exec(*args, **kwargs)
        self._hold(asyncio.ensure_future(transport._wait()))
        return transport, protocol

    def _hold(self, future: asyncio.Future[Any]) -> None:
        self._jumping.outside += 1
        future.add_done_callback(self._let_go)

    def _let_go(self, _: asyncio.Future[Any]) -> None:
        self._jumping.outside -= 1
