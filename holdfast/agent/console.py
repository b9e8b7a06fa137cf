"""Writes what ranks print to the terminal, from a thread of its own.

A terminal that does not read (a paused pager, a slow link) stops neither the ranks nor their repair:
what there is to show is queued, and beyond a limit it is dropped and counted. The logs have all of it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator

from holdfast.terminal_line import AWAY, TerminalLine

OUT, ERR = 1, 2
CONSOLE_BYTES = 8 << 20
PIECE_BYTES = 4 << 10
"""What is written to a terminal at once, in whole lines: a slow one keeps others waiting meanwhile."""
LAST_BYTES = 4 << 10
"""What is shown at the end on a terminal that is too slow for all of it."""
BAR_EVERY_S = 0.05
"""A bar that changes more often is not drawn more often."""


class Console:
    """Writes to the agent's own stdout and stderr without ever blocking the caller.

    Where the terminal has a status line (`terminal_line.py`), the line is drawn again after each
    output, and the progress bar of a rank is shown above it while it moves."""

    def __init__(self, line: TerminalLine | None = None) -> None:
        self._line = line
        self._bars: dict[bytes, tuple[bytes, bool]] = {}
        self._bar_changed = False
        self._bar_at = 0.0
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._dropped = 0
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def write(self, fd: int, data: bytes) -> None:
        with self._wake:
            if self._queued_bytes > CONSOLE_BYTES:
                self._dropped += len(data)
                return
            self._mention_dropped()
            for piece in pieces(data):
                self._append(fd, piece)
            self._wake.notify()

    @property
    def has_line(self) -> bool:
        """Whether the terminal may have a status line."""
        return self._line is not None

    def show_bar(self, stream: bytes, text: bytes, prompts: bool = False) -> None:
        """Show the progress bar or the prompt of a stream, or none any more; of several, the first by
        name."""
        with self._wake:
            before = self._bars.pop(stream, (b"", False))
            if text:
                self._bars[stream] = (text, prompts)
            if before != (text, prompts):
                self._bar_changed = True
                self._wake.notify()

    def _mention_dropped(self) -> None:
        if self._dropped:
            note = f"[holdfast] {self._dropped} bytes not shown here; the logs have them\n"
            self._append(ERR, note.encode())
            self._dropped = 0

    def _append(self, fd: int, data: bytes) -> None:
        self._queue.append((fd, data))
        self._queued_bytes += len(data)

    def close(self, limit_s: float) -> None:
        """Write what is still queued, within a limit; a terminal that is slow gets the end of it."""
        with self._wake:
            self._mention_dropped()
            self._closing = True
            self._wake.notify()
        self._thread.join(limit_s / 2)
        with self._wake:
            self._skip_to_end()
        self._thread.join(limit_s / 2)
        if self._line is not None:
            self._line.page.set_bar(b"")

    def _skip_to_end(self) -> None:
        """Leave no more in the queue than a slow terminal can take before its launcher has ended."""
        last: deque[tuple[int, bytes]] = deque()
        left = LAST_BYTES
        while self._queue and (left := left - len(self._queue[-1][1])) >= 0:
            last.appendleft(self._queue.pop())
        self._dropped = sum(len(data) for _, data in self._queue)
        self._queue.clear()
        self._mention_dropped()
        self._queue += last

    def _run(self) -> None:
        # A signal would cut a write short. With SIGTTOU blocked, a terminal lets the background write.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._wake:
                while not self._queue and not self._closing and (wait_s := self._bar_due_s()) != 0:
                    self._wake.wait(wait_s)
                if not self._queue and self._closing:
                    return
                fd, data = self._queue.popleft() if self._queue else (ERR, b"")
                self._place_bar()
            try:
                self._show(fd, data)
            except OSError:
                pass  # The terminal is gone; the log has it.
            with self._wake:
                self._queued_bytes -= len(data)

    def _show(self, fd: int, data: bytes) -> None:
        """Write to the terminal, in one call if it takes all at once."""
        while self._line is not None and (shown := self._line.around(fd, data)) is not data:
            try:
                written = os.write(fd, shown)
            except BlockingIOError:  # Another process made the terminal non-blocking.
                select.select([], [fd], [])
                continue
            if written == len(shown):
                return
            rest = self._line.rest_of(data, written)
            if len(rest) == len(data):  # One line, and longer than what the terminal takes at once.
                data = data[max(0, written - len(AWAY)) :]
                break
            data = rest
        write_all(fd, data)

    def _bar_due_s(self) -> float | None:
        """Time until a changed bar is drawn; None if none has changed."""
        if not self._bar_changed:
            return None
        return max(0.0, self._bar_at + BAR_EVERY_S - time.monotonic())

    def _place_bar(self) -> None:
        """Write to the page which bar is drawn with the line."""
        if self._line is not None and self._bar_changed:
            bar, prompts = self._bars[min(self._bars)] if self._bars else (b"", False)
            self._line.page.set_bar(bar, prompts)
        self._bar_changed, self._bar_at = False, time.monotonic()


def pieces(data: bytes) -> Iterator[bytes]:
    """Split lines into pieces of whole lines, each no longer than PIECE_BYTES if its lines are not."""
    at = 0
    while len(data) - at > PIECE_BYTES:
        end = data.rfind(b"\n", at, at + PIECE_BYTES) + 1 or data.find(b"\n", at) + 1 or len(data)
        yield data[at:end]
        at = end
    if at < len(data):
        yield data[at:]


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # Another process made the terminal non-blocking.
            select.select([], [fd], [])
