"""Keeps one line at the bottom of a terminal that several processes write to.

The terminal of `holdfast run` has many writers: the launcher, the coordinator and the agents log to it,
and each agent's console writes what its ranks print. None of them may wait for another, and any of them
may be killed at any moment. So there is no owner of the terminal and no lock, but a rule:

    Each write is one system call, consists of whole lines, and begins with AWAY, which erases what is
    below the cursor. Whoever draws the line leaves the cursor where it was: in the first column of the
    row that the line is drawn in.

The kernel writes a call's bytes to a terminal in one piece, unless a signal interrupts it: who writes
keeps signals out, and goes on with the line that was cut short (`rest_of`). So between two writes the
cursor is always in the first column, in a row that is empty or begins the line; whatever comes next
erases it, and no order of writes can mix a line of output with it. There is no scroll region, no
alternate screen, no hidden cursor: a process that is killed leaves a line that the next output erases,
and nothing else.
While the line is drawn, wrapping is off, so one that is too wide for a window that just became narrower
is cut off by the terminal; the cursor and the script's colours are saved before and restored after.

The texts are in a *line page*, a small file in the job's home that all these processes open. A viewer
(`view/statusline.py`) writes the line there and draws it once or twice a second; a console reads it
when it has something to show, and draws it again after that in the same call, so that the line does
not flicker however fast the output is. Output never waits for the viewer, and without a text there is
no line. A console puts the progress bar of a rank there too: what a script has written after a carriage
return, which is shown above the line until it ends. A line that a script has begun and does not end is
shown in the same place, as a prompt: the cursor stays behind it, and the line is not drawn anew until
the script goes on, since that would erase what is being typed.

A script that moves the cursor up and down draws on the terminal itself, and there is no row that the
line could have. The line goes and does not come back: see `is_drawing`.
"""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
AWAY = _WRAP + b"\r\x1b[J"
"""To the first column; erase from there to the end of the screen. A process that was killed while it
drew may have left wrapping off."""
_SAVE, _RESTORE = b"\x1b7", b"\x1b8"
_PLAIN = b"\x1b[0m"
_ROOM_FOR_TWO = b"\r\n\x1b[A"
_DRAWING = re.compile(rb"\x1b(?:\[[0-9;?]*[ABEFHJLMSTdfhlrsu]|[78DEMc])")
"""Escape sequences that move the cursor to another row, erase other rows or change how it moves."""
_CUT_OFF = re.compile(
    rb"(?:\x1b(?:\[[0-9;?]*)?|[\xc0-\xff]|[\xe0-\xff][\x80-\xbf]|[\xf0-\xff][\x80-\xbf]{2})\Z"
)
"""The begin of an escape sequence or of a character of UTF-8 whose end is missing."""

FIELD_BYTES = 1024
_HEADER = struct.Struct("=IH")
_MOST = FIELD_BYTES - _HEADER.size
_LINE_AT, _BAR_AT, _ASIDE_AT, _PROMPT_AT = 0, FIELD_BYTES, 2 * FIELD_BYTES, 2 * FIELD_BYTES + 1
_PAGE_BYTES = 2 * FIELD_BYTES + 8


def is_drawing(output: bytes) -> bool:
    """Return whether output moves the cursor between rows, as a script does that draws a screen."""
    return b"\x1b" in output and _DRAWING.search(output) is not None


def whole(output: bytes) -> bytes:
    """Return output without an escape sequence or a character at its end that is not complete."""
    return _CUT_OFF.sub(b"", output)


class LineTexts(NamedTuple):
    """What a line page says."""

    line: bytes
    bar: bytes
    prompts: bool
    """Whether the bar is a prompt, after which somebody may be typing."""
    stands_aside: bool
    """Whether a script draws on the terminal itself."""


def _text_at(page: bytes, at: int) -> bytes:
    field = page[at : at + FIELD_BYTES]
    if len(field) < _HEADER.size:
        return b""
    checksum, size = _HEADER.unpack_from(field)
    text = field[_HEADER.size : _HEADER.size + size]
    return text if size and zlib.crc32(text) == checksum else b""


class LinePage:
    """The texts of the line and of the bar above it, shared by processes of a job on one machine.

    It is read and written by system calls, not mapped: a file system that fails must cost the line, not
    a process. A text that is being written has a wrong checksum, and reads as none."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Raises OSError."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
        self._fd = os.open(path, flags, 0o600)
        if create:
            os.pwrite(self._fd, bytes(_PAGE_BYTES), 0)

    def texts(self) -> LineTexts:
        """Read all of the page, in one call."""
        page = self._pread()
        return LineTexts(
            line=_text_at(page, _LINE_AT),
            bar=_text_at(page, _BAR_AT),
            prompts=page[_PROMPT_AT : _PROMPT_AT + 1] == b"\1",
            stands_aside=page[_ASIDE_AT : _ASIDE_AT + 1] != b"\0",
        )

    def set_line(self, text: bytes) -> None:
        self._write(_LINE_AT, text)

    def set_bar(self, text: bytes, prompts: bool = False) -> None:
        self._pwrite(_PROMPT_AT, b"\1" if prompts else b"\0")
        self._write(_BAR_AT, text)

    def stand_aside(self) -> None:
        self._pwrite(_ASIDE_AT, b"\1")

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, at: int, text: bytes) -> None:
        text = whole(text[:_MOST]) if len(text) > _MOST else text
        self._pwrite(at, _HEADER.pack(zlib.crc32(text), len(text)) + text)

    def _pread(self) -> bytes:
        try:
            return os.pread(self._fd, _PAGE_BYTES, 0)
        except OSError:
            return b""

    def _pwrite(self, at: int, data: bytes) -> None:
        try:
            os.pwrite(self._fd, data, at)
        except OSError:
            pass


class TerminalLine:
    """The line as one process sees it."""

    def __init__(self, page: LinePage) -> None:
        self.page = page
        self._fds = frozenset(fd for fd in (1, 2) if _on_terminal_of_errors(fd))

    def is_on(self, fd: int) -> bool:
        """Return whether what is written to this descriptor shares the terminal with the line."""
        return self._on(fd) is not None

    def _on(self, fd: int) -> LineTexts | None:
        if fd not in self._fds:
            return None
        texts = self.page.texts()
        return texts if texts.line and not texts.stands_aside else None

    def around(self, fd: int, lines: bytes) -> bytes:
        """Return what to write, in one call, so that whole lines appear above the line."""
        texts = self._on(fd)
        if texts is None:
            return lines
        if is_drawing(lines):
            self.page.stand_aside()
            return AWAY + lines
        return AWAY + lines + _drawn(texts)

    def show(self) -> None:
        """Draw the line anew, unless that would erase what somebody types."""
        texts = self._on(2)
        if texts is not None and not texts.prompts:
            write_at_once(2, AWAY + _drawn(texts))

    def tidy(self) -> None:
        """Undo what a viewer that was killed while it drew may have left."""
        if self.is_on(2):
            write_at_once(2, AWAY + _PLAIN)

    def take_away(self) -> None:
        """Erase the line and show it no more; what comes next is in no colour of the script's."""
        was_on = self.is_on(2)
        self.page.set_line(b"")
        if was_on:
            write_at_once(2, AWAY + _PLAIN)

    def rest_of(self, lines: bytes, written: int) -> bytes:
        """Return what to write after a call that took no more than so many bytes of `around`.

        Somebody else may have written since and have erased the row that was cut short, so this begins
        with the line of that row."""
        taken = min(max(0, written - len(AWAY)), len(lines))
        begins = lines.rfind(b"\n", 0, taken) + 1
        return lines[begins:]


def _drawn(texts: LineTexts) -> bytes:
    """Return what draws the line, with the bar above it if there is one."""
    line = _PLAIN + texts.line + _PLAIN
    if texts.bar and texts.prompts:
        below = _SAVE + b"\r\n" + _NO_WRAP + line + _WRAP + _RESTORE
        return _ROOM_FOR_TWO + _NO_WRAP + texts.bar + _WRAP + below
    room, above = (_ROOM_FOR_TWO, texts.bar + b"\r\n") if texts.bar else (b"", b"")
    return room + _SAVE + _NO_WRAP + above + line + _WRAP + _RESTORE


def write_at_once(fd: int, data: bytes) -> None:
    """Write to a terminal in one call that no signal cuts short; what it does not take is lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        os.write(fd, data)
    except OSError:
        pass  # The terminal is gone, or takes nothing now.
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_terminal_of_errors(fd: int) -> bool:
    """Return whether a descriptor is a terminal, the same one as standard error."""
    try:
        return os.isatty(2) and os.isatty(fd) and os.fstat(fd).st_rdev == os.fstat(2).st_rdev
    except OSError:
        return False


def is_capable(environ: Mapping[str, str]) -> bool:
    """Return whether standard error is a terminal that can show a line."""
    return os.isatty(2) and environ.get("TERM", "dumb") not in ("", "dumb")


def found(path: Path) -> TerminalLine | None:
    """Return the line of the terminal that this process writes to, if its job has one."""
    if not os.isatty(2):
        return None
    try:
        return TerminalLine(LinePage(path))
    except OSError:
        return None


@contextmanager
def kept_clear(line: TerminalLine | None) -> Iterator[None]:
    """Have what this process and those it forks print and log erase the line first."""
    if line is None:
        yield
        return
    before, clearing = sys.stderr, ClearingStream(sys.stderr, line)
    sys.stderr = clearing
    _log_to(before, clearing)
    try:
        yield
    finally:
        _log_to(clearing, before)
        sys.stderr = before


def _log_to(before: object, now: object) -> None:
    for one in logging.getLogger().handlers:
        if isinstance(one, logging.StreamHandler) and one.stream is before:
            one.setStream(now)


class ClearingStream(io.TextIOBase):
    """Standard error of a process that shares its terminal with the line: each line that is printed
    erases it first. The viewer draws it again."""

    def __init__(self, under: TextIO, line: TerminalLine) -> None:
        self._under, self._line = under, line
        self._begins = True

    def write(self, text: str) -> int:
        if self._begins and text and self._line.is_on(2):
            self._under.write(AWAY.decode())
        self._under.write(text)
        self._begins = text.endswith("\n") if text else self._begins
        return len(text)

    def flush(self) -> None:
        self._under.flush()

    def fileno(self) -> int:
        return self._under.fileno()

    def isatty(self) -> bool:
        return self._under.isatty()

    def writable(self) -> bool:
        return True
