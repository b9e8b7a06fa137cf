"""A thread that beats, and looks at what the main thread is doing.

Ten times a second it asks for the interpreter's lock. As long as it gets it, Python runs; when beats
stop although the process is not stopped, somebody holds the lock and does not let go. It looks at the
main thread's frames: a process that waits in a collective is told from one that sleeps somewhere else,
and one that is busy in many places (an evaluation that we know nothing of) from one that stands still.

It also does what can only be done from within and must not wait for the main thread: dump the flight
recorder.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType

from holdfast import kernel
from holdfast.vitals import Vitals

BEAT_EVERY_S = 0.1
_LOOK_DEEP = 12
_WAITING = ("/torch/distributed/", "/torch/cuda/")
_ENGINE = "_engine_run_backward"


class Pulse:
    def __init__(self, vitals: Vitals, dump: Callable[[], None]) -> None:
        self._vitals = vitals
        self._dump = dump
        self._main = threading.main_thread().ident
        self._seen: set[CodeType] = set()
        self._marks = 0
        self._pid = os.getpid()

    def start(self) -> None:
        """A bare thread: the script, which may list its threads, has not started it."""
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        kernel.name_process("holdfast-pulse")  # Of a thread, only that thread.
        while os.getpid() == self._pid:
            frame = sys._current_frames().get(self._main or 0)
            self._look(frame)
            del frame
            if self._vitals.dump_wanted:
                self._vitals.dumped()
                self._dump()
            time.sleep(BEAT_EVERY_S)

    def _look(self, frame: FrameType | None) -> None:
        if self._vitals.marks != self._marks:
            self._marks = self._vitals.marks
            self._seen.clear()
        waits = False
        depth = 0
        top = frame
        while frame is not None and depth < _LOOK_DEEP:
            code = frame.f_code
            waits = waits or _waits(code)
            frame, depth = frame.f_back, depth + 1
        if top is not None:
            self._seen.add(top.f_code)
        self._vitals.beat(time.monotonic(), waits, len(self._seen))


def _waits(code: CodeType) -> bool:
    """Whether somebody who stands here waits for other ranks, or for a device."""
    if code.co_name == _ENGINE:
        return True
    return any(part in code.co_filename for part in _WAITING)
