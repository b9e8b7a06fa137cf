"""Asking probes, each against a deadline.

A lane is one probe and the checks that wait for it. A probe that does not answer in time is killed;
what is left in its lane is not asked at that look. One that cannot even be killed, because it hangs
in the kernel, is left alone and the lane stays closed until it is gone: on a mount that hangs for
days no second process shall pile up behind the first.

A probe that was killed by somebody else is started again, once, and asked again. (The user's own
check is not: that it dies may be its answer.)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from holdfast import proc
from holdfast.health.catalogue import Check
from holdfast.health.exchange import READY, Question, finding_in, written
from holdfast.health.finding import Finding, unknown

START_S = 60.0
"""A busy machine may take its time to start a process; that is nothing a check should be blamed for."""

_KILL_S = 0.5
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from holdfast.health.probe import main; main()"

Tell = Callable[[Check, Finding, float], None]
"""Takes a check, what it found and how many seconds it took."""


class Probe:
    """The process, from this side."""

    def __init__(self) -> None:
        # Isolated, so that no file in the current directory is taken for a module of Python's.
        flags = ["-I", *(["-B"] if sys.dont_write_bytecode else [])]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", _CODE, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        os.set_blocking(self._out.fileno(), False)
        self._rest = b""
        self.pid = self._process.pid

    def fileno(self) -> int:
        return self._out.fileno()

    def ask(self, question: Question) -> bool:
        """False if it does not take the question."""
        line = written(question)
        try:
            return os.write(self._in.fileno(), line) == len(line)
        except (BrokenPipeError, BlockingIOError):
            return False

    def lines(self) -> list[bytes] | None:
        """What it has said since; None when it will say no more."""
        try:
            part = os.read(self.fileno(), 1 << 20)
        except BlockingIOError:
            return []
        if not part:
            return None
        *whole, self._rest = (self._rest + part).split(b"\n")
        return whole

    def asleep(self) -> bool:
        """Whether it waits for something, rather than for its turn on a core."""
        return proc.process_state(self.pid) in ("S", "D")

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> str | None:
        """Kill it and all that it started; how it ended, None if it does not."""
        self._in.close()
        self._out.close()
        ended = self._process.poll()
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        try:
            code = self._process.wait(_KILL_S) if ended is None else ended
        except subprocess.TimeoutExpired:
            return None
        return f"signal {-code}" if code < 0 else f"exit code {code}"


class Lane:
    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._probe: Probe | None = None
        self._stuck: Probe | None = None
        self._ready = False
        self._waiting: deque[Check] = deque()
        self._current: Check | None = None
        self._asked_at = 0.0
        self._asked_twice = False
        self._out_of_time = float("inf")
        self._question: Callable[[Check], Question]
        self._tell: Tell
        self.until = 0.0
        """When its patience ends."""

    @property
    def busy(self) -> bool:
        return self._current is not None or bool(self._waiting)

    @property
    def pid(self) -> int | None:
        return self._probe.pid if self._probe else None

    def fileno(self) -> int:
        assert self._probe is not None
        return self._probe.fileno()

    def begin(
        self,
        checks: Sequence[Check],
        question: Callable[[Check], Question],
        tell: Tell,
        now: float,
        out_of_time: float,
    ) -> None:
        self._question, self._tell, self._out_of_time = question, tell, out_of_time
        self._asked_twice = False
        if self._stuck is not None and not self._stuck.gone:
            for check in checks:
                text = f"an earlier look still hangs in the kernel (process {self._stuck.pid})"
                tell(check, Finding(check.silent, text), 0.0)
            return
        self._stuck = None
        self._waiting = deque(checks)
        self._next(now)

    def _next(self, now: float) -> None:
        """Ask the next question, or start who is to be asked."""
        self._current = None
        if not self._waiting:
            if not self._keep:
                self.close()
            return
        if self._probe is None:
            self._ready = False
            self.until = min(now + START_S, self._out_of_time)
            try:
                self._probe = Probe()
            except OSError as error:
                self._give_up(f"not asked: no process can be started ({error.strerror})")
        elif self._ready:
            check = self._current = self._waiting.popleft()
            self._asked_at = now
            self.until = min(now + check.deadline_s, self._out_of_time)
            if not self._probe.ask(self._question(check)):
                self._died(now)

    def on_readable(self, now: float) -> None:
        assert self._probe is not None
        lines = self._probe.lines()
        if lines is None:
            self._died(now)
        for line in lines or ():
            if line == READY:
                self._ready = True
            elif self._current is not None:
                self._tell(self._current, _understood(line), now - self._asked_at)
            self._next(now)

    def on_deadline(self, now: float) -> None:
        check, probe = self._current, self._probe
        if check is not None and probe is not None:
            waits = probe.asleep() or check.kind == "own"
            self._tell(check, self._silence(check, waits), now - self._asked_at)
            self._give_up(f"not asked: {check.name} did not answer")
        elif now >= self._out_of_time:
            self._give_up("not asked: the time for all checks was over")
        else:
            self._give_up(f"not asked: its process did not start within {START_S:.0f} s")

    def _silence(self, check: Check, waits: bool) -> Finding:
        if self.until < self._asked_at + check.deadline_s:
            return unknown("the time for all checks was over before it answered")
        text = f"did not answer within {check.deadline_s:g} s"
        if not waits and check.silent == "fail":
            return unknown(f"{text}, but it was kept from running")
        where = f" {check.subject}" if check.subject else ""
        return Finding(check.silent, f"{check.kind}{where} {text}")

    def _died(self, now: float) -> None:
        """Its probe ended by itself or by another's hand."""
        check, probe = self._current, self._probe
        self._probe = None
        how = probe.end() if probe else None
        if not self._asked_twice and (check is None or self._keep):
            self._asked_twice = True
            if check is not None:
                self._waiting.appendleft(check)
            self._next(now)
        elif check is None:
            self._give_up(f"not asked: its process did not start ({how})")
        else:
            verdict = check.silent if check.kind == "own" else "unknown"
            self._tell(check, Finding(verdict, f"its process died ({how})"), now - self._asked_at)
            self._next(now)

    def _give_up(self, why: str) -> None:
        """End the probe; whatever waits is not asked at this look."""
        waiting = list(self._waiting)
        self.close()
        for check in waiting:
            self._tell(check, unknown(why), 0.0)

    def close(self) -> None:
        """End the probe and forget what waits for it."""
        self._waiting.clear()
        probe, self._probe, self._current = self._probe, None, None
        if probe is not None and probe.end() is None:
            self._stuck = probe


def _understood(line: bytes) -> Finding:
    try:
        return finding_in(line)
    except msgspec.DecodeError as error:
        return unknown(f"its answer cannot be read: {error}")
