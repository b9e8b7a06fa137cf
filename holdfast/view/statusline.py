"""Draws the status line of `holdfast run` and `holdfast up`: where the job is, in one line.

It runs in a process of its own beside the launcher, follows the journal like every viewer, and is
nobody's concern when it dies. How a line can stay at the bottom of a terminal that others write to is
told in `terminal_line.py`; this module knows what the line says and when it is drawn: twice a second
at most, and only while the job is in the foreground of its terminal, since otherwise the row below the
output is the prompt of a shell.
"""

from __future__ import annotations

import asyncio
import os
import signal

from rich.cells import cell_len, set_cell_size

from holdfast import kernel
from holdfast.jobhome import JobHome
from holdfast.messages.reports import GoodputReport, StatusReport
from holdfast.terminal_line import TerminalLine
from holdfast.view.follower import Follower
from holdfast.view.wording import loss, percent, plain, speed

DRAW_EVERY_S = 0.5
LOOK_EVERY_S = 1.0
"""The line is drawn anew this often even if nothing was written down: time goes on."""
FEWEST_COLUMNS = 20
NICENESS = 10
_DIM, _BOLD = "\x1b[2m", "\x1b[1m"


def run_status_line(home: JobHome, line: TerminalLine, launcher_pid: int) -> int:
    """Draw the status line until the launcher ends this process, or is gone."""
    kernel.name_process("holdfast-line")
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        return 0
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    kernel.unblock_signals()
    home.leave()
    os.nice(NICENESS)
    asyncio.run(_draw(home, line, os.getpgid(launcher_pid)))
    return 0


async def _draw(home: JobHome, line: TerminalLine, group: int) -> None:
    follower = Follower.from_now(home)
    line.tidy()
    while True:
        follower.catch_up()
        shown = ""
        if follower.opened and _in_foreground(group):
            columns = os.get_terminal_size(2).columns
            shown = status_line(follower.status(), follower.goodput(), columns - 1)
        line.page.set_line(f"{_DIM}{shown}".encode() if shown else b"")
        line.show()
        await asyncio.sleep(DRAW_EVERY_S)
        try:
            await asyncio.wait_for(follower.follow(), LOOK_EVERY_S - DRAW_EVERY_S)
        except asyncio.TimeoutError:
            pass


def _in_foreground(group: int) -> bool:
    """Return whether this group of processes has the terminal; True where no shell shares it out."""
    try:
        return os.tcgetpgrp(2) == group
    except OSError:
        return True


def status_line(status: StatusReport, goodput: GoodputReport, columns: int) -> str:
    """Say where the job is in as many columns at most; nothing if that is too few."""
    if columns < FEWEST_COLUMNS:
        return ""
    parts = [f"holdfast: {_doing(status)}"]
    if status.steps_per_s:
        parts.append(f"{speed(status.steps_per_s)} steps/s")
    if status.loss is not None:
        parts.append(f"loss {loss(status.loss)}")
    if status.step:
        parts.append(f"goodput {percent(goodput.goodput)}")
    if status.suspicion is not None:
        parts.append(plain(status.suspicion.line))
    elif status.last_incident:
        parts.append(plain(status.last_incident))
    return fitting(" · ".join(parts), columns)


def _doing(status: StatusReport) -> str:
    if status.state == "gathering":
        return f"waiting for nodes, {len(status.nodes)} joined"
    if status.state in ("stopping", "ending"):
        return f"{status.state} at step {status.step:,}"
    if status.state == "running" and not status.step:
        return f"starting {status.world_size} ranks"
    if status.no_step_s is not None:
        return f"step {status.step:,}, none for {status.no_step_s:.0f} s"
    return f"step {status.step:,}"


def fitting(text: str, columns: int) -> str:
    """Cut a text to a number of columns, with a mark that it goes on."""
    return text if cell_len(text) <= columns else set_cell_size(text, columns - 1) + "…"
