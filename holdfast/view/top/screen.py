"""Paints frames on a terminal, and gives the terminal back as it was.

Only rows that changed are written, all of them in one call, so that a slow line (ssh) carries little.
The frame is painted on the alternate screen; what was on the terminal before is there again afterwards.
"""

from __future__ import annotations

import io
import os
import select
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.text import Text

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""The alternate screen, without a cursor, and with no wrapping: what is too wide is cut off."""
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"


class Screen:
    """The terminal while it is ours."""

    def __init__(self, keyboard: int, display: int) -> None:
        self._keyboard, self._display = keyboard, display
        self._before = termios.tcgetattr(keyboard)
        self._rows: list[str] = []
        self._size = (0, 0)

    def enter(self) -> None:
        tty.setcbreak(self._keyboard, termios.TCSANOW)
        self._rows = []
        self._write(ENTER)

    def leave(self) -> None:
        self._write(LEAVE)
        with suppress(termios.error):  # The terminal is gone.
            termios.tcsetattr(self._keyboard, termios.TCSANOW, self._before)

    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        try:
            found = os.get_terminal_size(self._display)
        except OSError:
            return 80, 24
        return max(20, found.columns), max(4, found.lines)

    def paint(self, lines: Sequence[Text], size: tuple[int, int]) -> None:
        """Show a frame of that size."""
        rows = ansi(lines, size[0])
        whole = size != self._size or len(rows) != len(self._rows)
        changed = [
            f"\x1b[{number};1H\x1b[0m{row}\x1b[0m\x1b[K"
            for number, row in enumerate(rows, 1)
            if whole or row != self._rows[number - 1]
        ]
        clear = "\x1b[2J" if whole else ""
        if changed:
            self._write(clear + "".join(changed))
        self._rows, self._size = rows, size

    def _write(self, text: str) -> None:
        view = memoryview(text.encode())
        while view:
            try:
                view = view[os.write(self._display, view) :]
            except BlockingIOError:  # Another process made the terminal non-blocking.
                select.select([], [self._display], [])
            except OSError:
                return  # The terminal is gone, and its end will be read from the keyboard.


def ansi(lines: Sequence[Text], width: int, *, colour: bool = True) -> list[str]:
    """Write lines with escape sequences for their colours."""
    console = Console(
        file=io.StringIO(),
        force_terminal=colour,
        color_system="auto" if colour else None,
        width=width,
        highlight=False,
        soft_wrap=True,
    )
    rows = []
    for line in lines:
        with console.capture() as captured:
            console.print(line, end="", soft_wrap=True)
        rows.append(captured.get())
    return rows
