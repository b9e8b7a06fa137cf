"""What a stack says: where in the user's code a rank is, what it does there, whether it waits.

The innermost frame of the user's own code is where a person has to look; everything inside of it
(torch, the standard library, native code, the system call at the very end) says what the rank does
there. Of a stance, only the sure ones count: "waits" means that it is inside a collective, "elsewhere"
that it certainly is in none, and whatever could be either is "unclear". A rank in `loss.item()` may
wait for a collective on its GPU, so it is never "elsewhere" by its Python stack alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from holdfast.diagnosis.proc import RUNNING
from holdfast.messages.evidence import Frame, RankEvidence, ThreadStack

Stance = Literal["waits", "elsewhere", "unclear"]

KERNEL = "kernel"
"""The file of a frame that is a system call."""

OLD_BEAT_S = 1.25
"""An interpreter whose beat is older than this has not let another thread run for that long. No rank
that hangs is looked at sooner."""

_VERBS = {
    # Up to Python 3.10 time.sleep is a select without files.
    **dict.fromkeys(("nanosleep", "clock_nanosleep", "pause", "select", "pselect6"), "sleeps"),
    **dict.fromkeys(
        ("read", "readv", "pread64", "recvfrom", "recvmsg", "openat", "statx", "newfstatat"),
        "reads",
    ),
    **dict.fromkeys(
        ("write", "writev", "pwrite64", "sendto", "sendmsg", "fsync", "fdatasync"), "writes"
    ),
    **dict.fromkeys(("futex", "poll", "ppoll", "epoll_wait", "epoll_pwait"), "waits"),
    **dict.fromkeys(("wait4", "waitid", "flock", "fcntl", "accept", "accept4", "connect"), "waits"),
    "ioctl": "waits",
    "sched_yield": "computes",
}
_SURE = {"sleeps", "reads", "writes"}
"""A thread that does one of these is not waiting for a collective."""

_LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python\d|^<frozen |/holdfast/(worker|diagnosis)/"
)
_COLLECTIVE_FILE = re.compile(
    r"/torch/distributed/(?!checkpoint/)|/torch/nn/parallel/distributed\.py$"
    r"|/holdfast/worker/(requests|waits)\.py$"
)
_COLLECTIVE_FUNCTION = re.compile(r"\b(c10d|gloo)::|^p?nccl[A-Z_]")
_GPU = re.compile(r"^cuda[A-Z]|^cu[A-Z]|^hip[A-Z]")
_LOCAL_WAIT = re.compile(
    r"/(threading|queue|selectors|subprocess|socket|ssl)\.py$|/(multiprocessing|concurrent)/"
)
_TRANSPARENT = re.compile(
    r"/torch/(_ops|_compile)\.py$|/torch/utils/_contextlib\.py$|/holdfast/worker/channel\.py$"
)
"""Frames that only hand a call on."""


def main_thread(stacks: Sequence[ThreadStack]) -> ThreadStack | None:
    """The thread that trains: the one that is known to, or the main one; else the first."""
    likely = sorted(stacks, key=lambda thread: (not thread.trains, thread.name != "MainThread"))
    return likely[0] if likely else None


def telling_thread(evidence: RankEvidence) -> ThreadStack | None:
    """The thread that explains the rank: the one that holds the GIL for too long, or the main one."""
    main = main_thread(evidence.stacks)
    if (evidence.beat_age_s or 0.0) < OLD_BEAT_S:
        return main
    return next((thread for thread in evidence.stacks if thread.holds_gil), main)


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's code; of anybody's when there is none."""
    python = [frame for frame in frames if not frame.native and frame.file]
    own = (frame for frame in python if not _LIBRARY.search(frame.file))
    return next(own, python[0] if python else next(iter(frames), None))


def verb(thread: ThreadStack) -> str:
    """What a thread does: "sleeps", "reads", "writes", "waits", "computes", or "is" when unknown."""
    call = _system_call(thread.frames)
    if call in _VERBS:
        return _VERBS[call]
    return "computes" if thread.active or call == RUNNING else "is"


def stance(stacks: Sequence[ThreadStack]) -> Stance:
    """Whether a process is inside a collective, as far as its stacks can say."""
    main = main_thread(stacks)
    if main is None:
        return "unclear"
    own = thread_stance(main)
    if own != "waits" and verb(main) == "waits":
        # It may wait for a thread of its own, which waits in a collective.
        others = [thread_stance(thread) for thread in stacks if thread is not main]
        return "waits" if "waits" in others else own
    return own


def thread_stance(thread: ThreadStack) -> Stance:
    """The same of one thread."""
    native, python = _innermost(thread.frames)
    if any(_COLLECTIVE_FUNCTION.search(frame.function) for frame in native):
        return "waits"
    if python is None:
        return "unclear"
    if _COLLECTIVE_FILE.search(python.file):
        return "waits"
    if verb(thread) in _SURE or _LOCAL_WAIT.search(python.file):
        return "elsewhere"
    if any(_GPU.search(frame.function) for frame in native):
        return "unclear"
    if thread.holds_gil:
        return "elsewhere"  # Torch waits without it.
    return "elsewhere" if any(frame.file != KERNEL for frame in native) else "unclear"


def _innermost(frames: Sequence[Frame]) -> tuple[list[Frame], Frame | None]:
    """The native frames at the very end, and the Python frame that called into them."""
    native = []
    for frame in frames:
        if frame.native:
            native.append(frame)
        elif frame.file and not _TRANSPARENT.search(frame.file):
            return native, frame
    return native, None


def _system_call(frames: Sequence[Frame]) -> str:
    return frames[0].function if frames and frames[0].file == KERNEL else ""
