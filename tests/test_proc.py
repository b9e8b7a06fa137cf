"""What the kernel says of a thread, read from real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast import kernel, proc
from holdfast.proc import CpuTime, cpu_time, moved_bytes, process_state

PATIENCE_S = 60.0


def test_processor_time_is_that_of_the_one_thread() -> None:
    """The heartbeat, gloo's threads and a logger's do not make a rank busy."""
    stop = threading.Event()
    other = threading.Thread(target=lambda: all(not stop.is_set() for _ in iter(int, 1)))
    other.start()
    pid, busy = os.getpid(), other.native_id or 0
    try:
        before, began = cpu_time(pid, pid), cpu_time(pid, busy)
        deadline = time.monotonic() + PATIENCE_S
        while cpu_time(pid, busy).ran_ns < began.ran_ns + 100_000_000:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert cpu_time(pid, pid).ran_ns < before.ran_ns + 90_000_000
    finally:
        stop.set()
        other.join()


def test_bytes_that_a_process_and_a_thread_write_are_counted(tmp_path: Path) -> None:
    pid = os.getpid()
    before = moved_bytes(pid), moved_bytes(pid, pid)
    (tmp_path / "saved").write_bytes(bytes(1 << 20))
    assert moved_bytes(pid) >= before[0] + (1 << 20)
    assert moved_bytes(pid, pid) >= before[1] + (1 << 20)


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert cpu_time(pid, pid) == CpuTime()
    assert process_state(pid) == "X"
    assert (proc.threads(pid), proc.thread_name(pid, pid), proc.thread_state(pid, pid)) == (
        [],
        "",
        "",
    )
    assert (moved_bytes(pid), proc.descendants(pid), proc.call(pid, pid).name) == (0, [], "")


def test_descendants_are_found_whichever_thread_started_them() -> None:
    text = """
import subprocess, threading
def start():
    subprocess.run(["sh", "-c", "sleep 100 & wait"])
threading.Thread(target=start).start()
"""
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while len(found := proc.descendants(process.pid)) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert proc.children(process.pid) == found[:1]
            assert proc.children(found[0]) == found[1:]
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("operation", "timeout", "own", "for_a_while"),
    [
        (0x189, 0, True, False),
        (0x80, 0, True, False),
        (0x189, 0x7F00, False, True),
        (0x109, 0, False, False),
        (0x81, 0, False, False),
    ],
    ids=["Python's lock", "pthread's lock", "with a timeout", "shared", "a wake, not a wait"],
)
def test_a_wait_for_an_own_lock_is_told_by_its_arguments(
    operation: int, timeout: int, own: bool, for_a_while: bool
) -> None:
    call = proc.Call("futex", (0x1000, operation, 0, timeout, 0, 0))
    assert (call.waits_for_own_lock, call.waits_for_a_while) == (own, for_a_while)
    assert not proc.Call("read", (0x1000, operation, 0, 0, 0, 0)).waits_for_own_lock
    assert not proc.Call("futex").waits_for_own_lock


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


def test_a_process_whose_name_is_no_text_is_read_like_any_other() -> None:
    pid = os.fork()
    if pid == 0:
        kernel.prctl(kernel.PR_SET_NAME, b"\xff) R (\xfe")
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(pid, os.WUNTRACED)
        assert process_state(pid) == "T"
        assert proc.reaction_to(pid, signal.SIGTERM) == "dies"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_a_signal_would_do_is_read_from_its_masks() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    try:
        for handler, expected in [
            (signal.SIG_DFL, "dies"),
            (signal.SIG_IGN, "ignores"),
            (lambda *_: None, "handles"),
        ]:
            signal.signal(signal.SIGUSR2, handler)
            assert proc.reaction_to(os.getpid(), signal.SIGUSR2) == expected
            assert proc.catches(os.getpid(), signal.SIGUSR2) == (expected == "handles")
    finally:
        signal.signal(signal.SIGUSR2, before)
