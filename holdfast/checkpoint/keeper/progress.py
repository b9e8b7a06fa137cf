"""Tracks the orders that storage can delay, and gives up those that no longer advance."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import Unusable
from holdfast.messages.actions import CommitCheckpoint, WriteRankFiles
from holdfast.messages.keeper import (
    DiscardRankFiles,
    FindStored,
    KeeperOrder,
    KeeperReply,
    WriteAdvanced,
)
from holdfast.messages.local import OpenCheckpointer
from holdfast.messages.units import Time

STALLED_S = 120.0
STALLED_TIMES = 10.0
"""Storage hangs when it accepts no byte for `STALLED_S`, or for ten times its longest pause so far."""
REPORT_EVERY_S = 0.5

StorageAction = OpenCheckpointer | WriteRankFiles | CommitCheckpoint | DiscardRankFiles | FindStored


@dataclass
class _Underway:
    moved_at: float
    done_bytes: int = 0


class StorageProgress:
    def __init__(self, report: Callable[[KeeperReply], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._underway: dict[int, _Underway] = {}
        """By number of the order."""
        self._longest_pause_s = 0.0
        self._reported_at = 0.0

    def began(self, order: KeeperOrder) -> None:
        if isinstance(order.action, StorageAction):
            with self._lock:
                self._underway[order.number] = _Underway(time.monotonic())

    def of(self, number: int, write: WriteRankFiles, of_bytes: int) -> Callable[[int], None]:
        """Return a function to call with the size of each piece that was written."""

        def advance(size_bytes: int) -> None:
            now = time.monotonic()
            with self._lock:
                this = self._underway.get(number)
                if this is None:
                    raise Unusable("it was given up")
                self._longest_pause_s = max(self._longest_pause_s, now - this.moved_at)
                this.moved_at = now
                this.done_bytes += size_bytes
                due = now - self._reported_at >= REPORT_EVERY_S
                if due:
                    self._reported_at = now
            if due:
                step, done = write.snapshot.step, this.done_bytes
                at = Time(now)
                event = WriteAdvanced(at=at, step=step, done_bytes=done, of_bytes=of_bytes)
                self._report(KeeperReply(0, event))

        return advance

    def ended(self, order: KeeperOrder) -> bool:
        """Forget an order; return whether it still waits for its reply."""
        if not isinstance(order.action, StorageAction):
            return True
        with self._lock:
            return self._underway.pop(order.number, None) is not None

    def give_up_stuck(self) -> list[KeeperReply]:
        """Forget the orders that have not advanced for too long; return their replies."""
        limit_s = max(STALLED_S, STALLED_TIMES * self._longest_pause_s)
        now = time.monotonic()
        with self._lock:
            stuck = [n for n, one in self._underway.items() if now - one.moved_at > limit_s]
            for number in stuck:
                del self._underway[number]
        why = f"storage hangs: nothing moved for {limit_s:.0f} s"
        return [KeeperReply(number, error=why) for number in stuck]
