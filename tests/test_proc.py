"""What the kernel says of a thread, read from real ones."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from holdfast import kernel, proc
from holdfast.proc import Effort, effort, process_state

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
