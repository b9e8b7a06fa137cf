"""A process whose script raised has time to end, while something of it moves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import proc
from holdfast.agent.teardown import LIMIT_S, LOOK_EVERY_S, STILL_LOOKS, Teardown, footprint_of

STILL_S = LOOK_EVERY_S * STILL_LOOKS


class GivenTimers:
    """An event loop's clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], object], asyncio.TimerHandle]] = []
        self._loop = asyncio.new_event_loop()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(delay, callback, (), self._loop)
        self._due.append((self.now + delay, callback, handle))
        return handle

    def until(self, at: float) -> None:
        while self._due and self._due[0][0] <= at:
            self.now, callback, handle = self._due.pop(0)
            if not handle.cancelled():
                callback()
        self.now = at

    def close(self) -> None:
        self._loop.close()


@pytest.fixture
def timers() -> Any:
    made = GivenTimers()
    yield made
    made.close()


class Ended:
    """One process of which a test says what moves."""

    def __init__(self, timers: GivenTimers, moves: Callable[[float], bool]) -> None:
        self.why: list[str] = []
        self._timers, self._moves = timers, moves
        self._count = 0
        self.teardown = Teardown(1, self.why.append, self._footprint, timers)

    def _footprint(self, pid: int) -> int:
        self._count += self._moves(self._timers.now)
        return self._count


def test_one_that_still_moves_is_left_alone_for_a_minute(timers: GivenTimers) -> None:
    one = Ended(timers, lambda now: True)
    timers.until(LIMIT_S - 1)
    assert one.why == []
    timers.until(LIMIT_S + 1)
    assert one.why == ["it is still busy after 60 s"]
    timers.until(10 * LIMIT_S)
    assert len(one.why) == 1


def test_one_that_does_not_move_is_ended_after_ten_looks(timers: GivenTimers) -> None:
    one = Ended(timers, lambda now: now < 20)
    timers.until(20 + STILL_S - 2)
    assert one.why == []
    timers.until(20 + STILL_S)
    assert one.why == ["nothing of it has moved for 10 s"]


def test_one_that_moves_now_and_then_is_not_ended_for_standing_still(timers: GivenTimers) -> None:
    one = Ended(timers, lambda now: now % 9 == 0)
    timers.until(LIMIT_S - 1)
    assert one.why == []


def test_one_that_has_exited_is_not_looked_at_any_more(timers: GivenTimers) -> None:
    one = Ended(timers, lambda now: False)
    one.teardown.close()
    timers.until(10 * LIMIT_S)
    assert one.why == []


WORKING = """
import os, sys, time
{start}
print("ready", flush=True)
for _ in sys.stdin:
    {work}
    print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("start", "work"),
    [
        ("", "sum(range(100_000))"),
        ("file = os.open('written', os.O_CREAT | os.O_WRONLY)", "os.write(file, b'x')"),
        (
            "import subprocess as s; child = s.Popen(['cat'], stdin=s.PIPE, stdout=s.PIPE)",
            "child.stdin.write(b'x\\n'); child.stdin.flush(); child.stdout.readline()",
        ),
    ],
    ids=["computes", "writes", "has a child that works"],
)
def test_whatever_a_process_does_leaves_its_footprint(tmp_path: Any, start: str, work: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKING.format(start=start, work=work)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        until_it_waits(process.pid)
        before = footprint_of(process.pid)
        assert footprint_of(process.pid) == before
        print("go", file=process.stdin, flush=True)
        assert process.stdout.readline() == "done\n"
        assert footprint_of(process.pid) != before
    finally:
        process.stdin.close()
        process.wait(10)


def until_it_waits(pid: int) -> None:
    """Return once the process has nothing to do but to wait for its standard input."""
    before = None
    while proc.system_call(pid, pid) != "read" or footprint_of(pid) != before:
        before = footprint_of(pid)
        os.sched_yield()


def test_a_look_that_raises_is_not_the_last_one(timers: GivenTimers) -> None:
    why: list[str] = []
    looks = [0]

    def footprint(pid: int) -> object:
        looks[0] += 1
        if looks[0] == 2:
            raise OSError("it cannot be read")
        return 0

    Teardown(1, why.append, footprint, timers)
    with pytest.raises(OSError, match="cannot be read"):
        timers.until(STILL_S)
    timers.until(2 * STILL_S + LOOK_EVERY_S)
    assert why == [f"nothing of it has moved for {STILL_S:g} s"]
