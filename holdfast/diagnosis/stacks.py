"""The stacks of all ranks of a node, within a given time.

First the Python stack and the system call of every process: eight ranks take a twentieth of a second,
and for a rank that sleeps, reads or waits inside `dist.all_reduce` that is the whole answer. Native
stacks cost a hundred times as much, so only those get one whose place could mean either waiting or
working (`loss.backward()`, `loss.item()`): one of each kind of Python stack first, then the others, as
far as the time reaches. What py-spy may not see, the process is asked to tell itself.

No process is left stopped, and nothing of ours lives on when the time is over.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from holdfast.diagnosis import faulthandling, proc, spy
from holdfast.diagnosis.places import main_thread, stance
from holdfast.messages.evidence import Frame, ProcessState, StackSource, ThreadStack

_FIRST_NATIVE_S = 0.25
"""How much time must be left to begin a native look, until one was seen to take another."""
_UNPAUSABLE = {"T", "D", "Z", "X"}


@dataclass(frozen=True)
class Subject:
    """A process to look at."""

    pid: int
    trainer: int = 0
    """The kernel's number of the thread that trains; 0 when that is the main one."""
    told: int | None = None
    """The file that it writes to when it is asked (see `faulthandling`); None when it is not armed."""


@dataclass(frozen=True)
class Stacks:
    """Where one process stands."""

    state: ProcessState
    """As it was before anybody looked."""
    source: StackSource = "none"
    threads: tuple[ThreadStack, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass
class _Clock:
    """The time that is left, and what a native look was seen to take."""

    deadline: float
    native_s: float = _FIRST_NATIVE_S
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_width()))

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


async def collect(subjects: Iterable[Subject], limit_s: float) -> dict[int, Stacks]:
    """The stacks of these processes, by their pids."""
    clock = _Clock(time.monotonic() + limit_s)
    of = {subject.pid: subject for subject in subjects}
    states = {pid: proc.process_state(pid) for pid in of}
    looks = [_python(of[pid], state, clock) for pid, state in states.items()]
    found = dict(zip(states, await asyncio.gather(*looks), strict=True))
    wanted = _wanting_native(found)
    await asyncio.gather(*[_native(of[pid], found, clock) for pid in wanted])
    return found


async def _python(subject: Subject, state: ProcessState, clock: _Clock) -> Stacks:
    """The Python stack of one process, by py-spy or as it tells itself."""
    if state in ("Z", "X"):
        return Stacks(state, missing=("stack: the process is dead",))
    executable, pid = spy.executable(), subject.pid
    if executable is None:
        return await _tell(subject, state, clock, "py-spy is not installed")
    async with clock.turns:
        calls = _system_calls(pid)
        # One that runs must be paused for a true picture; any other is looked at as it stands.
        for pause in (True, False) if state == "R" else (False,):
            # Half of the time, so that there is some left for what comes if it is in vain.
            limit_s = clock.left_s / 2
            seen = await spy.look(
                executable,
                pid,
                limit_s,
                calls,
                trainer=subject.trainer,
                pause=pause,
                native=False,
            )
            if seen.threads:
                return Stacks(_calmer(pid, state), "py-spy python only", seen.threads)
    return await _tell(subject, state, clock, seen.problem)


async def _tell(subject: Subject, state: ProcessState, clock: _Clock, why: str) -> Stacks:
    if subject.told is None:
        return Stacks(state, missing=(f"stack: {why}",))
    text = await faulthandling.ask(subject.pid, subject.told, clock.left_s)
    threads = faulthandling.parse(text)
    if not threads:
        return Stacks(state, missing=(f"stack: {why}; the process did not answer either",))
    return Stacks(state, "faulthandler", threads, (f"native stack: {why}",))


async def _native(subject: Subject, found: dict[int, Stacks], clock: _Clock) -> None:
    """Replace a Python stack by one with native frames, if there is time for it."""
    pid = subject.pid
    async with clock.turns:
        if clock.left_s < clock.native_s:
            found[pid] = replace(found[pid], missing=("native stack: no time was left",))
            return
        began = time.monotonic()
        seen = await _paused_look(subject, clock)
    if seen.threads:
        clock.native_s = time.monotonic() - began
        found[pid] = Stacks(found[pid].state, "py-spy", seen.threads)
    else:
        found[pid] = replace(found[pid], missing=(f"native stack: {seen.problem}",))


async def _paused_look(subject: Subject, clock: _Clock) -> spy.Look:
    """A look that pauses the process, and makes sure that it goes on."""
    executable, pid = spy.executable(), subject.pid
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return spy.Look(problem="the process is gone")
    seen = spy.Look(problem="py-spy is not installed")
    try:
        if executable is not None:
            calls = _system_calls(pid)
            seen = await spy.look(
                executable,
                pid,
                clock.left_s,
                calls,
                trainer=subject.trainer,
                pause=True,
                native=True,
            )
        return seen
    finally:
        if not seen.threads:
            proc.resume(pid, pidfd)
        os.close(pidfd)


def _wanting_native(found: Mapping[int, Stacks]) -> list[int]:
    """Processes whose Python stack is no answer, or who hold the GIL: one of each kind first."""
    unclear = [
        pid
        for pid, stacks in found.items()
        if stacks.source == "py-spy python only"
        and stacks.state not in _UNPAUSABLE
        and (stance(stacks.threads) == "unclear" or any(t.holds_gil for t in stacks.threads))
    ]
    kinds: dict[Collection[Frame], int] = {}
    for pid in unclear:
        main = main_thread(found[pid].threads)
        kinds.setdefault(main.frames if main is not None else (), pid)
    firsts = set(kinds.values())
    return sorted(unclear, key=lambda pid: pid not in firsts)


def _system_calls(pid: int) -> dict[int, str]:
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return {}
    return {thread: proc.system_call(pid, thread) for thread in threads}


def _calmer(pid: int, before: ProcessState) -> ProcessState:
    """A process that was in the kernel for a moment only was not stuck there."""
    now = proc.process_state(pid)
    return now if before == "D" and now in ("R", "S") else before


def _width() -> int:
    """How many looks at a time: more than there are CPUs would only make each one slower."""
    return max(2, len(os.sched_getaffinity(0)))
