"""What the kernel says of a thread, read from real ones."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from holdfast.agent.stall_detector import Activity, WatchedRank
from holdfast.messages.units import Rank
from holdfast.proc import Effort, effort, process_state
from holdfast.shm.vital_signs import BETWEEN, VITALS_BYTES, Vitals

PATIENCE_S = 10.0


def test_processor_time_is_that_of_the_one_thread() -> None:
    """The heartbeat, gloo's threads and a logger's do not make a rank busy."""
    stop = threading.Event()
    other = threading.Thread(target=lambda: all(not stop.is_set() for _ in iter(int, 1)))
    other.start()
    try:
        before = effort(os.getpid(), 0)
        busy = effort(os.getpid(), other.native_id or 0)
        deadline = time.monotonic() + PATIENCE_S
        while effort(os.getpid(), other.native_id or 0).cpu_s < busy.cpu_s + 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert effort(os.getpid(), 0).cpu_s < before.cpu_s + 0.09
    finally:
        stop.set()
        other.join()


def test_bytes_that_a_thread_writes_are_counted(tmp_path: Path) -> None:
    before = effort(os.getpid(), 0)
    (tmp_path / "saved").write_bytes(bytes(1 << 20))
    after = effort(os.getpid(), 0)
    assert after.moved_bytes >= before.moved_bytes + (1 << 20)


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert effort(pid, 0) == Effort()
    assert process_state(pid) == "X"


def test_a_stopped_process_is_seen_to_be_stopped() -> None:
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    try:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert process_state(pid) == "T"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("after", "seconds", "expected"),
    [
        (Effort(3.0, 10), 2.0, Activity(1.0, moved=False)),
        (Effort(1.0, 11), 2.0, Activity(0.0, moved=True)),
        (Effort(3.0, 11), 0.0, Activity(0.0, moved=True)),
    ],
)
def test_what_was_done_lately_is_the_difference(
    after: Effort, seconds: float, expected: Activity
) -> None:
    vitals = Vitals(memoryview(bytearray(VITALS_BYTES)))
    one = WatchedRank(Rank(0), 1, vitals, 0.0, looked_at=50.0, effort=Effort(1.0, 10))
    vitals.mark(BETWEEN, 60.0)
    assert one.activity(vitals.read(), after, 50.0 + seconds) == expected
    assert one.activity(vitals.read(), after, 61.0) == Activity()
