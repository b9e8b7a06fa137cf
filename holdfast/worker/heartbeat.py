"""A thread that beats, and looks at what the training thread is doing.

Ten times a second it asks for the interpreter's lock. As long as it gets it, Python runs; when beats
stop although the process is not stopped, somebody holds the lock and does not let go. It looks at the
innermost frames of the thread that trains: one that waits in a collective is told from one that sleeps
somewhere else, and one that is busy in many places (an evaluation that we know nothing of) from one
that stands still.

It also does what can only be done from within and must not wait for the main thread: dump the flight
recorder.
"""

from __future__ import annotations

import _thread
import os
import re
import sys
import time
import zlib
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from holdfast import kernel
from holdfast.messages.hangs import LINES
from holdfast.shm.vital_signs import IN_BACKWARD, IN_COLLECTIVE, NO, Vitals

BEAT_EVERY_S = 0.1
_LOOK_DEEP = 8
_ENGINE = "_engine_run_backward"
_COLLECTIVE = re.compile(
    r"/torch/distributed/(?!checkpoint/|elastic/)|/torch/nn/parallel/distributed\.py$"
    r"|/holdfast/worker/(requests|waits)\.py$"
)
_TRANSPARENT = re.compile(
    r"/torch/(_ops|_compile)\.py$|/torch/utils/_contextlib\.py$|/threading\.py$"
    r"|/holdfast/worker/channel\.py$"
)
"""Code that only hands a call on; who called it says what is waited for."""


class Pulse:
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
        """A bare thread: the script, which may list its threads, has not started it."""
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        kernel.name_process("holdfast-pulse")  # Of a thread, only that thread.
        while os.getpid() == self._pid:
            frame = sys._current_frames().get(self._vitals.trainer)
            self.look(frame, time.monotonic())
            del frame
            if self._vitals.dump_wanted:
                self._vitals.dumped()
                self._dump_or_not()
            self._each_beat()
            time.sleep(BEAT_EVERY_S)

    def _dump_or_not(self) -> None:
        try:
            self._dump()
        except (
            Exception
        ):  # Torch's recorder is not ours. The agent notes that there is no dump; but
            pass  # beats that end would look as if somebody held the interpreter's lock.

    def look(self, frame: FrameType | None, now: float) -> None:
        """Note where the training thread is; None when it is nowhere any more."""
        if self._vitals.marks != self._marks:
            self._marks = self._vitals.marks
            self._seen.clear()
        if frame is None:
            self._vitals.beat(now, NO, len(self._seen), 0)
            return
        self._seen.add(frame.f_code)
        self._vitals.beat(now, waits(frame), len(self._seen), _place(frame))


def waits(frame: FrameType) -> int:
    """Whether a thread that stands here waits for other ranks.

    A wait for a GPU is none that can be seen: the line may be any, and others may be the reason or not.
    """
    inner: FrameType | None = frame
    for _ in range(_LOOK_DEEP):
        if inner is None:
            return NO
        code = inner.f_code
        if code.co_name == _ENGINE:
            return NO if uses_device() else IN_BACKWARD
        if _COLLECTIVE.search(code.co_filename):
            return IN_COLLECTIVE
        if not _TRANSPARENT.search(code.co_filename):
            return NO
        inner = inner.f_back
    return NO


def uses_device() -> bool:
    """Whether this process has begun to use a GPU."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _place(frame: FrameType) -> int:
    """A number for the line; the same on every node, wherever the script lies there."""
    name = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}"
    return zlib.crc32(name.encode(errors="replace")) * LINES + (frame.f_lineno or 0) % LINES
