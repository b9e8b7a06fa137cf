"""Timers of torch's own client: an expired one ends its process, a released one does not."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent import file_timer
from holdfast.agent.file_timer import FileTimers, timer_file
from holdfast.errors import JobError

SOON_S = 0.05
LONG_S = 3600.0


class StandingClock:
    """The wall clock, as the test sets it."""

    def __init__(self, now: float) -> None:
        self.now = now

    def time(self) -> float:
        return self.now


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a session, as a rank does."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def line(pid: int, after_s: float, scope: str = "a", number: int = signal.SIGKILL) -> bytes:
    expires = time.time() + after_s if after_s >= 0 else -1
    request = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": expires}
    return json.dumps({**request, "signal": number}).encode() + b"\n"


def serve(path: Path, rank: int, *writes: bytes, until: Callable[[], Any] | None = None) -> None:
    """Serve one rank; each write is made by a client of its own.

    Without `until`, the clock stands still until all is read, and then a minute has passed.
    """

    async def scenario() -> None:
        timers = FileTimers(str(path), lambda: {rank})
        for data in writes:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.write(fd, data)
            os.close(fd)
            while select.select([timers._fd], [], [], 0)[0]:
                await asyncio.sleep(0)
        while until is not None and not until():
            await asyncio.sleep(0.001)
        if until is None:
            file_timer.time.now += 60.0  # type: ignore[attr-defined]
            timers._look()
        timers.close()

    with pytest.MonkeyPatch.context() as patch:
        if until is None:
            patch.setattr(file_timer, "time", StandingClock(time.time()))
        asyncio.run(asyncio.wait_for(scenario(), 60))
    assert not path.exists()


Rank = subprocess.Popen[bytes]


def test_a_process_whose_timer_expires_gets_its_signal(tmp_path: Path, rank: Rank) -> None:
    request = line(rank.pid, SOON_S, number=signal.SIGTERM)
    serve(tmp_path / "pipe", rank.pid, request, until=lambda: rank.poll() is not None)
    assert rank.returncode == -signal.SIGTERM


def test_a_request_may_come_in_pieces(tmp_path: Path, rank: Rank) -> None:
    request = line(rank.pid, SOON_S)
    pieces = request[:9], request[9:]
    serve(tmp_path / "pipe", rank.pid, *pieces, until=lambda: rank.poll() is not None)


@pytest.mark.parametrize(
    "writes",
    [
        lambda pid: [line(pid, SOON_S), line(pid, -1)],
        lambda pid: [line(pid, SOON_S), line(pid, LONG_S)],
        lambda pid: [line(pid, SOON_S, number=0)],
        lambda pid: [b"nonsense\n", b'{"pid": 1}\n', line(pid, LONG_S)],
    ],
    ids=["released", "renewed", "without a signal", "not a timer"],
)
def test_a_process_in_time_is_left_alone(tmp_path: Path, rank: Rank, writes: Any) -> None:
    serve(tmp_path / "pipe", rank.pid, *writes(rank.pid))
    assert rank.poll() is None


def test_a_process_that_belongs_to_no_rank_is_left_alone(tmp_path: Path, rank: Rank) -> None:
    serve(tmp_path / "pipe", os.getpid() + 1_000_000, line(rank.pid, 0))
    assert rank.poll() is None


def test_torchs_own_client_is_understood(tmp_path: Path) -> None:
    from torch.distributed.elastic.timer import FileTimerClient

    async def scenario() -> None:
        timers = FileTimers(str(tmp_path / "pipe"), set)
        client = FileTimerClient(str(tmp_path / "pipe"))
        client.acquire("a", time.time() + LONG_S)
        client.acquire("b", time.time() + LONG_S)
        client.release("a")
        while not timers._timers:
            await asyncio.sleep(0.001)
        ((key, timer),) = timers._timers.items()
        assert (key, timer.signal) == ((os.getpid(), "b"), signal.SIGKILL)
        timers.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_pipe_that_an_earlier_agent_left_is_replaced(tmp_path: Path, rank: Rank) -> None:
    os.mkfifo(tmp_path / "pipe")
    serve(tmp_path / "pipe", rank.pid, line(rank.pid, LONG_S))


def test_a_file_that_is_no_pipe_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("precious")
    with pytest.raises(JobError, match="no pipe can be created"):
        serve(tmp_path / "data", 1)
    assert (tmp_path / "data").read_text() == "precious"


@pytest.mark.parametrize(
    ("environ", "served"),
    [
        ({}, None),
        ({"TORCHELASTIC_TIMER_FILE": "/x"}, None),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}, None),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": "/x"}, "/x"),
    ],
)
def test_timers_are_served_where_the_user_enables_them(
    environ: dict[str, str], served: str | None
) -> None:
    assert timer_file(environ, 7) == served
    enabled = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    assert timer_file(enabled, 7) == timer_file(enabled, 7) != timer_file(enabled, 8)
