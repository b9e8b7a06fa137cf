"""Follows a job on another machine: its coordinator is asked for the rows of the journal.

One thread asks, waits for the answer, which comes when there is something new or after a while, and
asks again; what it gets waits in a list until the follower takes it. A coordinator that does not answer
is asked again for as long as the viewer runs: it may be restarting.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Final

from holdfast.coordinator.journal import decoded
from holdfast.core.replay import Entry
from holdfast.errors import HoldfastError
from holdfast.messages.wire import AskEvents, EventsTold
from holdfast.wire.visitors import Coordinates, ask_at

AGAIN_S: Final = 0.5
"""Pause before a coordinator that did not answer is asked again."""
MOST_AHEAD: Final = 20_000
"""Rows that may wait to be taken; no more are asked for then."""


class RemoteJournal:
    """The journal of a job on another machine."""

    def __init__(self, where: Coordinates) -> None:
        """Ask once, so that a wrong address or token is known at once."""
        self._where = where
        first = ask_at(where, AskEvents(after=0), EventsTold)
        self.name = first.job
        self._job_id = first.job_id
        self._rows = list(first.rows)
        self._asked_after = first.rows[-1].number if first.rows else 0
        self._given = 0
        """Number of the newest row that was taken."""
        self._last = first.last
        self._replaced = False
        self._alive = True
        self.trouble: str | None = None
        """Why the coordinator does not answer; None if it does."""
        self._lock = threading.Condition()
        self._changed = asyncio.Event()
        self._news = False
        """Whether there was something new since `changed` returned, whoever waited then."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        threading.Thread(target=self._keep_asking, name="remote journal", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def entries(self, after: int, limit: int) -> list[Entry]:
        with self._lock:
            if after < self._given:  # Some were set aside, and all are wanted again without those.
                self._rows.clear()
                self._asked_after = self._given = 0
                self._lock.notify_all()
                return []
            taken = self._rows[:limit]
            del self._rows[:limit]
            if taken:
                self._given = taken[-1].number
            self._lock.notify_all()
        return list(decoded(taken, after, self.name))

    def replaced(self) -> bool:
        with self._lock:
            replaced, self._replaced = self._replaced, False
            return replaced

    def alive(self) -> bool:
        return self._alive

    def last(self) -> int:
        return self._last

    def snapshot(self) -> None:
        """Rows are all that a coordinator tells."""

    async def changed(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._changed.clear()
            new = self._news or self._rows or self._replaced
        if not new:
            await self._changed.wait()
        with self._lock:
            self._news = False

    # ---- the thread that asks ----

    def _keep_asking(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or len(self._rows) < MOST_AHEAD)
                if self._closed:
                    return
                question = AskEvents(after=self._asked_after, job_id=self._job_id)
            try:
                told = ask_at(self._where, question, EventsTold)
            except HoldfastError as error:
                self._note(alive=False, trouble=str(error))
                with self._lock:
                    self._lock.wait_for(lambda: self._closed, AGAIN_S)
                continue
            self._take(question, told)
            self._note(alive=True, trouble=None)

    def _take(self, question: AskEvents, told: EventsTold) -> None:
        with self._lock:
            if question.after != self._asked_after:
                return  # All were wanted again meanwhile.
            if told.job_id != self._job_id:
                self._job_id, self._replaced = told.job_id, True
                self._rows.clear()
                self._given = 0
            self._rows += told.rows
            self._asked_after = told.rows[-1].number if told.rows else told.after
            self._last = told.last
            if told.rows:
                self._wake()

    def _note(self, alive: bool, trouble: str | None) -> None:
        with self._lock:
            self.trouble = trouble
            if alive != self._alive:
                self._alive = alive
                self._wake()

    def _wake(self) -> None:
        """Have `changed` return; the lock is held."""
        self._news = True
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop is closed, and nobody waits any more.
                self._loop.call_soon_threadsafe(self._changed.set)
