"""Brings notices to a target that may fail, in order, from a thread of its own.

The thread is there because a target blocks; it owns nothing but its queue. The queue is bounded: when
the target has been away for long, the oldest notices are dropped and counted, and the next one that is
delivered says how many. A notice is tried again with pauses that double, until KEEP_TRYING_S have
passed; after `finish` the pauses are short and the deadline is the given one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from msgspec.structs import replace

from holdfast.messages.units import Seconds
from holdfast.view.notices.notice import Notice
from holdfast.view.notices.targets import Outcome, Target

log = logging.getLogger("holdfast")

QUEUE = 16
FIRST_PAUSE_S: Seconds = 1.0
LONGEST_PAUSE_S: Seconds = 60.0
LAST_PAUSE_S: Seconds = 0.5
"""Pause between tries after the end of the job."""
KEEP_TRYING_S: Seconds = 600.0


class NoticeRoute:
    """The way to one target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._queue: deque[Notice] = deque()
        self._wake = threading.Condition()
        self._undelivered = 0
        self._deadline: float | None = None
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name=target.name, daemon=True)
        self._thread.start()

    def put(self, notice: Notice) -> None:
        """Have a notice delivered."""
        with self._wake:
            if len(self._queue) >= QUEUE:
                self._queue.popleft()
                self._undelivered += 1
            self._queue.append(notice)
            self._wake.notify()

    def finish(self, deadline: float) -> None:
        """Deliver what is queued by this time, on the monotonic clock, and take no more."""
        with self._wake:
            self._deadline = deadline
            self._wake.notify()

    def join(self) -> bool:
        """Wait for the end after `finish`; return whether all was delivered."""
        assert self._deadline is not None
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        with self._wake:
            return not self._queue and not self._thread.is_alive()

    def _run(self) -> None:
        while (notice := self._next()) is not None:
            taken = self._bring(notice)
            with self._wake:
                if self._queue and self._queue[0] is notice:
                    self._queue.popleft()
                self._undelivered = 0 if taken else self._undelivered + 1

    def _next(self) -> Notice | None:
        """Wait for a notice, which stays queued until it is delivered; None when there are no more."""
        with self._wake:
            while not self._queue and self._deadline is None:
                self._wake.wait()
            return self._queue[0] if self._queue else None

    def _bring(self, notice: Notice) -> bool:
        began, pause_s = time.monotonic(), FIRST_PAUSE_S
        while True:
            with self._wake:
                telling = replace(notice, undelivered=self._undelivered)
            outcome = self.target.deliver(telling)
            self._log(outcome)
            if outcome.taken or outcome.final:
                return outcome.taken
            if not self._pause(max(pause_s, outcome.pause_s), began + KEEP_TRYING_S):
                return False
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _pause(self, pause_s: Seconds, give_up_at: float) -> bool:
        """Wait before another try; return False if there is no time for one."""
        began = time.monotonic()
        with self._wake:
            while True:
                if self._deadline is not None:
                    pause_s, give_up_at = min(pause_s, LAST_PAUSE_S), self._deadline
                now, until = time.monotonic(), began + pause_s
                if max(now, until) >= give_up_at:
                    return False
                if now >= until:
                    return True
                self._wake.wait(until - now)

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
