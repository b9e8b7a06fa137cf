"""Has a process write its own stacks, where py-spy may not read them.

Before its script runs, a worker arms Python's own faulthandler: a C handler that writes the Python
stacks of all threads to a file when a signal comes. It needs neither the GIL nor an event loop, so
it works while a C call keeps the GIL; it does not work on a stopped process, and it knows no native
frames.

The signal is SIGRTMAX-3. Slurm, Lightning and scripts use SIGUSR1 and SIGUSR2; the C library and
runtimes of other languages take their real-time signals from the low end, and the last few at the
high end are the usual choice of timers. An uncaught signal would end the process, so `ask` first
makes sure that it is caught.

The same handler writes when the process crashes (SIGABRT, SIGSEGV and the like), which is how the
Python line of a native crash is known: gloo, for one, aborts a process that received more than it
expected.

The file is a memory file that agent and worker share. It is never read while it grows: the handler
has finished when the kernel says that the signal is neither pending nor blocked.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import os
import re
import signal
import time

from holdfast import kernel, proc
from holdfast.messages.evidence import Frame, ThreadStack, cut

SIGNAL = signal.SIGRTMAX - 3
MAX_TEXT_BYTES = 4 << 20

_PR_SET_PTRACER = 0x59616D61
_LOOK_EVERY_S = 0.005

_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) 0x(?P<id>[0-9a-fA-F]+)(?: \[(?P<name>.*)\])?"
    r" \(most recent call first\):$"
)
_CRASH = "Fatal Python error: "
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$')


class _Armed:
    """The file that this process writes its stacks to."""

    fd = -1


def arm(fd: int) -> None:
    """In a worker: write all stacks to this file when the signal comes, and when the process crashes.
    The file stays open until another takes its place."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    faulthandler.enable(file=fd, all_threads=True)
    before, _Armed.fd = _Armed.fd, fd
    if before >= 0:
        os.close(before)


def allow_tracing(tracer: int) -> None:
    """In a worker: let a process and its children trace this one where Yama forbids it by default."""
    try:
        kernel.prctl(_PR_SET_PTRACER, tracer)
    except OSError:
        pass  # No Yama, nothing to allow.


async def ask(pid: int, fd: int, limit_s: float) -> str:
    """In the agent: return the stacks that an armed process writes; empty if it cannot."""
    if not proc.catches(pid, SIGNAL) or proc.process_state(pid) in ("T", "Z", "X"):
        return ""
    deadline = time.monotonic() + limit_s
    os.ftruncate(fd, 0)
    try:
        os.kill(pid, SIGNAL)
    except (ProcessLookupError, PermissionError):
        return ""
    # In this order: once something is written the handler runs, so its signal is blocked.
    while os.fstat(fd).st_size == 0 or proc.is_handling(pid, SIGNAL):
        if time.monotonic() >= deadline:
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    return os.pread(fd, MAX_TEXT_BYTES, 0).decode("utf-8", "replace")


def crash(fd: int) -> str:
    """In the agent: return what a process wrote when it crashed; empty if it did not."""
    text = os.pread(fd, MAX_TEXT_BYTES, 0).decode("utf-8", "replace")
    _, found, told = text.rpartition(_CRASH)
    return found + told if found else ""


def parse(text: str) -> tuple[ThreadStack, ...]:
    """Parse faulthandler's text; other lines are skipped."""
    found: list[tuple[str, list[Frame]]] = []
    for line in text.split("\n"):
        if head := _THREAD.match(line):
            is_main = head["current"] == "Current thread"
            name = head["name"] or f"thread 0x{head['id']}"
            found.append(("MainThread" if is_main else name, []))
        elif found and (frame := _FRAME.match(line)):
            number = int(frame["line"][:9]) if frame["line"].isdecimal() else 0
            found[-1][1].append(Frame(file=frame["file"], line=number, function=frame["function"]))
    return tuple(ThreadStack(name=_name(name, f), frames=cut(f)) for name, f in found)


def _name(name: str, frames: list[Frame]) -> str:
    """Name a thread. The current one is the main thread, which takes signals if it can, unless its
    stack starts where threads start."""
    began_as_thread = bool(frames) and frames[-1].function == "_bootstrap"
    return "the thread that took the signal" if name == "MainThread" and began_as_thread else name
