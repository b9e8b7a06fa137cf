"""Starts viewers beside a job: its status line, and whoever sends notices.

A viewer follows the journal from a process of its own, and the job never waits for it. The launcher
that hosts the coordinator starts them after its other children, starts one that died again, and gives
up on one that keeps dying, with a line in the log: unlike an agent or a coordinator, a viewer that
cannot run is no reason to end a job. A viewer that is stopped (SIGSTOP) is left alone.

When the job is over, each viewer is sent SIGTERM. The status line ends at once; notices have
LAST_WORD_S to be delivered, and a sender that dies meanwhile is started again. The launcher waits that
long at most, less if another signal comes, and then kills what is left. If the launcher itself is
killed, the status line dies with it. The sender of notices does not: it reports that the job is lost,
within the same limit, and ends.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from holdfast import terminal_line
from holdfast.config.settings import RunSettings
from holdfast.jobhome import JobHome
from holdfast.launch.child import Child, ended_children, how, reap, send
from holdfast.terminal_line import LinePage, TerminalLine

log = logging.getLogger("holdfast")

LAST_WORD_S = 15.0
"""How long the last notices may take after the end of a job."""
MARGIN_S = 1.0
"""What the sender leaves of that for its own end."""


@dataclass
class Viewers:
    """The viewers of one job, which live and die without it noticing."""

    children: list[Child] = field(default_factory=list)

    def start(self) -> None:
        for child in self.children:
            child.start()

    def pids(self) -> set[int]:
        return {child.pid for child in self.children}

    def ended(self, gone: Mapping[int, int]) -> None:
        """Start those again that died; forget those that are through, or were told to go."""
        for child in [child for child in self.children if child.pid in gone]:
            code = gone[child.pid]
            if code in (0, -signal.SIGTERM):
                self.children.remove(child)
            elif child.too_often():
                self.children.remove(child)
                log.warning("the %s keeps dying (it %s); going on without", child.name, how(code))
            else:
                child.start()

    def dismiss(self, hurry: frozenset[signal.Signals]) -> None:
        """End them after the job: with time for a last word, unless one of these signals comes."""
        self._send_away()
        deadline = time.monotonic() + LAST_WORD_S
        while self.children:
            if gone := ended_children():
                self.ended(gone)  # One that died without its last word has another try.
                self._send_away()
                continue
            left_s = max(0.0, deadline - time.monotonic())
            got = signal.sigtimedwait(hurry | {signal.SIGCHLD}, left_s)
            if got is None or got.si_signo != signal.SIGCHLD:
                break
        for pid in self.pids():
            send(pid, signal.SIGKILL)
            reap(pid)
        self.children.clear()

    def _send_away(self) -> None:
        for pid in self.pids():
            send(pid, signal.SIGTERM)
            send(pid, signal.SIGCONT)


# ---- which viewers a job has ----


@contextmanager
def terminal_of(settings: RunSettings, home: JobHome, hosts: bool) -> Iterator[TerminalLine | None]:
    """Share the terminal with the job's status line, and leave the terminal as it was.

    The launcher that hosts the coordinator makes the line; others on its terminal keep clear of it.
    """
    line = _made(settings, home) if hosts else terminal_line.found(home.line)
    try:
        with terminal_line.kept_clear(line):
            yield line
    finally:
        if hosts and line is not None:
            line.take_away()
            home.line.unlink(missing_ok=True)


def _made(settings: RunSettings, home: JobHome) -> TerminalLine | None:
    home.line.unlink(missing_ok=True)  # That of a launcher that was killed.
    if not settings.terminal.status_line or not terminal_line.is_capable(os.environ):
        return None
    try:
        return TerminalLine(LinePage(home.line, create=True))
    except OSError:
        return None


def viewers_of(settings: RunSettings, home: JobHome, line: TerminalLine | None) -> Viewers:
    """Make the viewers of a job that this launcher hosts."""
    launcher_pid = os.getpid()

    def show() -> int:
        from holdfast.view.statusline import run_status_line

        assert line is not None
        return run_status_line(home, line, launcher_pid)

    children = [Child("status line", show)] if line is not None else []
    return Viewers([*children, *notice_senders(settings.notify, home)])


def notice_senders(targets: Sequence[str], home: JobHome) -> list[Child]:
    """Make the sender of notices of a job that this process hosts, if there is anybody to tell."""
    parent_pid = os.getpid()

    def notify() -> int:
        from holdfast.view.notices.process import run_notices

        return run_notices(home, targets, parent_pid, LAST_WORD_S - MARGIN_S)

    return [Child("sender of notices", notify)] if targets else []
