"""A thread in each worker that beats, and observes what the training thread is doing.

Ten times a second it needs the GIL. While it gets it, Python runs; when beats stop although the
process is not stopped, another thread keeps the GIL. With each beat it looks at the innermost frames of
the training thread: one that waits in a collective is told from one that waits for its data loader, and
from one that is anywhere else. If the thread stays between two marks, the line of the user's code is
noted for people, and the timeout of the process group that it waits in.

It also does what can only be done from within and must not wait for the main thread: dump the
flight recorder, and stop the process (SIGSTOP) when the lease on the rank is over, in case the agent
cannot: see `agent.lease`.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any

from holdfast import kernel
from holdfast.core.hangs.deadlines import BEAT_EVERY_S
from holdfast.diagnosis.frames import (
    awaits_loader,
    forwards,
    is_collective,
    is_library,
    place_name,
    waits_locally,
)
from holdfast.shm.vital_signs import IN_BACKWARD, IN_COLLECTIVE, IN_LOADER, NO, Vitals

_MAX_DEPTH = 8
_ENGINE = "_engine_run_backward"
_WORDS = 1 << 63


class Heartbeat:
    """The beating thread; `each_beat` runs on it after every beat."""

    def __init__(
        self,
        vitals: Vitals,
        dump: Callable[[], None],
        each_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._vitals = vitals
        self._dump = dump
        self._each_beat = each_beat
        self._seen: set[CodeType] = set()
        self._library: dict[CodeType, bool] = {}
        """Which code is not the user's."""
        self._marks = 0
        self._place: tuple[CodeType, int, int] | None = None
        """Code and line of the place that is noted, and what is waited for there."""
        self._pid = os.getpid()

    def start(self) -> None:
        """Start a bare thread, which the script does not find among its own."""
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        kernel.name_process("holdfast-beat")  # Names this thread only.
        while os.getpid() == self._pid:
            frame = sys._current_frames().get(self._vitals.trainer)
            self.look(frame, time.monotonic())
            del frame
            if self._vitals.dump_wanted:
                self._vitals.dumped()
                try:
                    self._dump()
                except Exception:
                    # Torch's recorder may fail in its own ways. The agent notes that there is no dump;
                    # but beats that ended would look as if another thread kept the GIL.
                    pass
            self._each_beat()
            if self._vitals.lease_is_over(time.monotonic()):
                os.kill(self._pid, signal.SIGSTOP)
            time.sleep(BEAT_EVERY_S)

    def look(self, frame: FrameType | None, now: float) -> None:
        """Note where the training thread is; None if it has ended."""
        vitals, marks = self._vitals, self._vitals.marks
        moved_on, self._marks = marks != self._marks, marks
        if moved_on:
            self._seen.clear()
            self._place = None
        if frame is None:
            vitals.beat(now, NO, len(self._seen))
            vitals.note_place("", marks)
            return
        self._seen.add(frame.f_code)
        found = waits(frame)
        vitals.beat(now, found, len(self._seen), _line(frame))
        if not moved_on:
            self._note_place(frame, found, marks)

    def _note_place(self, frame: FrameType, found: int, marks: int) -> None:
        """Note where a thread is that was between the same two marks at the last beat."""
        inner: FrameType | None = frame
        while inner is not None and self._is_library(inner.f_code):
            inner = inner.f_back
        place = None if inner is None else (inner.f_code, inner.f_lineno or 0, found)
        if place is not None and place == self._place:
            return
        self._place = place
        self._vitals.note_place("" if place is None else place_name(*place[:2]), marks)
        if found == IN_COLLECTIVE:
            self._vitals.note_group_timeout(group_timeout_s(frame))

    def _is_library(self, code: CodeType) -> bool:
        found = self._library.get(code)
        if found is None:
            found = self._library[code] = is_library(code.co_filename)
        return found


def waits(frame: FrameType) -> int:
    """Return what a thread at this frame waits for (NO, IN_COLLECTIVE, IN_BACKWARD, IN_LOADER).

    A wait for a GPU cannot be seen: the line may be any, and other ranks may be the reason or not.
    """
    inner = _first(frame, lambda code: not forwards(code.co_filename))
    if inner is not None and inner.co_name == _ENGINE:
        return NO if uses_device() else IN_BACKWARD
    if inner is not None and is_collective(inner.co_filename):
        return IN_COLLECTIVE
    inner = _first(frame, lambda code: not waits_locally(code.co_filename))
    loads = inner is not None and awaits_loader(inner.co_filename, inner.co_name)
    return IN_LOADER if loads else NO


def _first(frame: FrameType | None, wanted: Callable[[CodeType], bool]) -> CodeType | None:
    """Return the innermost wanted code, if it is not far out."""
    for _ in range(_MAX_DEPTH):
        if frame is None:
            return None
        if wanted(frame.f_code):
            return frame.f_code
        frame = frame.f_back
    return None


def uses_device() -> bool:
    """Return whether this process has started to use a GPU."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def group_timeout_s(frame: FrameType) -> float:
    """Return the timeout of the default process group, or of the one that the thread is creating; 0 if
    unknown."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        group = c10d._world.default_pg
        timeout = _timeout_of(group) if group is not None else _initial_timeout(frame, c10d)
        return timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
    except Exception:  # Torch's internals, which may change; the flight recorder may still know.
        return 0.0


def _timeout_of(group: Any) -> object:
    backends = [group._get_backend(device) for device in group._device_types]
    return min(backend.options._timeout for backend in backends)


def _initial_timeout(frame: FrameType | None, c10d: Any) -> object:
    """Return the timeout argument of `init_process_group`, which a decorator of torch's wraps."""
    while frame is not None and (
        frame.f_code.co_name != "init_process_group" or not is_collective(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    said = frame.f_locals.get("timeout") if frame is not None else None
    return said if said is not None else c10d.default_pg_timeout


def _line(frame: FrameType) -> int:
    """Return a number for where a thread is, which changes when it moves."""
    return hash((frame.f_code, frame.f_lasti)) % _WORDS or 1
