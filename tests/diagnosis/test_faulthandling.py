"""faulthandler's text is parsed whatever is in it, and a process is asked only if it listens."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from puppets import Puppet, wait_for

from holdfast.diagnosis import faulthandling
from holdfast.messages.evidence import Frame, ThreadStack

ARMED = """
    import os, sys
    from holdfast.diagnosis import faulthandling
    faulthandling.arm(int(sys.argv[1]))
"""

HOLDING = """
    import ctypes
    usleep = ctypes.PyDLL(None).usleep
    def stand():
        while True: usleep(60_000_000)
"""
"""The signal ends a sleep in C, so it sleeps again."""

words = st.text(
    st.characters(blacklist_characters="\n\r", blacklist_categories=["Cs"]), min_size=1, max_size=30
)
frame_lists = st.lists(st.tuples(words, st.integers(0, 99_999), words), max_size=20)


def written(name: str, frames: list[tuple[str, int, str]]) -> str:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return "\n".join([f"{name} (most recent call first):", *lines, ""])


@given(others=st.lists(frame_lists, max_size=5), main=frame_lists)
def test_what_faulthandler_writes_comes_back(
    others: list[list[tuple[str, int, str]]], main: list[tuple[str, int, str]]
) -> None:
    heads = [f"Thread 0x{n:016x}" for n in range(len(others))]
    text = "\n".join(written(*each) for each in zip(heads, others, strict=True))
    found = faulthandling.parse(text + "\n" + written("Current thread 0x00007f00deadbeef", main))
    assert [[(f.file, f.line, f.function) for f in thread.frames] for thread in found] == [
        *others,
        main,
    ]


@given(text=st.text(max_size=500))
def test_any_text_can_be_parsed(text: str) -> None:
    faulthandling.parse(text)
    faulthandling.parse(f"Current thread 0x1 (most recent call first):\n{text}")


def test_the_words_of_newer_pythons_are_understood() -> None:
    text = (
        "Thread 0x00007f1 [loader] (most recent call first):\n  <no Python frame>\n\n"
        "Current thread 0x00007f2 [python] (most recent call first):\n  Garbage-collecting\n"
        '  File "a.py", line ??? in f\n  ...\n'
    )
    assert faulthandling.parse(text) == (
        ThreadStack(name="loader"),
        ThreadStack(name="MainThread", frames=(Frame(file="a.py", line=0, function="f"),)),
    )


def ask(puppet: Puppet, fd: int, limit_s: float = 60.0) -> tuple[ThreadStack, ...]:
    return faulthandling.parse(asyncio.run(faulthandling.ask(puppet.pid, fd, limit_s)))


@pytest.fixture
def fd() -> int:
    return os.memfd_create("told")


@pytest.mark.parametrize(
    "hang",
    [
        "import time\ndef stand(): time.sleep(60)",
        HOLDING,
        "def stand():\n    while True: pass",
    ],
    ids=["sleeping", "holding the GIL", "busy"],
)
def test_a_process_tells_where_it_is(puppet: Callable[..., Puppet], fd: int, hang: str) -> None:
    told = puppet(ARMED, hang, "here()\nstand()", args=[str(fd)], fds=[fd])
    for _ in range(2):
        (main,) = ask(told, fd)
        assert (main.name, main.frames[0].function) == ("MainThread", "stand")
    assert told.is_alive()


def test_a_process_that_does_not_listen_is_not_harmed(
    puppet: Callable[..., Puppet], fd: int
) -> None:
    deaf = puppet("import time\nhere()\ntime.sleep(60)")
    assert ask(deaf, fd) == ()
    assert deaf.is_alive()


def test_a_stopped_process_is_not_asked(puppet: Callable[..., Puppet], fd: int) -> None:
    stopped = puppet(ARMED, "import time\nhere()\ntime.sleep(60)", args=[str(fd)], fds=[fd])
    stopped.send(signal.SIGSTOP)
    began = time.monotonic()
    assert ask(stopped, fd, limit_s=60.0) == ()
    assert time.monotonic() - began < 30


def test_a_process_that_is_gone_has_nothing_to_say(fd: int) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert asyncio.run(faulthandling.ask(gone.pid, fd, 1.0)) == ""


def test_a_crash_leaves_the_python_line_it_came_from(
    puppet: Callable[..., Puppet], fd: int
) -> None:
    crash = "def broken():\n    here()\n    os.abort()"
    crashed = puppet(ARMED, crash, "broken()", args=[str(fd)], fds=[fd])
    wait_for(lambda: not crashed.is_alive(), "the crash")
    text = faulthandling.crash(fd)
    assert text.startswith("Fatal Python error: Aborted")
    (main,) = faulthandling.parse(text)
    assert main.frames[0].function == "broken"


def test_stacks_that_were_asked_for_are_no_crash(puppet: Callable[..., Puppet], fd: int) -> None:
    hang = "import time\ndef stand(): time.sleep(60)"
    told = puppet(ARMED, hang, "here()\nstand()", args=[str(fd)], fds=[fd])
    assert ask(told, fd)
    assert faulthandling.crash(fd) == ""
