"""A thread in each worker that beats, and observes what the training thread is doing.

Ten times a second it needs the GIL. While it gets it, Python runs; when beats stop although the
process is not stopped, another thread keeps the GIL. With each beat it looks at the innermost
frames of the training thread: one that waits in a collective is told from one that sleeps somewhere
else, and one that is busy in many places (an evaluation that Holdfast knows nothing of) from one
that stands still.

It also does what can only be done from within and must not wait for the main thread: dump the
flight recorder.
"""

from __future__ import annotations

import _thread
import os
import sys
import time
import zlib
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from holdfast import kernel
from holdfast.core.hangs.deadlines import BEAT_EVERY_S
from holdfast.diagnosis.frames import forwards, is_collective
from holdfast.messages.hangs import LINES
from holdfast.shm.vital_signs import IN_BACKWARD, IN_COLLECTIVE, NO, Vitals

_MAX_DEPTH = 8
_ENGINE = "_engine_run_backward"


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
        self._marks = 0
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
            time.sleep(BEAT_EVERY_S)

    def look(self, frame: FrameType | None, now: float) -> None:
        """Note where the training thread is; None if it has ended."""
        if self._vitals.marks != self._marks:
            self._marks = self._vitals.marks
            self._seen.clear()
        if frame is None:
            self._vitals.beat(now, NO, len(self._seen), 0)
            return
        self._seen.add(frame.f_code)
        self._vitals.beat(now, waits(frame), len(self._seen), _place(frame))


def waits(frame: FrameType) -> int:
    """Return whether a thread at this frame waits for other ranks (NO, IN_COLLECTIVE, IN_BACKWARD).

    A wait for a GPU cannot be seen: the line may be any, and other ranks may be the reason or not.
    """
    inner: FrameType | None = frame
    for _ in range(_MAX_DEPTH):
        if inner is None:
            return NO
        code = inner.f_code
        if code.co_name == _ENGINE:
            return NO if uses_device() else IN_BACKWARD
        if not forwards(code.co_filename):
            return IN_COLLECTIVE if is_collective(code.co_filename) else NO
        inner = inner.f_back
    return NO


def uses_device() -> bool:
    """Return whether this process has started to use a GPU."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _place(frame: FrameType) -> int:
    """Return a number for the line, the same on every node wherever the script lies there."""
    name = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}"
    return zlib.crc32(name.encode(errors="replace")) * LINES + (frame.f_lineno or 0) % LINES
