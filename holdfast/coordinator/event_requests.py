"""Gives viewers on other machines what the journal has, in pieces that fit into a frame.

A viewer asks for what comes after a number. If there is nothing yet, it is answered with the next batch
of events, or after a while without any, and asks again. Rows are sent as they stand in the journal:
they are neither decoded nor kept in memory here, so a viewer costs little more than the bytes it reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from holdfast.coordinator.journal import Journal, JournalReader
from holdfast.core.job import Job
from holdfast.errors import JournalError
from holdfast.messages.wire import AskEvents, EventsTold, JournalRow, Rejected
from holdfast.wire.framing import MAX_FRAME_BYTES

WAIT_S: Final = 5.0
"""Longest time that a question waits for something new."""
PAUSE_S: Final = 0.1
"""Shortest time between an event and the answer that has it: what comes meanwhile goes along."""
ROWS: Final = 1000
BYTES: Final = MAX_FRAME_BYTES // 2
ROW_BYTES: Final = 100
"""What a row takes in a frame besides its event."""

Tell = Callable[[EventsTold | Rejected], None]


class EventRequests:
    """The questions that wait for something new."""

    def __init__(self, journal: Journal, job: Callable[[], Job | None]) -> None:
        self._journal = journal
        self._job = job
        self._reader: JournalReader | None = None
        self._waiting: dict[int, tuple[AskEvents, Tell, asyncio.TimerHandle]] = {}
        self._numbered = 0
        self._due: asyncio.TimerHandle | None = None

    def add(self, question: AskEvents, tell: Tell) -> None:
        """Answer a question at once if there is anything to tell, else later."""
        job = self._job()
        after = question.after if job is not None and question.job_id in ("", job.id) else 0
        if job is None or self._journal.numbered > after or after != question.after:
            tell(self._told(job, after))
            return
        self._numbered += 1
        loop = asyncio.get_running_loop()
        timer = loop.call_later(WAIT_S, self._answer, self._numbered)
        self._waiting[self._numbered] = (question, tell, timer)

    def written(self) -> None:
        """Note that there are new events."""
        if self._waiting and self._due is None:
            self._due = asyncio.get_running_loop().call_later(PAUSE_S, self._answer_all)

    def close(self) -> None:
        """Answer all that wait: there will be no more."""
        self._answer_all()
        if self._reader is not None:
            self._reader.close()

    def _answer_all(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        for number in list(self._waiting):
            self._answer(number)

    def _answer(self, number: int) -> None:
        question, tell, timer = self._waiting.pop(number)
        timer.cancel()
        tell(self._told(self._job(), question.after))

    def _told(self, job: Job | None, after: int) -> EventsTold | Rejected:
        if job is None:
            return Rejected(reason="the job has not begun: no node has joined yet")
        try:
            if self._reader is None or self._reader.empty:
                self._reader = JournalReader(self._journal.path)
            rows = self._reader.rows(after, ROWS)
        except JournalError as error:
            return Rejected(reason=f"the journal cannot be read: {error}")
        return EventsTold(
            job=job.name,
            job_id=job.id,
            after=after,
            rows=_fitting(rows),
            last=self._journal.numbered,
        )


def _fitting(rows: list[JournalRow]) -> tuple[JournalRow, ...]:
    """As many rows as fit; an event that is too large for any frame is sent empty, as a lost one."""
    kept: list[JournalRow] = []
    room = BYTES
    for row in rows:
        size = len(row.event.encode()) + ROW_BYTES
        if size > BYTES:
            row, size = row._replace(event=""), ROW_BYTES
        if size > room:
            break
        room -= size
        kept.append(row)
    return tuple(kept)
