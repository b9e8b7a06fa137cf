"""Bytes that are copied past the cache arrive as they were, and nothing beside them changes."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.checkpoint.memory import streaming

ROOM = 64
"""Bytes on each side that have to stay as they are."""
NOISE = os.urandom(1 << 16)


def address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@given(
    size=st.integers(0, 2000) | st.integers(0, len(NOISE) - 256),
    source_at=st.integers(0, 130),
    target_at=st.integers(0, 130),
)
@example(size=0, source_at=0, target_at=0)
@example(size=127, source_at=1, target_at=0)
@example(size=128, source_at=0, target_at=1)
@example(size=len(NOISE) - 256, source_at=3, target_at=61)
def test_all_of_it_is_copied_and_nothing_else_is_touched(
    size: int, source_at: int, target_at: int
) -> None:
    source = bytearray(NOISE)
    target = bytearray(2 * ROOM + 256 + size)
    streaming.copy(address(target) + ROOM + target_at, address(source) + source_at, size)
    begin = ROOM + target_at
    assert target[begin : begin + size] == source[source_at : source_at + size]
    assert not any(target[:begin])
    assert not any(target[begin + size :])
    assert source == NOISE


def test_other_threads_run_meanwhile() -> None:
    source, target = bytearray(256 << 20), bytearray(256 << 20)
    source[:: 1 << 12] = b"x" * (len(source) >> 12)
    calls, within, seen = 0, False, threading.Event()

    def copy() -> None:
        nonlocal calls, within
        while not seen.is_set():
            calls, within = calls + 1, True
            streaming.copy(address(target), address(source), len(source))
            within = False

    copying = threading.Thread(target=copy)
    copying.start()
    try:
        assert wait_for_turns(lambda: (calls, within)), "nobody had a turn while it copied"
    finally:
        seen.set()
        copying.join()
    assert target == source


def wait_for_turns(look: Callable[[], tuple[int, bool]], most_s: float = 20.0) -> bool:
    """Whether this thread gets many turns during one and the same call."""
    until, turns, call = time.monotonic() + most_s, 0, 0
    while turns < 40 and time.monotonic() < until:
        time.sleep(0)  # With one lock for all, the other thread would have it now.
        now, within = look()
        turns = turns + 1 if within and now == call else 0
        call = now
    return turns == 40


@pytest.mark.skipif(platform.machine() != "x86_64", reason="there is code only for x86-64")
def test_it_is_the_machine_code_that_copies_here() -> None:
    assert streaming._stream is not None


def test_where_no_memory_may_be_made_executable_memcpy_copies() -> None:
    """The kernel can be told to refuse it (prctl), as hardened systems do."""
    script = """
import ctypes, sys
PR_SET_MDWE, NO_EXEC_GAIN = 65, 1
if ctypes.CDLL(None).prctl(PR_SET_MDWE, NO_EXEC_GAIN, 0, 0, 0):
    sys.exit(77)
from holdfast.checkpoint import streaming
assert streaming._stream is None
source, target = bytearray(range(256)) * 9, bytearray(9 * 256)
at = lambda b: ctypes.addressof(ctypes.c_char.from_buffer(b))
streaming.copy(at(target), at(source), len(source))
assert source == target
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    if done.returncode == 77:
        pytest.skip("this kernel cannot be told to refuse it")
    assert done.returncode == 0
