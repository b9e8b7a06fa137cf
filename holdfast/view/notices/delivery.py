"""Brings notices to a target that may fail, one at a time.

A route is offered the job as it is now, and sends what its target was not told yet. So nothing queues
up while a target is away: the notice that it takes in the end holds all that it has missed. What it was
told is noted when it has answered; a sender that is killed between request and answer tells it again.

A target that fails is tried again after a pause that doubles, or after the one that it asks for. Once
the job is over the pauses are short, and a pause that the target asks for ends in time for a last try.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from holdfast.messages.units import Seconds
from holdfast.view.notices import news
from holdfast.view.notices.news import NoticesTold
from holdfast.view.notices.notice import JobSeen, Notice, of_incidents, of_the_end
from holdfast.view.notices.targets import ANSWER_S, Outcome, Target

log = logging.getLogger("holdfast")

FIRST_PAUSE_S: Seconds = 1.0
LONGEST_PAUSE_S: Seconds = 60.0
LAST_PAUSE_S: Seconds = 0.5
"""Pause between tries after the end of the job."""


class NoticeRoute:
    """The way to one target. It belongs to an event loop; the target is waited for in a thread."""

    def __init__(
        self, target: Target, told: NoticesTold, note: Callable[[NoticesTold], None]
    ) -> None:
        self.target = target
        self.told = told
        """What the target was told."""
        self.through = False
        """Whether the target was told the end of the job, or has refused to hear it."""
        self._note = note
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=target.name)
        self._failed_at = 0.0
        self._pause_s: Seconds = 0.0
        """The pause after that; none if the last try did not fail."""
        self._wanted_s: Seconds = 0.0
        """The pause that the target asked for."""
        self._trouble = ""

    def offer(
        self, seen: JobSeen, run: int, deadline: float | None
    ) -> tuple[Notice, NoticesTold] | None:
        """Return the notice to bring now, if any, and what the target was told with it. There is a
        deadline, on the monotonic clock, once the job is over in its run of this number."""
        if deadline is not None and self._knows_end(seen, run):
            self.through = True
        if self.through or time.monotonic() < self.next_try(deadline):
            return None
        return self._incidents(seen) if deadline is None else self._end(seen, run)

    def _knows_end(self, seen: JobSeen, run: int) -> bool:
        return seen.status.exit_code is not None and self.told.ended_run == run

    def _incidents(self, seen: JobSeen) -> tuple[Notice, NoticesTold] | None:
        new = news.due(self.told, seen.incidents, seen.at)
        if not new:
            return None
        notice = of_incidents(seen, new, self.told.undelivered)
        return notice, news.after(self.told, new, seen.incidents, seen.at)

    def _end(self, seen: JobSeen, run: int) -> tuple[Notice, NoticesTold]:
        new = news.untold(self.told, seen.incidents, seen.at, all=True)
        told = news.after(self.told, new, seen.incidents, seen.at)
        if seen.status.exit_code is not None:  # A job that is lost may be taken up again.
            told = replace(told, ended_run=run)
        return of_the_end(seen, new, self.told.undelivered), told

    async def bring(self, notice: Notice, told: NoticesTold) -> None:
        """Try once to deliver a notice, and note what came of it."""
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self._thread, self.target.deliver, notice)
        self._log(outcome)
        if not outcome.taken and not outcome.final:
            self._failed_at = time.monotonic()
            self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            self._wanted_s = outcome.pause_s
            return
        self._pause_s = self._wanted_s = 0.0
        self.told = replace(told, undelivered=0 if outcome.taken else told.undelivered + 1)
        self._note(self.told)
        self.through = notice.kind in ("finished", "failed", "lost")

    def next_try(self, deadline: float | None) -> float:
        """Return when the target may be tried again, on the monotonic clock."""
        if not self._pause_s:
            return 0.0
        if deadline is None:
            return self._failed_at + max(self._pause_s, self._wanted_s)
        wanted = min(self._failed_at + self._wanted_s, deadline - ANSWER_S)
        return max(self._failed_at + min(self._pause_s, LAST_PAUSE_S), wanted)

    def _log(self, outcome: Outcome) -> None:
        """Log trouble once until it is over or another."""
        if outcome.taken and self._trouble:
            log.info("notices: %s takes them again", self.target.name)
        elif outcome.why and outcome.why != self._trouble:
            then = "check it" if outcome.final else "trying again"
            log.warning(
                "notices: %s did not take one (%s); %s", self.target.name, outcome.why, then
            )
        self._trouble = "" if outcome.taken else outcome.why
