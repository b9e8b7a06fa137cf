"""Processes that stand still in a chosen way, for tests to look at."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0

HERE = """
import os as _os
def here(): _os.write(2, b"here\\n")
"""
"""What a puppet's script calls when it is where the test wants it."""


class Puppet:
    def __init__(self, script: str, args: Sequence[str] = (), fds: Sequence[int] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, *args],
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            pass_fds=tuple(fds),
            start_new_session=True,
        )
        self.pid = self._process.pid

    def arrive(self) -> None:
        """Wait until the script has called `here`, and a moment longer."""
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        assert line == b"here\n", (line + self._process.stderr.read()).decode()
        time.sleep(0.1)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)
        time.sleep(0.05)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Whatever it does, it ends, with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(10)
        for pipe in (self._process.stderr, self._process.stdin):
            if pipe is not None:
                pipe.close()


def puppet_of(*parts: str, args: Sequence[str] = (), fds: Sequence[int] = ()) -> Puppet:
    return Puppet("\n".join([HERE, *map(textwrap.dedent, parts)]), args, fds)


def wait_for(found: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first true answer; a failed test when there is none in time."""
    deadline = time.monotonic() + patience_s
    while not (answer := found()):
        assert time.monotonic() < deadline, f"waited {patience_s:g} s in vain for {what}"
        time.sleep(0.01)
    return answer
