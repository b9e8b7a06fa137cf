"""How far each order has come that storage can hold up, and whether it still moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.errors import Refused
from holdfast.messages.keeper import AnyOrder, Commit, Look, Open, Write, Wrote

STALLED_S = 120.0
"""Storage that takes no byte for so long, or for so many times its longest pause so far, hangs."""
STALLED_TIMES = 10.0
TELL_EVERY_S = 0.5

_TOUCHES_STORAGE = Open | Write | Commit | Look


class Movement:
    def __init__(self, tell: Callable[[Wrote], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._orders: dict[int, AnyOrder] = {}
        self._moved_at: dict[int, float] = {}
        self._longest_s = 0.0
        self._done: dict[int, int] = {}
        self._told_at = 0.0

    def began(self, order: AnyOrder) -> None:
        if isinstance(order, _TOUCHES_STORAGE):
            with self._lock:
                self._orders[order.number] = order
                self._moved_at[order.number] = time.monotonic()

    def of(self, order: Write, of_bytes: int) -> Callable[[int], None]:
        """To be called with each number of bytes that were written."""

        def went_on(size: int) -> None:
            now = time.monotonic()
            with self._lock:
                last = self._moved_at.get(order.number)
                if last is None:
                    raise Refused("it was given up")
                self._longest_s = max(self._longest_s, now - last)
                self._moved_at[order.number] = now
                done = self._done[order.number] = self._done.get(order.number, 0) + size
                tell = now - self._told_at >= TELL_EVERY_S
                if tell:
                    self._told_at = now
            if tell:
                self._tell(Wrote(step=order.snapshot.step, done_bytes=done, of_bytes=of_bytes))

        return went_on

    def ended(self, order: AnyOrder) -> bool:
        """Whether anybody still waits for its answer."""
        if not isinstance(order, _TOUCHES_STORAGE):
            return True
        with self._lock:
            self._orders.pop(order.number, None)
            self._done.pop(order.number, None)
            return self._moved_at.pop(order.number, None) is not None

    def stuck(self) -> list[tuple[AnyOrder, str]]:
        """What has not moved for far too long, and is given up with this."""
        limit_s = max(STALLED_S, STALLED_TIMES * self._longest_s)
        now = time.monotonic()
        with self._lock:
            numbers = [n for n, at in self._moved_at.items() if now - at > limit_s]
            orders = [self._orders.pop(number) for number in numbers]
            for number in numbers:
                del self._moved_at[number]
        why = f"storage hangs: nothing moved for {limit_s:.0f} s"
        return [(order, why) for order in orders]
