"""Keeps background tasks running, so that one that raises is neither silent nor lost.

asyncio keeps the exception of a task that nobody awaits to itself until the task is collected, and the
task is gone. A task that is kept here is logged with its traceback when it raises, and started again
after a pause that grows. Whatever else raises in the event loop (a callback, a timer, a task that is
only started) is logged and counted by the same rules.

Failures are reported to whoever owns the tasks, which makes events of them: `holdfast status` shows how
often each task failed. A task that fails over and over is logged and reported once in a while, with
the number of its failures since.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.messages.events import TaskFailed
from holdfast.messages.units import NodeId, Time

log = logging.getLogger("holdfast")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0
"""A task that ran this long before it raised is started again after the first pause."""
REPORT_EVERY_S = 60.0
MAX_ERROR_CHARS = 1 << 14
PACKAGE = str(Path(__file__).parent)


class TaskFailure(Struct, frozen=True):
    """How often a task raised since it was last reported, and the newest exception."""

    task: str
    error: str
    traceback: str
    count: int

    def event(self, node: NodeId, at: Time) -> TaskFailed:
        return TaskFailed(
            at=at,
            node=node,
            task=self.task,
            error=self.error,
            traceback=self.traceback,
            count=self.count,
        )


class BackgroundTasks:
    """The background tasks of one process."""

    def __init__(self, report: Callable[[TaskFailure], None]) -> None:
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unreported: dict[str, int] = {}
        self._reported_at: dict[str, float] = {}
        self._loop.set_exception_handler(self._on_loop_error)

    def keep(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run a task until it returns; start it again whenever it raises."""
        task = self._loop.create_task(self._keep(name, run))
        self._tasks.add(task)
        return task

    def close(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()
        self._loop.set_exception_handler(None)

    async def _keep(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began = self._loop.time()
            try:
                await run()
                return
            except Exception as error:  # Whatever it is, the task must not be missing for good.
                self._failed(name, error)
            if self._loop.time() - began >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            self._failed(_where(error), error)
        else:
            loop.default_exception_handler(context)

    def _failed(self, name: str, error: Exception) -> None:
        count = self._unreported.get(name, 0) + 1
        now, last = self._loop.time(), self._reported_at.get(name)
        if last is not None and now - last < REPORT_EVERY_S:
            self._unreported[name] = count
            return
        self._reported_at[name], self._unreported[name] = now, 0
        text = "".join(traceback.format_exception(error))[-MAX_ERROR_CHARS:]
        times = "" if count == 1 else f" ({count} times since this was last logged)"
        log.error("the background task %r raised%s; it runs again\n%s", name, times, text)
        described = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        self._report(TaskFailure(name, described, text, count))


def _where(error: Exception) -> str:
    """Name what raised in the event loop: the first function of ours in the traceback."""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(PACKAGE):
            return f"{Path(frame.filename).stem}.{frame.name}"
    return f"event loop ({type(error).__name__})"
