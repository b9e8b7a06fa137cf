"""A process that was to be stopped for a time is continued after it, however late it stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from holdfast import proc
from holdfast.agent.fault_injector import WAKE

PATIENCE_S = 60.0


def until(found: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_a_process_that_stops_late_is_continued_all_the_same(late_s: float) -> None:
    with subprocess.Popen(["sleep", "600"]) as stopped:
        try:
            wake = WAKE.format(pid=stopped.pid, seconds=0.1)
            with subprocess.Popen(["sh", "-c", wake]) as waking:
                time.sleep(late_s)
                os.kill(stopped.pid, signal.SIGSTOP)
                until(lambda: waking.poll() is not None, "the end of the stop")
            until(lambda: proc.process_state(stopped.pid) == "S", "the process to go on")
        finally:
            stopped.kill()


def test_nobody_waits_for_a_process_that_is_gone() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    wake = WAKE.format(pid=gone.pid, seconds=0.0)
    subprocess.run(["sh", "-c", wake], check=False, stderr=subprocess.DEVNULL, timeout=PATIENCE_S)
