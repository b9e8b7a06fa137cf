"""Runs `holdfast top`: keys and events in, frames or lines out.

The screen is drawn when a key was pressed, when the window has another size, when the journal has
something new (at most four times a second), and once a second anyway: time goes on. A coordinator that
was killed and comes back is seen as what it is, since the journal is all that is read. Only the
question why a rank stands where it stands goes to the running job, from a thread: it takes a while.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

from holdfast.config.values import Price
from holdfast.errors import HoldfastError
from holdfast.jobhome import JobHome
from holdfast.messages.units import Seconds
from holdfast.messages.wire import AskWhy, Why
from holdfast.view.follower import Follower
from holdfast.view.top.frame import frame
from holdfast.view.top.keys import keys
from holdfast.view.top.lines import as_json, words
from holdfast.view.top.map import step_of
from holdfast.view.top.screen import Screen
from holdfast.view.top.state import JobNow, Looks, look_at
from holdfast.wire.tls import TlsFiles
from holdfast.wire.visitors import ask

DRAW_EVERY_S: Seconds = 0.25
LINE_EVERY_S: Seconds = 1.0
CATCH_UP_S: Seconds = 0.3
"""Time spent on reading a long journal before keys are looked at again."""
FRAMES_SHOWN = 30


async def print_lines(follower: Follower, json: bool) -> None:
    """Print a line whenever something has changed, one a second at most, until the job is over."""
    printed: object = None
    while True:
        while follower.catch_up(CATCH_UP_S) and follower.behind:
            pass
        view = look_at(follower)
        key = (follower.changes, view.status.state, follower.restarts)
        if key != printed:
            print(as_json(view) if json else words(view), flush=True)
            printed = key
        if view.over:
            return
        await asyncio.sleep(LINE_EVERY_S)
        await _soon(follower.follow(), LINE_EVERY_S)


async def _soon(waiting: object, limit_s: Seconds) -> None:
    try:
        await asyncio.wait_for(waiting, limit_s)  # type: ignore[arg-type]
    except asyncio.TimeoutError:
        pass


class Program:
    """The interactive screen."""

    def __init__(
        self, home: JobHome, follower: Follower, tls: TlsFiles | None, price: Price | None = None
    ) -> None:
        self._home, self._follower, self._tls, self._price = home, follower, tls, price
        self._looks = Looks()
        self._view = look_at(follower, price)
        self._screen = Screen(sys.stdin.fileno(), sys.stdout.fileno())
        self._wake = asyncio.Event()
        self._quit = False
        self._asking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Show the job until the reader has seen enough."""
        loop = asyncio.get_running_loop()
        on: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGWINCH: self._wake.set,
            signal.SIGTSTP: self._suspend,
            signal.SIGINT: self._leave,
            signal.SIGTERM: self._leave,
            signal.SIGHUP: self._leave,
        }
        for number, act in on.items():
            loop.add_signal_handler(number, act)
        loop.add_reader(sys.stdin.fileno(), self._typed)
        self._screen.enter()
        try:
            while not self._quit:
                self._draw()
                await self._pause()
        finally:
            self._screen.leave()
            loop.remove_reader(sys.stdin.fileno())
            for number in on:
                loop.remove_signal_handler(number)

    def _draw(self) -> None:
        if self._follower.catch_up(CATCH_UP_S) or not self._view.over:
            self._view = look_at(self._follower, self._price)
        last = max(0, self._view.ranks - 1)
        self._looks.selected = max(0, min(self._looks.selected, last))
        size = self._screen.size()
        self._screen.paint(frame(self._view, self._looks, *size), size)

    async def _pause(self) -> None:
        """Wait for a key, for events, or for a second."""
        self._wake.clear()
        await _soon(self._wake.wait(), DRAW_EVERY_S)
        if self._wake.is_set() or self._quit or self._follower.behind:
            return
        waits = [asyncio.ensure_future(one) for one in (self._follower.follow(), self._wake.wait())]
        await asyncio.wait(waits, timeout=1.0 - DRAW_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()

    # ---- keys and signals ----

    def _leave(self) -> None:
        self._quit = True
        self._wake.set()

    def _suspend(self) -> None:
        """Give the terminal back for as long as the reader wants it."""
        self._screen.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._screen.enter()
        self._wake.set()

    def _typed(self) -> None:
        try:
            typed = os.read(sys.stdin.fileno(), 1024)
        except OSError:
            typed = b""
        if not typed:  # The terminal is gone.
            self._leave()
        for key in keys(typed):
            self._press(key)
        self._wake.set()

    def _press(self, key: str) -> None:
        looks = self._looks
        if key == "q":
            self._leave()
        elif key in "iw?":
            looks.page = {"i": "incidents", "w": "why", "?": "help"}[key]  # type: ignore[assignment]
            looks.scroll = 0
            if key == "w":
                self._ask_why()
        elif key == "back" and looks.page != "overview":
            looks.page, looks.scroll = "overview", 0
        elif looks.page != "overview":
            self._scroll(key)
        elif self._view.over:
            self._leave()
        else:
            width, height = self._screen.size()
            looks.selected += step_of(self._view, looks, width, height, key)
            if key in ("home", "end"):
                looks.selected = 0 if key == "home" else self._view.ranks - 1

    def _scroll(self, key: str) -> None:
        page = self._screen.size()[1] - 3
        by = {"up": -1, "down": 1, "page up": -page, "page down": page}
        self._looks.scroll += by.get(key, 0)
        if key in ("home", "end"):
            self._looks.scroll = 0 if key == "home" else 1 << 30

    # ---- why ----

    def _ask_why(self) -> None:
        if self._asking is None or self._asking.done():
            self._looks.why = ["asking the job ..."]
            self._asking = asyncio.ensure_future(self._find_why(self._looks.selected))

    async def _find_why(self, rank: int) -> None:
        try:
            found = await asyncio.to_thread(ask, self._home, AskWhy(), Why, self._tls)
            self._looks.why = why_lines(found, rank)
        except HoldfastError as error:
            self._looks.why = [str(error)]
        self._wake.set()


def why_lines(why: Why, rank: int) -> list[str]:
    """Describe where a rank is, and what the examination of all found."""
    lines = [why.suspicion.line] if why.suspicion is not None else []
    lines.append(why.verdict.sentence)
    theirs = [group for group in why.verdict.groups if rank in group.ranks]
    for group in theirs or why.verdict.groups:
        lines += ["", group.headline]
        for one in group.frames[:FRAMES_SHOWN]:
            where = f"{one.file}:{one.line}" if one.line else one.file
            lines.append(f"    {one.function}  {where}")
    return lines


def print_once(view: JobNow, width: int, height: int, json: bool) -> None:
    """Print one frame, without what is below its last line."""
    if json:
        print(as_json(view))
        return
    from rich.console import Console

    *lines, _ = frame(view, Looks(selected=-1), width, height)
    while lines and not lines[-1].plain.strip():
        lines.pop()
    console = Console(highlight=False, width=width)
    for line in lines:
        console.print(line, soft_wrap=True)
