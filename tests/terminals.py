"""A terminal for tests: runs a command in a pseudo-terminal, and knows what is on its screen.

The screen is pyte's, a terminal emulator: what a test sees is what a person would have seen, whatever
escape sequences led there. A thread reads what the command writes all the time, so that it never waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte

PATIENCE_S = 100.0
SLOW_BYTES = 256
"""How much a slow terminal takes at once."""


class Terminal:
    """One pseudo-terminal and the command in it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 100,
        rows: int = 30,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: int | None = None,
        bytes_per_s: float | None = None,
    ) -> None:
        """`stdout` takes the place of the terminal for standard output alone; `bytes_per_s` is how
        fast the terminal takes what is written, at once if that is not said."""
        self._bytes_per_s = bytes_per_s
        self._screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=1)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.raw = b""
        self._fd, slave = os.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            list(command),
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            cwd=cwd,
            env={**(os.environ if env is None else env), "TERM": (env or {}).get("TERM", "xterm")},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        self._slave = slave  # Kept open, so that reading does not fail after the command's end.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                select.select([self._fd], [], [])
                with self._lock:
                    data = os.read(self._fd, SLOW_BYTES if self._bytes_per_s else 1 << 16)
                    self.raw += data
                    self._stream.feed(data)
                if self._bytes_per_s:
                    time.sleep(len(data) / self._bytes_per_s)
            except (OSError, ValueError):
                return

    def resize(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)
        with self._lock:
            self._screen.resize(rows, columns)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    @property
    def lines(self) -> list[str]:
        """What is on the screen, without empty lines at its end."""
        with self._lock:
            shown = [line.rstrip() for line in self._screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def all_lines(self) -> list[str]:
        """What has scrolled off the screen, and what is on it."""
        with self._lock:
            columns = range(self._screen.columns)
            past = [
                "".join(row[at].data for at in columns).rstrip() for row in self._screen.history.top
            ]
        return [*past, *self.lines]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def cursor(self) -> tuple[int, int, bool]:
        """Row, column, and whether it is hidden."""
        with self._lock:
            return self._screen.cursor.y, self._screen.cursor.x, self._screen.cursor.hidden

    @property
    def scroll_region(self) -> object:
        with self._lock:
            return self._screen.margins

    def modes(self) -> list[object]:
        """What the terminal's driver is set to."""
        return termios.tcgetattr(self._slave)

    def until(self, found: Callable[[str], object], what: str) -> str:
        """Wait until the screen is so; return its text."""
        deadline = time.monotonic() + PATIENCE_S
        while not found(text := self.text):
            assert time.monotonic() < deadline, f"waited in vain for {what}; the screen is\n{text}"
            time.sleep(0.02)
        return text

    def until_seen(self, words: str) -> str:
        return self.until(lambda text: words in text, repr(words))

    def code(self) -> int:
        """Wait for the end of the command, and for all that it wrote."""
        code = self.process.wait(PATIENCE_S)
        while True:
            with self._lock:
                if not select.select([self._fd], [], [], 0)[0]:
                    return code
            time.sleep(0.02)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        os.close(self._slave)  # The reader is told that there is no more, and ends.
        self._reader.join(PATIENCE_S)
        os.close(self._fd)


def _take_terminal() -> None:
    """Make standard error, the terminal, that of this session."""
    fcntl.ioctl(2, termios.TIOCSCTTY, 0)
