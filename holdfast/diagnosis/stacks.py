"""Takes the stacks of all ranks of a node, within a given time.

py-spy reads another process's memory; nothing has to run in it, and nothing in it runs. A look at
the Python stack takes 10 ms and does not even pause the process, so it also works on one that is
stopped or stuck in the kernel. With native frames it takes 0.6 s of CPU and 330 MB for a process
with torch in it, nearly all of it to read torch's symbols, and it pauses the process, which fails
on a stopped one.

So first comes the Python stack and the system call of every process: eight ranks take a twentieth
of a second, and for a rank that sleeps, reads or waits inside `dist.all_reduce` that is the whole
answer. A native stack is taken only where the Python stack could mean waiting as well as working
(`loss.backward()`, `loss.item()`): one of each kind of Python stack first, then the others while
the time lasts. A process that py-spy may not read is asked to write its own stack (see
`faulthandling`).

A rank that waits for its data loader says nothing: what its workers do does. Their Python stacks are
taken as well.

No process is left stopped, and no process of ours outlives the time limit. py-spy's output goes to
memory files and a pidfd tells its end, because the agent reaps every child that it does not know:
py-spy's exit status may be gone before it could be read here, and it is not needed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast, get_args

import msgspec

from holdfast import cgroups, kernel, proc
from holdfast.diagnosis import faulthandling
from holdfast.diagnosis.frames import KERNEL, awaits_its_loader, in_collective, main_thread
from holdfast.messages.evidence import (
    MAX_LOADERS,
    Frame,
    LoaderWorker,
    ProcessState,
    StackSource,
    ThreadStack,
    cut,
)

MAX_OUTPUT_BYTES = 16 << 20
_REAP_S = 0.5
_FIRST_NATIVE_S = 0.25
"""Time needed to start a native look, until one was measured."""
_WORKER_LOOP = "_worker_loop"
"""Torch's function that a data loader's worker runs."""
_QUEUE_FILE = re.compile(r"/multiprocessing/|/selectors\.py$")
_UNPAUSABLE = {"T", "D", "Z", "X"}


@dataclass(frozen=True)
class Subject:
    """A process to look at."""

    pid: int
    trainer: int = 0
    """Thread id of the training thread; 0 for the main thread."""
    stacks_fd: int | None = None
    """The file it writes its stacks to on request (see `faulthandling`); None if it cannot."""


@dataclass(frozen=True)
class Stacks:
    """Where the threads of one process are."""

    state: ProcessState
    """The process state before any look at it."""
    source: StackSource = "none"
    threads: tuple[ThreadStack, ...] = ()
    missing: tuple[str, ...] = ()
    loaders: tuple[LoaderWorker, ...] = ()
    """Its data loader's busy workers, if its training thread waits for them."""


@dataclass(frozen=True)
class SpyLook:
    """What py-spy showed: threads, or the reason why there are none."""

    threads: tuple[ThreadStack, ...] = ()
    problem: str = ""


@dataclass
class _Budget:
    """The time left, and how long a native look takes."""

    deadline: float
    may_pause: bool = True
    native_s: float = _FIRST_NATIVE_S
    # More looks at a time than CPUs would only slow each of them down.
    turns: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(max(2, len(os.sched_getaffinity(0))))
    )

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


async def collect(
    subjects: Iterable[Subject], limit_s: float, native: bool = True
) -> dict[int, Stacks]:
    """Return the stacks of these processes, by pid; without native ones no process is paused."""
    budget = _Budget(time.monotonic() + limit_s, may_pause=native)
    by_pid = {subject.pid: subject for subject in subjects}
    looks = [_python_stack(subject, budget) for subject in by_pid.values()]
    found = dict(zip(by_pid, await asyncio.gather(*looks), strict=True))
    await asyncio.gather(*[_add_loaders(pid, found, budget) for pid in found])
    unclear = _wanting_native(found) if native else []
    await asyncio.gather(*[_native_stack(by_pid[pid], found, budget) for pid in unclear])
    return found


async def _python_stack(subject: Subject, budget: _Budget) -> Stacks:
    """Return the Python stack of one process, by py-spy or written by itself."""
    pid, state = subject.pid, _state(subject.pid)
    if state in ("Z", "X"):
        return Stacks(state, missing=("stack: the process is dead",))
    async with budget.turns:
        # A running process must be paused for a consistent stack, or looked at more than once; any
        # other is read as it is.
        first: list[str] = [] if state == "R" and budget.may_pause else ["--nonblocking"]
        for flags in (first, ["--nonblocking"]) if state == "R" else (first,):
            # Half of the time, to leave some for another way if this one fails.
            seen = await _spy(subject, budget.left_s / 2, flags)
            if seen.threads:
                # A process that is in the kernel only for a moment is not stuck there.
                now = _state(pid)
                calm = now if state == "D" and now in ("R", "S") else state
                return Stacks(calm, "py-spy python only", seen.threads)
    return await _own_words(subject, state, budget, seen.problem)


async def _add_loaders(pid: int, found: dict[int, Stacks], budget: _Budget) -> None:
    """Look at the workers of the data loader that a process waits for."""
    main = main_thread(found[pid].threads)
    if main is None or not awaits_its_loader(main):
        return
    children = [Subject(child) for child in sorted(proc.children(pid))[:MAX_LOADERS]]
    looks = await asyncio.gather(*[_python_stack(child, budget) for child in children])
    mains = [
        (child.pid, main_thread(look.threads)) for child, look in zip(children, looks, strict=True)
    ]
    workers = [(pid, thread) for pid, thread in mains if thread is not None and _loads(thread)]
    busy = (
        LoaderWorker(number=number, pid=child, stack=thread)
        for number, (child, thread) in enumerate(workers)
        if not _awaits_work(thread)
    )
    found[pid] = replace(found[pid], loaders=tuple(busy))


def _loads(thread: ThreadStack) -> bool:
    """Return whether a thread is a data loader's worker."""
    return any(frame.function == _WORKER_LOOP for frame in thread.frames)


def _awaits_work(thread: ThreadStack) -> bool:
    """Return whether a data loader's worker waits for the next batch to load."""
    python = [frame for frame in thread.frames if not frame.native and frame.file]
    inner = itertools.takewhile(lambda frame: frame.function != _WORKER_LOOP, python)
    return all(_QUEUE_FILE.search(frame.file) for frame in inner)


async def _own_words(subject: Subject, state: ProcessState, budget: _Budget, why: str) -> Stacks:
    """Ask the process to write its stacks."""
    if subject.stacks_fd is None:
        return Stacks(state, missing=(f"stack: {why}",))
    text = await faulthandling.ask(subject.pid, subject.stacks_fd, budget.left_s)
    threads = faulthandling.parse(text)
    if not threads:
        return Stacks(state, missing=(f"stack: {why}; the process did not answer either",))
    return Stacks(state, "faulthandler", threads, (f"native stack: {why}",))


async def _native_stack(subject: Subject, found: dict[int, Stacks], budget: _Budget) -> None:
    """Replace a Python stack by one with native frames, if there is time."""
    pid = subject.pid
    async with budget.turns:
        if budget.left_s < budget.native_s:
            found[pid] = replace(found[pid], missing=("native stack: no time was left",))
            return
        began = time.monotonic()
        seen = await _paused_look(subject, budget)
    if seen.threads:
        budget.native_s = time.monotonic() - began
        if _has_python(seen.threads) or not _has_python(found[pid].threads):
            found[pid] = replace(found[pid], source="py-spy", threads=seen.threads)
        else:
            problem = "native stack: py-spy did not find the Python frames in it"
            found[pid] = replace(found[pid], missing=(problem,))
    else:
        found[pid] = replace(found[pid], missing=(f"native stack: {seen.problem}",))


def _has_python(threads: Sequence[ThreadStack]) -> bool:
    """Return whether the training thread's Python frames were seen, which say where it is."""
    main = main_thread(threads)
    return main is not None and any(not frame.native and frame.file for frame in main.frames)


async def _paused_look(subject: Subject, budget: _Budget) -> SpyLook:
    """Take a native stack, and make sure that the paused process continues."""
    try:
        pidfd = os.pidfd_open(subject.pid)
    except ProcessLookupError:
        return SpyLook(problem="the process is gone")
    seen = SpyLook()
    try:
        seen = await _spy(subject, budget.left_s, ["--native"])
        return seen
    finally:
        if not seen.threads:
            proc.resume(subject.pid, pidfd)
        os.close(pidfd)


def _wanting_native(found: Mapping[int, Stacks]) -> list[int]:
    """Return the processes whose Python stack is no answer, one of each kind of stack first."""
    unclear = [
        pid
        for pid, stacks in found.items()
        if stacks.source == "py-spy python only"
        and stacks.state not in _UNPAUSABLE
        and (in_collective(stacks.threads) == "unclear" or any(t.holds_gil for t in stacks.threads))
    ]
    kinds: dict[Collection[Frame], int] = {}
    for pid in unclear:
        main = main_thread(found[pid].threads)
        kinds.setdefault(main.frames if main is not None else (), pid)
    firsts = set(kinds.values())
    return sorted(unclear, key=lambda pid: pid not in firsts)


def _state(pid: int) -> ProcessState:
    """Return the process state. A traced process ("t") is being looked at, which says nothing; a
    frozen one is stopped, whatever the kernel calls it."""
    if cgroups.is_frozen(pid):
        return "T"
    letter = proc.process_state(pid).replace("I", "S")
    return cast(ProcessState, letter) if letter in get_args(ProcessState) else "?"


# ---- py-spy ----


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int
    module: str | None = None
    """The library of a native frame; None for a Python frame."""


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    active: bool = False
    owns_gil: bool = False
    thread_name: str | None = None
    os_thread_id: int | None = None


def spy_executable() -> str | None:
    """Return py-spy beside this interpreter, or the first on the path."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


async def _spy(subject: Subject, limit_s: float, flags: Sequence[str]) -> SpyLook:
    """Run py-spy on a process; whatever happens, py-spy is gone after the limit."""
    executable = spy_executable()
    if executable is None:
        return SpyLook(problem="py-spy is not installed")
    calls = proc.system_calls(subject.pid)
    command = [executable, "dump", "--json", *flags, "--pid", str(subject.pid)]
    try:
        ran = await _run(command, limit_s)
    except OSError as error:
        return SpyLook(problem=f"py-spy cannot be started: {error}")
    if ran is None:
        return SpyLook(problem=f"py-spy took longer than {limit_s:.1f} s")
    out, err = ran
    try:
        return SpyLook(threads=parse_spy(out, subject, calls))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return SpyLook(problem=_complaint(err))


def parse_spy(output: bytes, subject: Subject, calls: Mapping[int, str]) -> tuple[ThreadStack, ...]:
    """Parse py-spy's JSON and add the system call of each thread where it is known."""
    threads = msgspec.json.decode(output, type=list[_SpyThread])
    return tuple(_thread(thread, subject, calls) for thread in threads)


def _thread(thread: _SpyThread, subject: Subject, calls: Mapping[int, str]) -> ThreadStack:
    pid = subject.pid
    # Before Python 3.11 py-spy knows a thread's id only if it may pause the process.
    number = thread.os_thread_id or (pid if thread.thread_name == "MainThread" else 0)
    call = calls.get(number, "")
    entered = [Frame(file=KERNEL, line=0, function=call, native=True)]
    frames = [_frame(frame) for frame in thread.frames]
    return ThreadStack(
        name="MainThread" if number == pid else thread.thread_name or f"thread {number}",
        active=call == proc.RUNNING if call else thread.active,
        holds_gil=thread.owns_gil,
        trains=number == (subject.trainer or pid),
        frames=cut([*(entered if call not in ("", proc.RUNNING) else []), *frames]),
    )


def _frame(frame: _SpyFrame) -> Frame:
    """Return a frame under the function's own name. From Python 3.11 on py-spy puts its class before
    it, which no other source of stacks does, and places are remembered by their names."""
    native = frame.module is not None
    name = frame.name if native else frame.name.rpartition(".")[2]
    return Frame(file=frame.filename, line=frame.line, function=name, native=native)


def _complaint(err: bytes) -> str:
    """Return the line in which py-spy says what is wrong."""
    said = err.decode("utf-8", "replace").partition("Stack backtrace:")[0]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    causes = [line for line in lines if line[:2].rstrip(":").isdigit()]
    return f"py-spy: {(causes or lines or ['it said nothing'])[-1 if causes else 0][:200]}"


async def _run(command: Sequence[str], limit_s: float) -> tuple[bytes, bytes] | None:
    """Return what a command wrote to stdout and stderr; None if it had to be killed."""
    out, err = os.memfd_create("py-spy-out"), os.memfd_create("py-spy-err")
    try:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        child.returncode = 0  # The agent may reap it first: Popen must not expect a status.
        pidfd = os.pidfd_open(child.pid)
        try:
            in_time = await _ended(pidfd, limit_s)
        finally:
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            await _ended(pidfd, _REAP_S)
            os.close(pidfd)
            try:
                os.waitpid(child.pid, os.WNOHANG)
            except ChildProcessError:
                pass
        return (os.pread(out, MAX_OUTPUT_BYTES, 0), os.pread(err, 1 << 16, 0)) if in_time else None
    finally:
        os.close(out)
        os.close(err)


def _die_with_parent() -> None:
    kernel.unblock_signals()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


async def _ended(pidfd: int, limit_s: float) -> bool:
    """Return whether a process ends within that time."""
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
