"""One look at one process with py-spy.

py-spy reads the other process's memory; nothing has to be running in it, and nothing in it runs. A
look at the Python stack takes 10 ms and does not even pause the process, so it also works on one that
is stopped or stuck in the kernel. With native frames it takes 0.6 s of CPU and 330 MB for a process
with torch in it, nearly all of it spent on reading torch's symbols, and the process is paused; one
that is stopped or stuck cannot be paused, so there is no such look at those.

py-spy's output goes to memory files and its end is noticed by a pidfd, because the agent reaps every
child that it does not know: an exit status may be gone before we could read it, and none is needed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast import kernel
from holdfast.diagnosis.places import KERNEL
from holdfast.diagnosis.proc import RUNNING
from holdfast.messages.evidence import Frame, ThreadStack, cut

MAX_OUTPUT_BYTES = 16 << 20
_REAP_S = 0.5


@dataclass(frozen=True)
class Look:
    """What one look showed: threads, or the reason why there are none."""

    threads: tuple[ThreadStack, ...] = ()
    problem: str = ""


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int
    module: str | None = None
    """The library that a native frame is in; Python frames have none."""


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    active: bool = False
    owns_gil: bool = False
    thread_name: str | None = None
    os_thread_id: int | None = None


def executable() -> str | None:
    """py-spy beside this interpreter, or anywhere on the path."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


async def look(
    spy: str,
    pid: int,
    limit_s: float,
    calls: Mapping[int, str],
    *,
    trainer: int,
    pause: bool,
    native: bool,
) -> Look:
    """Run py-spy on a process; whatever happens, it is gone after that time."""
    how = ["--native"] if native else [] if pause else ["--nonblocking"]
    try:
        ran = await _run([spy, "dump", "--json", *how, "--pid", str(pid)], limit_s)
    except OSError as error:
        return Look(problem=f"py-spy cannot be started: {error}")
    if ran is None:
        return Look(problem=f"py-spy took longer than {limit_s:.1f} s")
    out, err = ran
    try:
        return Look(threads=parse(out, pid, calls, trainer))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Look(problem=_complaint(err))


def parse(
    output: bytes, pid: int, calls: Mapping[int, str], trainer: int = 0
) -> tuple[ThreadStack, ...]:
    """py-spy's JSON; to each thread the system call that it is in, if that is known. The trainer is
    the number of the thread that trains, 0 when that is the main one."""
    threads = msgspec.json.decode(output, type=list[_SpyThread])
    return tuple(_thread(thread, pid, calls, trainer or pid) for thread in threads)


def _thread(thread: _SpyThread, pid: int, calls: Mapping[int, str], trainer: int) -> ThreadStack:
    named_main = thread.thread_name == "MainThread"
    # Before Python 3.11 py-spy knows a thread's number only if it may pause the process.
    number = thread.os_thread_id or (pid if named_main else 0)
    call = calls.get(number, "")
    entered = [Frame(file=KERNEL, line=0, function=call, native=True)]
    frames = [
        Frame(file=f.filename, line=f.line, function=f.name, native=f.module is not None)
        for f in thread.frames
    ]
    return ThreadStack(
        name="MainThread" if number == pid else thread.thread_name or f"thread {number}",
        active=call == RUNNING if call else thread.active,
        holds_gil=thread.owns_gil,
        trains=number == trainer,
        frames=cut([*(entered if call not in ("", RUNNING) else []), *frames]),
    )


def _complaint(err: bytes) -> str:
    """The line in which py-spy says what is wrong."""
    said = err.decode("utf-8", "replace").partition("Stack backtrace:")[0]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    causes = [line for line in lines if line[:2].rstrip(":").isdigit()]
    return f"py-spy: {(causes or lines or ['it said nothing'])[-1 if causes else 0][:200]}"


async def _run(command: Sequence[str], limit_s: float) -> tuple[bytes, bytes] | None:
    """What a command wrote to stdout and stderr; None when it had to be killed."""
    out, err = os.memfd_create("py-spy-out"), os.memfd_create("py-spy-err")
    try:
        pidfd, pid = _start(command, out, err)
        try:
            in_time = await _ended(pidfd, limit_s)
        finally:
            _kill(pidfd)
            await _ended(pidfd, _REAP_S)
            os.close(pidfd)
            _reap(pid)
        return (os.pread(out, MAX_OUTPUT_BYTES, 0), os.pread(err, 1 << 16, 0)) if in_time else None
    finally:
        os.close(out)
        os.close(err)


def _start(command: Sequence[str], out: int, err: int) -> tuple[int, int]:
    child = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    child.returncode = 0  # Whoever is first may reap it: Popen shall not mind.
    return os.pidfd_open(child.pid), child.pid


def _die_with_parent() -> None:
    kernel.unblock_signals()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


async def _ended(pidfd: int, limit_s: float) -> bool:
    """Whether a process ended within that time."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(pidfd, gone.set)
    try:
        await asyncio.wait_for(gone.wait(), max(limit_s, 0.0))
    except asyncio.TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True


def _kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
