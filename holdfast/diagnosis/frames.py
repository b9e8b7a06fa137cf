"""Decides what stack frames mean: where in the user's code a rank is, and whether it waits for
others.

The innermost frame of the user's own code is where a person has to look; everything inside of it
(torch, the standard library, native code, the system call at the very end) says what the rank does
there. The worker's heartbeat applies the same rules to its own training thread while it runs, the
verdict applies them to the stacks that an agent took.

Only certain answers count: "yes" means that a thread is inside a collective, "no" that it is in
none, and "unclear" everything else. A rank in `loss.item()` may wait for a collective on its GPU,
so its Python stack alone never makes it a "no".
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Literal

from holdfast.core.hangs.deadlines import OLD_BEAT_S
from holdfast.messages.evidence import Frame, RankEvidence, ThreadStack
from holdfast.proc import RUNNING

InCollective = Literal["yes", "no", "unclear"]

KERNEL = "kernel"
"""The file of a frame that is a system call."""

_VERBS = {
    call: verb
    for verb, calls in {
        # Up to Python 3.10 time.sleep is a select without files.
        "sleeps": "nanosleep clock_nanosleep pause select pselect6",
        "reads": "read readv pread64 recvfrom recvmsg openat statx newfstatat",
        "writes": "write writev pwrite64 sendto sendmsg fsync fdatasync",
        "waits": "futex poll ppoll epoll_wait epoll_pwait wait4 waitid flock fcntl accept accept4"
        " connect ioctl",
        "computes": "sched_yield",
    }.items()
    for call in calls.split()
}
_NOT_IN_COLLECTIVE = {"sleeps", "reads", "writes"}

_COLLECTIVE_FILE = re.compile(
    r"/torch/distributed/(?!checkpoint/|elastic/)|/torch/nn/parallel/distributed\.py$"
    r"|/holdfast/worker/(requests|torch_hooks/waits)\.py$"
)
"""Python code whose callers wait for other ranks."""
_FORWARDING_FILE = re.compile(
    r"/torch/(_ops|_compile)\.py$|/torch/utils/_contextlib\.py$|/threading\.py$"
    r"|/holdfast/worker/(channel|torch_hooks/(patches|imports|pairs))\.py$"
)
"""Python code that only forwards a call; its caller says what is waited for."""
_COLLECTIVE_FUNCTION = re.compile(r"\b(c10d|gloo)::|^p?nccl[A-Z_]")
_GPU_FUNCTION = re.compile(r"^cuda[A-Z]|^cu[A-Z]|^hip[A-Z]")
_LIBRARY_FILE = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python\d|^<frozen "
    r"|/holdfast/(worker|diagnosis|checkpoint|data|frameworks)/"
)
_LOADER_FILE = re.compile(r"/torch/utils/data/dataloader\.py$")
_LOADER_FUNCTIONS = frozenset({"_try_get_data", "_get_data"})
"""Functions in which a data loader waits for its workers."""
_LOCAL_WAIT_FILE = re.compile(
    r"/(threading|queue|selectors|subprocess|socket|ssl)\.py$|/(multiprocessing|concurrent)/"
)


def is_collective(file: str) -> bool:
    """Return whether Python code in this file waits for other ranks."""
    return bool(_COLLECTIVE_FILE.search(file))


def forwards(file: str) -> bool:
    """Return whether Python code in this file only forwards calls."""
    return bool(_FORWARDING_FILE.search(file))


def waits_locally(file: str) -> bool:
    """Return whether Python code in this file waits for another thread or process of this node."""
    return bool(_LOCAL_WAIT_FILE.search(file))


def awaits_loader(file: str, function: str) -> bool:
    """Return whether a function waits for the workers of a data loader."""
    return function in _LOADER_FUNCTIONS and bool(_LOADER_FILE.search(file))


def is_library(file: str) -> bool:
    """Return whether a file is not the user's code: a library, Python itself, or Holdfast."""
    return bool(_LIBRARY_FILE.search(file))


def main_thread(stacks: Sequence[ThreadStack]) -> ThreadStack | None:
    """Return the thread that trains: the one known to, or the main one; else the first."""
    likely = sorted(stacks, key=lambda thread: (not thread.trains, thread.name != "MainThread"))
    return likely[0] if likely else None


def telling_thread(evidence: RankEvidence) -> ThreadStack | None:
    """Return the thread that explains the rank: one that keeps the GIL, or the one that trains."""
    main = main_thread(evidence.stacks)
    if (evidence.beat_age_s or 0.0) < OLD_BEAT_S:
        return main
    return next((thread for thread in evidence.stacks if thread.holds_gil), main)


def place_name(code: CodeType, line: int) -> str:
    """Return a place as people read it: "eval.py:33 (upload)"."""
    return f"{os.path.basename(code.co_filename)}:{line} ({code.co_name})"


def place_of(frame: FrameType | None) -> str:
    """Return the line of the user's code that a running thread is at; empty if there is none."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else place_name(frame.f_code, frame.f_lineno or 0)


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code; of any Python code if there is none."""
    python = [frame for frame in frames if not frame.native and frame.file]
    own = (frame for frame in python if not is_library(frame.file))
    return next(own, python[0] if python else None)


def awaits_its_loader(thread: ThreadStack) -> bool:
    """Return whether a thread waits for the workers of a data loader."""
    return any(awaits_loader(frame.file, frame.function) for frame in thread.frames)


def may_call(thread: ThreadStack) -> bool:
    """Return whether a thread that does not train may still come to call a collective.

    One that waits for work may not, nor one that only runs a library's code which has nothing to do
    with torch: a logger's, a progress bar's.
    """
    python = [frame for frame in thread.frames if not frame.native and frame.file]
    if not python or waits_locally(python[0].file):
        return False
    return any(not is_library(f.file) or "/torch/" in f.file for f in python)


def verb(thread: ThreadStack) -> str:
    """Return what a thread does: "sleeps", "reads", "writes", "waits", "computes"; else "is"."""
    frames = thread.frames
    call = frames[0].function if frames and frames[0].file == KERNEL else ""
    if call in _VERBS:
        return _VERBS[call]
    return "computes" if thread.active or call == RUNNING else "is"


def in_collective(stacks: Sequence[ThreadStack]) -> InCollective:
    """Return whether a process waits in a collective, as far as its stacks tell."""
    main = main_thread(stacks)
    if main is None:
        return "unclear"
    own = thread_in_collective(main)
    if own != "yes" and verb(main) == "waits":
        # It may wait for another thread of its process, which waits in a collective.
        others = (thread_in_collective(thread) for thread in stacks if thread is not main)
        return "yes" if "yes" in others else own
    return own


def thread_in_collective(thread: ThreadStack) -> InCollective:
    """Return whether one thread waits in a collective."""
    python = [frame for frame in thread.frames if not frame.native and frame.file]
    caller = next((frame for frame in python if not forwards(frame.file)), None)
    native = _innermost_native(thread.frames)
    if any(_COLLECTIVE_FUNCTION.search(frame.function) for frame in native):
        return "yes"
    if caller is None:
        return "unclear"
    if is_collective(caller.file):
        return "yes"
    if verb(thread) in _NOT_IN_COLLECTIVE or _LOCAL_WAIT_FILE.search(python[0].file):
        return "no"
    if any(_GPU_FUNCTION.search(frame.function) for frame in native):
        return "unclear"
    if thread.holds_gil:
        return "no"  # Torch waits without it.
    return "no" if any(frame.file != KERNEL for frame in native) else "unclear"


def _innermost_native(frames: Sequence[Frame]) -> list[Frame]:
    """Return the native frames inside the innermost Python frame that does more than forward."""
    native = []
    for frame in frames:
        if frame.native:
            native.append(frame)
        elif frame.file and not forwards(frame.file):
            break
    return native
