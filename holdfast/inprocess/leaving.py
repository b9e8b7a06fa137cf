"""Makes a thread leave the function that it runs.

`InterruptibleCall.run` calls the function; `leave`, called by any other thread, raises `Departure` in
it. Code may swallow an exception (`except:`, `finally: return`, callbacks whose errors are ignored), so
it is raised again, after pauses that grow, until the function is gone. From then on none is raised,
neither in what follows nor in the next call.

In the main thread a Departure is raised by the handler of a signal that is sent to this thread. That
ends system calls that wait: `time.sleep`, `lock.acquire`, `socket.recv`. In any other thread, and where
the script blocks the signal or took it for itself, it is an asynchronous exception of the interpreter,
which strikes at the next bytecode and interrupts no system call.

Four things are not torn: atomic sections, however long they take; zones, for a moment; shields, which
postpone leaving but not the abort of process groups; and imports, because a module that was half
imported can often not be imported again. Cleaning up after a Departure (`finally`, `__exit__`) is left
in peace for a while too.

Correctness rests on two facts about CPython with a GIL. Exceptions from outside are raised at calls,
at the entry of functions and at backward jumps, never between two assignments. And of two threads that
each write one attribute and then read the other's, one at least reads what the other wrote: so either
`leave` finds the thread in a section, or the thread finds on its way in that it must leave.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from holdfast import proc

P = ParamSpec("P")
T = TypeVar("T")

ZONE_LIMIT_S = 0.05
"""How long the end of a zone is waited for, at least. An optimizer's step may take longer: it is given
three times what zones were seen to take, within what an agent allows for leaving."""
_ZONE_FACTOR, _LONGEST_ZONE_LIMIT_S = 3.0, 0.8
_ZONE_FADE = 0.9
"""How much of the longest zone still counts after another one: the first step of a job is slow."""
SHIELD_LIMIT_S = 1.0
"""No longer than what an agent allows for leaving at least."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.02
"""Short: a loop that catches everything in its `try` is left only by one that strikes outside."""
_CLEANUP_S = 0.25
"""How long the handlers of a Departure may run before the next one."""
_IMPORT_S = 10.0
"""How long an import may take before it is torn after all: it may be the training itself."""
_IMPORT_FILE = "<frozen importlib._bootstrap>"
_FIRST_SIGNAL = signal.SIGRTMAX - 4
"""Those above are other people's favourites: `diagnosis.faulthandling` has one of them."""


class Departure(BaseException):
    """Raised in a restartable function that must be left."""

    def __init__(self, why: str = "") -> None:
        super().__init__(why)
        self.why = why


class InterruptibleCall:
    """A function's call that other threads can end, one after the other.

    `leaving` and `torn` describe the last call until the next begins.
    """

    def __init__(self, zone_limit_s: float = ZONE_LIMIT_S) -> None:
        self._zone_limit_s = zone_limit_s
        self._lock = threading.RLock()
        """Held while a Departure is sent. Reentrant: the script's signal handlers may call `leave`."""
        self._thread = 0
        self._entry = 0
        self._inside = False
        self._why: str | None = None
        self._leave_at = 0.0
        self._raised_at = 0.0
        self._depth = 0
        self._zone = False
        self._zone_at = 0.0
        self._longest_zone_s = 0.0
        self._shielded = False
        self._torn = False
        self._out: SimpleQueue[None] = SimpleQueue()
        self._gone = threading.Event()
        self._signal: _DepartureSignal | None = None
        self._repeater: threading.Thread | None = None

    @property
    def leaving(self) -> str | None:
        """Why the function must be left; what it raises or returns from then on does not count."""
        return self._why

    @property
    def in_atomic(self) -> bool:
        """Whether the function's thread is in an atomic section."""
        return self._depth > 0

    @property
    def torn(self) -> bool:
        """Whether the function was left in a zone, or one was not left in peace."""
        return self._torn

    def renew(self) -> None:
        """Forget the last `leave`: the next one is for the next call."""
        with self._lock:
            self._why = None

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in this thread; raise Departure at once if it is to be left already."""
        self._begin()
        try:
            self._inside = True
            if self._why is not None:
                raise self._departure()
            return function(*args, **kwargs)
        finally:
            self._inside = False
            self._torn = self._torn or self._zone
            # Two may still strike: one that is pending, and one that is being sent now.
            try:
                self._end()
            except Departure:
                try:
                    self._end()
                except Departure:
                    self._end()

    def leave(self, why: str) -> None:
        """Make the function's thread leave it; if it has been left, nothing happens until `renew`."""
        with self._lock:
            if self._why is None:
                self._leave_at = time.monotonic()
                self._why = why
            if self._inside and self._repeater is None:
                self._repeater = threading.Thread(
                    target=self._repeat, name="holdfast-leaving", daemon=True
                )
                self._repeater.start()
                self._strike()  # Last: in the function's own thread it raises here.

    def settle(self, timeout_s: float) -> bool:
        """Wait, after `leave`, until nothing postpones leaving: no atomic section, and no zone or its
        limit has passed. Return whether that is so."""
        deadline = time.monotonic() + timeout_s
        while self._inside and not self._may_strike():
            now = time.monotonic()
            if now >= deadline:
                return False
            until = deadline if self._depth else min(deadline, self._zone_until)
            try:
                self._out.get(timeout=max(0.0, until - now))
            except Empty:
                pass
        return True

    def atomic(self) -> AbstractContextManager[None]:
        """Return a section that is finished before the function is left, or not begun.

        It counts in the function's thread alone; no other thread is ever made to leave.
        """
        return _AtomicSection(self)

    def begin_zone(self) -> None:
        """Postpone leaving until `end_zone`, but not longer than the limit."""
        if threading.get_ident() != self._thread or self._zone:
            return
        self._zone_at = time.monotonic()
        self._zone = True
        if self._why is not None and self._depth == 0 and self._inside:
            self._zone = False
            raise self._departure()

    def end_zone(self) -> None:
        """Raise the Departure that was postponed, if there is one."""
        if threading.get_ident() != self._thread:
            return
        if self._zone:
            took_s = time.monotonic() - self._zone_at
            self._longest_zone_s = max(took_s, _ZONE_FADE * self._longest_zone_s)
        self._zone = False
        if self._why is not None and self._depth == 0 and self._inside:
            self._out.put(None)
            raise self._departure()

    def begin_shield(self) -> None:
        """Postpone leaving until `end_shield`, but not longer than the limit. Process groups are
        aborted meanwhile: what waits for other ranks ends with an error."""
        if threading.get_ident() != self._thread or self._shielded:
            return
        self._shielded = True
        if self._why is not None and self._depth == 0 and not self._zone and self._inside:
            self._shielded = False
            raise self._departure()

    def end_shield(self) -> None:
        """Raise the Departure that was postponed, if there is one."""
        if threading.get_ident() != self._thread or not self._shielded:
            return
        self._shielded = False
        if self._why is not None and self._depth == 0 and not self._zone and self._inside:
            raise self._departure()

    def _begin(self) -> None:
        if self._thread:
            raise RuntimeError(
                "a restartable function was called within another one in this process; "
                "mark only the outermost as restartable"
            )
        self._entry += 1
        self._depth, self._zone, self._shielded, self._torn = 0, False, False, False
        self._out = SimpleQueue()
        self._gone.clear()
        if threading.current_thread() is threading.main_thread():
            self._signal = _DepartureSignal.install(self._on_signal)
        self._thread = threading.get_ident()

    def _end(self) -> None:
        """See to it that nothing strikes any more. May be struck itself, and is then called again."""
        with self._lock:
            pass  # Whoever was sending has sent; nobody begins to.
        _set_asynchronous(self._thread, None)
        if self._signal is not None:
            self._signal.remove()
        self._gone.set()
        self._out.put(None)
        if self._repeater is not None:
            self._repeater.join()
        self._signal = self._repeater = None
        self._depth, self._zone, self._shielded, self._thread = 0, False, False, 0

    def _repeat(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._gone.wait(self._until_next(pause_s)):
            with self._lock:
                if self._inside:
                    self._strike()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _until_next(self, pause_s: float) -> float:
        if self._zone:
            left_s = self._zone_until - time.monotonic()
            return left_s if left_s > 0 else pause_s
        return pause_s

    def _strike(self) -> None:
        if not self._may_strike() or self._shields() or self._cleans_up():
            return
        if self._signal is not None and self._signal.arrives():
            self._signal.send(self._thread)
            return
        kind = _departure_class(self._why or "")
        if not self._spared(sys._current_frames().get(self._thread)):
            self._torn = self._torn or self._zone
            self._raised_at = time.monotonic()
            _set_asynchronous(self._thread, kind)

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        # Much may have happened since it was sent.
        if not self._inside or not self._may_strike() or self._shields():
            return
        if not self._spared(frame):
            self._torn = self._torn or self._zone
            raise self._departure()

    def _spared(self, frame: FrameType | None) -> bool:
        return self._imports(frame) or self._cleans_up()

    def _may_strike(self) -> bool:
        return self._depth == 0 and (not self._zone or time.monotonic() >= self._zone_until)

    def _shields(self) -> bool:
        return self._shielded and time.monotonic() < self._leave_at + SHIELD_LIMIT_S

    @property
    def _zone_until(self) -> float:
        learnt_s = min(_ZONE_FACTOR * self._longest_zone_s, _LONGEST_ZONE_LIMIT_S)
        return self._leave_at + max(self._zone_limit_s, learnt_s)

    def _departure(self) -> Departure:
        self._raised_at = time.monotonic()
        return Departure(self._why or "")

    def _cleans_up(self) -> bool:
        """Return whether a handler of the last Departure runs, and has not had its time."""
        if time.monotonic() >= self._raised_at + _CLEANUP_S:
            return False
        handled = sys._current_exceptions().get(self._thread)
        # A tuple until Python 3.12.
        error: BaseException | None = handled[1] if isinstance(handled, tuple) else handled
        for _ in range(100):
            if error is None or isinstance(error, Departure):
                break
            error = error.__context__
        return isinstance(error, Departure)

    def _imports(self, frame: FrameType | None) -> bool:
        """Return whether the function imports a module, which must not be torn."""
        if time.monotonic() >= self._leave_at + _IMPORT_S:
            return False
        while frame is not None and frame.f_code is not InterruptibleCall.run.__code__:
            if frame.f_code.co_filename == _IMPORT_FILE:
                return True
            frame = frame.f_back
        return False


class _AtomicSection(AbstractContextManager[None]):
    """One use of `InterruptibleCall.atomic`."""

    __slots__ = ("_call", "_entry")

    def __init__(self, call: InterruptibleCall) -> None:
        self._call = call
        self._entry = 0

    def __enter__(self) -> None:
        call = self._call
        if threading.get_ident() != call._thread:
            return
        self._entry = call._entry
        call._depth += 1
        if call._why is not None and call._depth == 1 and call._inside:
            call._depth = 0
            self._entry = 0
            raise call._departure()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        call = self._call
        # A generator may be closed, and its section with it, in a later call.
        if self._entry != call._entry or threading.get_ident() != call._thread:
            return
        call._depth -= 1
        if call._why is not None and call._depth == 0 and call._inside:
            call._out.put(None)
            raise call._departure()


class _DepartureSignal:
    """A real-time signal that nobody used, while a function runs in the main thread."""

    def __init__(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._number = number
        self._handler = handler
        self._before = signal.signal(number, handler)

    @classmethod
    def install(cls, handler: Callable[[int, FrameType | None], None]) -> _DepartureSignal | None:
        """Take the first free number; None if there is none."""
        taken = 0
        for mask in proc.signal_masks(os.getpid()):
            taken |= int(mask or "0", 16)
        numbers = range(_FIRST_SIGNAL, signal.SIGRTMIN - 1, -1)
        free = (number for number in numbers if not taken >> (number - 1) & 1)
        number = next(free, None)
        return None if number is None else cls(number, handler)

    def arrives(self) -> bool:
        """Return whether the main thread would run the handler: the script may have blocked the signal
        or replaced the handler. Where nobody catches it, it would end the process."""
        ours = signal.getsignal(self._number) == self._handler
        return ours and proc.catches(os.getpid(), self._number)

    def send(self, thread: int) -> None:
        signal.pthread_kill(thread, self._number)

    def remove(self) -> None:
        """Take back what was sent and did not arrive, and put the signal as it was before."""
        if signal.getsignal(self._number) == self._handler:
            while signal.sigtimedwait([self._number], 0) is not None:
                pass
            signal.signal(self._number, self._before)  # Runs handlers that are due, first.


def _departure_class(why: str) -> type[Departure]:
    """Return a class that needs no arguments: the interpreter calls it."""

    class Told(Departure):
        def __init__(self) -> None:
            super().__init__(why)

    Told.__name__ = Told.__qualname__ = Departure.__name__
    return Told


def _set_asynchronous(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next bytecode; with None, take back a pending one."""
    raised = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
