"""Runs probes, each against a deadline.

A probe is a process that runs checks; those that may hang together wait in one queue for one probe. A
probe that does not answer in time is killed, and the rest of its queue is not asked at that look. One
that cannot be killed, because it hangs in the kernel, is left alone, and its queue stays closed until
it is gone: on a mount that hangs for days no second process piles up behind the first.

A probe that something else killed is started again, once, and asked again. (A check of the user is
not: that it dies may be its answer.)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from operator import methodcaller

import msgspec

from holdfast import proc
from holdfast.health.catalogue import HealthCheck
from holdfast.health.judgement import Judgement, Question, encode_line, unknown

START_S = 60.0
"""Time for a probe to start; a busy machine may be slow, and no check is to blame for that."""

_KILL_S = 0.5
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from holdfast.health.probe import main; main()"

Note = Callable[[HealthCheck, Judgement, float], None]
"""Takes a check, its judgement, and how many seconds it took."""


Talk = Generator[float, bytes | None, None]
"""Yields until when it waits, and is sent a line of the probe, or None at the deadline. EOFError is
thrown in if the probe has died. It returns once all checks have a judgement."""


class Probe:
    """The process, seen from the checker."""

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

    def ask(self, question: Question) -> None:
        line = encode_line(question)
        try:
            taken = os.write(self._in.fileno(), line)
        except (BrokenPipeError, BlockingIOError):
            taken = 0
        if taken < len(line):
            raise EOFError

    def lines(self) -> list[bytes]:
        """Return what it has said since the last call."""
        try:
            part = os.read(self.fileno(), 1 << 20)
        except BlockingIOError:
            return []
        if not part:
            raise EOFError
        *whole, self._rest = (self._rest + part).split(b"\n")
        return whole

    def asleep(self) -> bool:
        """Whether it waits for something other than its turn on a core."""
        return proc.process_state(self.pid) in ("S", "D")

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> str | None:
        """Kill it and all that it started; return how it ended, None if it does not."""
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


class ProbeQueue:
    """A probe, and the checks that wait for it."""

    def __init__(self, keep: bool, question: Callable[[HealthCheck], Question], note: Note) -> None:
        self._keep = keep
        self._question = question
        self._note = note
        self._probe: Probe | None = None
        self._stuck: Probe | None = None
        self._talk: Talk | None = None
        self.until = 0.0

    @property
    def busy(self) -> bool:
        return self._talk is not None

    @property
    def pid(self) -> int | None:
        return self._probe.pid if self._probe else None

    def fileno(self) -> int:
        assert self._probe is not None
        return self._probe.fileno()

    def begin(self, checks: Sequence[HealthCheck], out_of_time: float) -> None:
        """Begin to ask; each check gets a judgement, sooner or later."""
        self._talk = self._ask_all(deque(checks), out_of_time)
        self._go_on(next)

    def on_readable(self) -> None:
        assert self._probe is not None
        try:
            for line in self._probe.lines():
                self._go_on(methodcaller("send", line))
        except EOFError as died:
            self._go_on(methodcaller("throw", died))

    def on_deadline(self) -> None:
        self._go_on(methodcaller("send", None))

    def _go_on(self, resume: Callable[[Talk], float]) -> None:
        if self._talk is not None:
            try:
                self.until = resume(self._talk)
            except StopIteration:
                self._talk = None

    def _ask_all(self, waiting: deque[HealthCheck], out_of_time: float) -> Talk:
        if self._stuck is not None and not self._stuck.gone:
            text = f"an earlier look still hangs in the kernel (process {self._stuck.pid})"
            for check in waiting:
                self._note(check, Judgement(check.silent, text), 0.0)
            return
        self._stuck, retried = None, False
        while waiting:
            check, asked_at = waiting[0], None
            try:
                if self._probe is None:
                    self._probe = Probe()
                    if (yield min(time.monotonic() + START_S, out_of_time)) is None:
                        late = time.monotonic() >= out_of_time
                        slow = f"its process did not start within {START_S:.0f} s"
                        self._skip(waiting, "the time for all checks was over" if late else slow)
                        continue
                asked_at = time.monotonic()
                self._probe.ask(self._question(check))
                line = yield min(asked_at + check.deadline_s, out_of_time)
                found = self._silence(check, asked_at, out_of_time) if line is None else _read(line)
                self._note(waiting.popleft(), found, time.monotonic() - asked_at)
                if line is None:
                    self._skip(waiting, f"{check.name} did not answer")
            except OSError as error:
                self._skip(waiting, f"no process can be started ({error.strerror})")
            except EOFError:
                how, self._probe = self._probe.end() if self._probe else None, None
                if not retried and (asked_at is None or self._keep):
                    retried = True
                elif asked_at is None:
                    self._skip(waiting, f"its process did not start ({how})")
                else:
                    verdict = check.silent if check.kind == "own" else "unknown"
                    death = Judgement(verdict, f"its process died ({how})")
                    self._note(waiting.popleft(), death, time.monotonic() - asked_at)
        if not self._keep:
            self._end_probe()

    def _silence(self, check: HealthCheck, asked_at: float, out_of_time: float) -> Judgement:
        if out_of_time < asked_at + check.deadline_s:
            return unknown("the time for all checks was over before it answered")
        text = f"did not answer within {check.deadline_s:g} s"
        runs = self._probe is not None and not self._probe.asleep() and check.kind != "own"
        if runs and check.silent == "fail":
            return unknown(f"{text}, but it was kept from running")
        where = f" {check.subject}" if check.subject else ""
        return Judgement(check.silent, f"{check.kind}{where} {text}")

    def _skip(self, waiting: deque[HealthCheck], why: str) -> None:
        """End the probe; the checks that wait are not asked at this look."""
        self._end_probe()
        while waiting:
            self._note(waiting.popleft(), unknown(f"not asked: {why}"), 0.0)

    def _end_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None and probe.end() is None:
            self._stuck = probe

    def close(self) -> None:
        """End the probe and forget the checks that wait for it."""
        self._talk = None
        self._end_probe()


def _read(line: bytes) -> Judgement:
    try:
        return msgspec.json.decode(line, type=Judgement)
    except msgspec.DecodeError as error:
        return unknown(f"its answer cannot be read: {error}")
