"""Runs an agent's asyncio code in simulated time.

Every agent has an event loop of its own over the shared simulated clock: its callbacks wait in the
clock's heap, so nothing depends on threads, file descriptors or the wall clock, and a seed gives one
order of events. A loop whose agent is paused holds its callbacks back until the pause is over; one
whose agent has died runs nothing any more, as after SIGKILL.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar, cast

from holdfast.sim.clock import SimClock

T = TypeVar("T")


class Fate(Protocol):
    """What decides whether an agent's code may run."""

    dead: bool
    paused_until: float


class SimHandle:
    """A callback that has not run yet."""

    __slots__ = ("_cancelled", "act", "arguments")

    def __init__(self, act: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.act = act
        self.arguments = arguments
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled


class SimLoop:
    """As much of an event loop as futures, tasks, events and timers need."""

    def __init__(self, clock: SimClock, fate: Fate, errors: list[BaseException]) -> None:
        self._clock = clock
        self._fate = fate
        self._as_loop = cast(asyncio.AbstractEventLoop, self)
        self._errors = errors

    def time(self) -> float:
        return float(self._clock.now)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, **_: Any) -> SimHandle:
        handle = SimHandle(callback, args)
        if not self._fate.dead:
            self._clock.at(when, self._fire, handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, **_: Any
    ) -> SimHandle:
        return self.call_at(self._clock.now + delay, callback, *args)

    def call_soon(self, callback: Callable[..., Any], *args: Any, **_: Any) -> SimHandle:
        return self.call_at(self._clock.now, callback, *args)

    def _fire(self, handle: SimHandle) -> None:
        if self._fate.dead or handle.cancelled():
            return
        if self._fate.paused_until > self._clock.now:
            self._clock.at(self._fate.paused_until, self._fire, handle)
            return
        self.enter(handle.act, *handle.arguments)

    def enter(self, act: Callable[..., T], *arguments: Any) -> T:
        """Run a function with this loop as the running one."""
        outer = events._get_running_loop()
        events._set_running_loop(self._as_loop)
        try:
            return act(*arguments)
        finally:
            events._set_running_loop(outer)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._as_loop)

    def create_task(self, coro: Coroutine[Any, Any, T], **_: Any) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self._as_loop)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._fate.dead

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep errors; a task that ended with its agent is none."""
        error = context.get("exception")
        if error is not None:
            self._errors.append(error)
