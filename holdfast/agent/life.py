"""Tells what of a rank moves, and whether it could move at all.

A rank that others wait for may be hung, or rank 0 may evaluate, upload or wait for a file. What tells
them apart is whether anything of it moves: its training thread's line, CPU time, bytes read and
written, bytes of its connections, its child processes. An `Observer` reads the kernel's counters of one
process, a `Life` compares what it reads with what it read before.

Not everything that moves is the script. Threads that serve others or wake up by themselves (ours,
gloo's loop, torch's store, NCCL's watchdogs) are left out; the connection to torch's store too, because
the watchdogs use it. While the training thread waits for the workers of its data loader it wakes up
every few seconds to see whether they live, so only they count then; one of them that waits for orders
wakes up just so. And an examination pauses the rank's threads and lets them continue: what it costs
them is not theirs.

It cannot move if every thread waits, without a timeout, for a lock that only this process could
release. That is a proof, so everything that might still come from outside rules it out: a thread in any
other system call, a signal that the script handles, a collective.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from holdfast import proc, sockets
from holdfast.diagnosis import faulthandling
from holdfast.messages.hangs import Sign
from holdfast.shm.vital_signs import Signs

T = TypeVar("T")

NOT_THE_SCRIPTS: Final = ("holdfast-", "gloo_tcp_loop", "pt_tcpstore", "pt_nccl_")
"""Names of threads that serve other ranks or wake up by themselves. What gloo's loop carries shows as
bytes of connections."""
CANNOT_RELEASE: Final = ("holdfast-beat", "gloo_tcp_loop", "pt_tcpstore")
"""Names of threads that release no lock of the script, whatever they wait for. gloo's loop hands what
arrived to `pt_gloo_runloop`, which waits with a timeout while it has an operation to finish."""
SHARE: Final = 0.01
"""Share of a core from which threads other than the training one count."""
DISTURBED_NS: Final = 5_000_000
DISTURBED_BYTES: Final = 1 << 20
"""What an examination may cost a process."""
IDLE_NS: Final = 2_000_000
"""What a loader's worker may run to find that there are no orders."""
DEAF_S: Final = 300.0
"""Storage that does not answer (state D) is waited for this long."""
WIDELY_EVERY_S: Final = 1.0
"""Interval between looks at child processes and connections, which cost more."""
RECENT_S: Final = 5.0
LOCKED_LOOKS: Final = 3
LOCKED_S: Final = 1.0
LOCKED_AGE_S: Final = 1.5
"""An examination hides what threads wait for; what was seen before holds this long."""


class Descendant(NamedTuple):
    """What a descendant process has done so far."""

    ran_ns: int
    """Of its main thread."""
    ticks: int
    """Of all its threads, in the kernel's coarse unit."""
    moved_bytes: int
    traffic: int
    """A number that changes with the bytes of its own connections."""
    loads: bool = False
    """Whether it is a worker of a data loader."""
    awaits_orders: bool = False
    """Whether it is one that waits for its next order, and wakes up now and then."""


@dataclass(frozen=True)
class Counters:
    """What the kernel knows of a process at one moment."""

    state: str = "S"
    """Of the training thread."""
    ran_ns: int = 0
    queued_ns: int = 0
    """The training thread's time on a CPU, and in the queue for one."""
    others_ns: Mapping[int, int] = field(default_factory=dict)
    """Time on a CPU of the script's other threads."""
    for_a_while: frozenset[int] = frozenset()
    """Threads that wait for a lock with a timeout, as for the GIL; 0 for the training thread. Read only
    for strict looks."""
    moved_bytes: int | None = None
    """Read and written; None if that could not be told from what our own threads moved."""
    children: Mapping[int, Descendant] | None = None
    connections: Mapping[int, int] | None = None
    """Child processes, and a number for each connection that changes with its bytes; None if they were
    not looked at this time."""
    locked: bool = False
    """Whether every thread waits for a lock of this process."""
    took_s: float = 0.0
    """What it cost to read all this."""


class Observes(Protocol):
    """Reads the kernel's counters of one process."""

    def sample(self, thread: int, now: float, strictly: bool, locks: bool) -> Counters: ...
    def is_at_lock(self, thread: int) -> bool: ...


class Look(NamedTuple):
    """What one look at a rank showed."""

    moved: tuple[Sign, ...]
    """Since the look before."""
    recent: tuple[Sign, ...]
    """In the last seconds."""
    still_s: float
    """How long nothing of it has moved."""
    cpu_share: float
    """Share of a core that the training thread used since the look before."""
    locked: bool


# ---- reading ----


class Observer:
    """Reads the counters of a real process."""

    def __init__(self, pid: int, store_port: int = 0) -> None:
        self._pid = pid
        self._store_port = store_port
        self._names: dict[int, str] = {}
        self._widely_at = float("-inf")

    def is_at_lock(self, thread: int) -> bool:
        """Return whether a thread (0: the main one) waits for a lock of its own process."""
        return proc.call(self._pid, thread or self._pid).waits_for_own_lock

    def sample(self, thread: int, now: float, strictly: bool, locks: bool) -> Counters:
        """Read everything that is due. Strict looks also read which threads wait for the GIL; `locks`
        asks whether all threads wait for locks."""
        began = time.thread_time()
        pid, thread = self._pid, thread or self._pid
        names = self._thread_names()
        mine = [one for one, name in names.items() if name.startswith(NOT_THE_SCRIPTS)]
        others = [one for one in names if one != thread and one not in mine]
        widely = now - self._widely_at >= WIDELY_EVERY_S
        if widely:
            self._widely_at = now
        ran_ns, queued_ns = proc.cpu_time(pid, thread)
        wait = [one for one in (thread, *others) if strictly and self._waits_for_a_while(one)]
        return Counters(
            state=proc.thread_state(pid, thread),
            ran_ns=ran_ns,
            queued_ns=queued_ns,
            others_ns={one: proc.cpu_time(pid, one).ran_ns for one in others},
            for_a_while=frozenset(0 if one == thread else one for one in wait),
            moved_bytes=self._moved_bytes(mine),
            **(self._wider() if widely else {}),
            locked=locks and self._is_locked(thread, names),
            took_s=time.thread_time() - began,
        )

    def _thread_names(self) -> dict[int, str]:
        """Return the names of all threads. One that was just started may still get its own name."""
        known, self._names = self._names, {}
        for thread in proc.threads(self._pid):
            name = known.get(thread)
            self._names[thread] = proc.thread_name(self._pid, thread) if name is None else name
        names = dict(self._names)
        for thread in self._names.keys() - known.keys():
            del self._names[thread]
        return names

    def _waits_for_a_while(self, thread: int) -> bool:
        return proc.call(self._pid, thread).waits_for_a_while

    def _moved_bytes(self, mine: list[int]) -> int | None:
        before = [proc.moved_bytes(self._pid, thread) for thread in mine]
        all_of_it = proc.moved_bytes(self._pid)
        after = [proc.moved_bytes(self._pid, thread) for thread in mine]
        return all_of_it - sum(before) if before == after else None

    def _wider(self) -> dict[str, Any]:
        own = sockets.inodes(self._pid)
        children = proc.descendants(self._pid)
        theirs = {child: sockets.inodes(child) - own for child in children}
        found = sockets.connections(self._pid, own.union(*theirs.values()))
        moved = {n: c.moved for n, c in found.items() if self._store_port not in c.ports}
        return {
            "connections": {n: count for n, count in moved.items() if n in own},
            "children": {
                child: _child(child, sum(moved.get(n, 0) for n in theirs[child]))
                for child in children
            },
        }

    def _is_locked(self, thread: int, names: Mapping[int, str]) -> bool:
        pid = self._pid
        suspects = [thread, *(one for one in names if one != thread)]
        held = (
            proc.call(pid, one).waits_for_own_lock
            for one in suspects
            if one == thread or not names[one].startswith(CANNOT_RELEASE)
        )
        return all(held) and not proc.may_be_signalled(pid, except_for=faulthandling.SIGNAL)


def _child(pid: int, traffic: int) -> Descendant:
    fields = proc.stat(pid)
    ticks = sum(int(ticks) for ticks in fields[11:13])
    loads = proc.thread_name(pid, pid) == proc.LOADER_WORKER
    waits = loads and proc.system_call(pid, pid) in ("poll", "ppoll", "select", "pselect6")
    ran_ns = proc.cpu_time(pid, pid).ran_ns
    return Descendant(ran_ns, ticks, proc.moved_bytes(pid), traffic, loads, waits)


# ---- comparing ----


class Life:
    """What was seen to move of one rank, since it is looked at."""

    def __init__(self) -> None:
        self._last: Counters | None = None
        self._looked_at = 0.0
        self._moved_at = 0.0
        self._line_at = 0.0
        self._mark_at = 0.0
        self._signs: dict[Sign, float] = {}
        """When each sign was last seen."""
        self._deaf_since: float | None = None
        self._locked_since: float | None = None
        self._locked_at = 0.0
        """When it was last seen to be locked."""
        self._locked_looks = 0
        self._children: Mapping[int, Descendant] | None = None
        self._connections: Mapping[int, int] | None = None
        self._children_disturbed = False
        """Whether the rank was examined since its children were last looked at."""

    def look(
        self, signs: Signs, sample: Counters, now: float, strictly: bool, disturbed: bool
    ) -> Look:
        """Compare with the look before.

        `strictly` lets every thread count that ran at all. `disturbed` says that the rank was examined
        since the look before.
        """
        moved: tuple[Sign, ...] = ()
        share = 0.0
        self._children_disturbed = self._children_disturbed or disturbed
        if self._last is None:
            self._moved_at = now
        elif now > self._looked_at:
            seconds = now - self._looked_at
            share = (sample.ran_ns - self._last.ran_ns) / 1e9 / seconds
            found = Comparison(self._last, sample, seconds, strictly, disturbed)
            moved = tuple(dict.fromkeys(self._moved(signs, sample, now, found)))
        self._note(signs, sample, now, moved, disturbed)
        recent = tuple(sign for sign, at in self._signs.items() if now - at < RECENT_S)
        return Look(moved, recent, max(0.0, now - self._moved_at), share, self._is_locked(now))

    def _moved(
        self, signs: Signs, sample: Counters, now: float, found: Comparison
    ) -> Iterator[Sign]:
        loads = signs.loads
        if not loads and (signs.line_at != self._line_at or found.is_debugged):
            yield "position"
        if (not loads and found.trains) or found.others_run:
            yield "cpu"
        if found.reads_or_writes or self._is_deaf(sample, now):
            yield "io"
        if any(True for _ in _changed(self._connections, sample.connections, operator.ne)):
            yield "network"
        moved = partial(_child_moved, disturbed=self._children_disturbed)
        for pid in _changed(self._children, sample.children, moved):
            child = (sample.children or {}).get(pid) or (self._children or {})[pid]
            yield "loader workers" if loads and child.loads else "children"

    def _is_deaf(self, sample: Counters, now: float) -> bool:
        """Return whether storage does not answer, and may still do so."""
        if sample.state != "D":
            self._deaf_since = None
            return False
        if self._deaf_since is None:
            self._deaf_since = now
        return now - self._deaf_since < DEAF_S

    def _note(
        self,
        signs: Signs,
        sample: Counters,
        now: float,
        moved: tuple[Sign, ...],
        disturbed: bool,
    ) -> None:
        last = self._last
        if sample.moved_bytes is None and last is not None:
            sample = replace(sample, moved_bytes=last.moved_bytes)
        self._last, self._looked_at = sample, now
        self._line_at = signs.line_at
        if sample.children is not None:
            self._children, self._connections = sample.children, sample.connections
            self._children_disturbed = False
        if moved:
            self._moved_at = now
            self._signs.update(dict.fromkeys(moved, now))
        if signs.mark_at != self._mark_at:
            self._mark_at = signs.mark_at
            self._moved_at = max(self._moved_at, signs.mark_at)
        if moved or not (sample.locked or disturbed):
            self._locked_since, self._locked_looks = None, 0
        if sample.locked:
            self._locked_looks += 1
            self._locked_since = self._locked_since or now
            self._locked_at = now

    def _is_locked(self, now: float) -> bool:
        since = self._locked_since
        if since is None or now - self._locked_at > LOCKED_AGE_S:
            return False
        return self._locked_looks >= LOCKED_LOOKS and self._locked_at - since >= LOCKED_S


@dataclass(frozen=True)
class Comparison:
    """The difference between two samples."""

    before: Counters
    after: Counters
    seconds: float
    strictly: bool
    disturbed: bool

    @property
    def _share_ns(self) -> float:
        return SHARE * self.seconds * 1e9

    @property
    def is_debugged(self) -> bool:
        return self.after.state == "t" and not self.disturbed

    @property
    def trains(self) -> bool:
        """Whether the training thread ran, or waited for a CPU."""
        ran_ns = self.after.ran_ns - self.before.ran_ns
        if self.disturbed:
            return ran_ns > DISTURBED_NS
        if self.strictly and 0 in self.after.for_a_while:
            return ran_ns >= self._share_ns
        return ran_ns > 0 or self.after.queued_ns > self.before.queued_ns

    @property
    def others_run(self) -> bool:
        ran = {
            thread: ns - self.before.others_ns.get(thread, 0)
            for thread, ns in self.after.others_ns.items()
        }
        enough = max(self._share_ns, DISTURBED_NS * len(ran) if self.disturbed else 0)
        if self.strictly and not self.disturbed:
            for_a_while = self.after.for_a_while
            if any(ns > 0 for thread, ns in ran.items() if thread not in for_a_while):
                return True
        return bool(ran) and sum(ran.values()) >= enough

    @property
    def reads_or_writes(self) -> bool:
        before, after = self.before.moved_bytes, self.after.moved_bytes
        if before is None or after is None:
            return False
        return after - before > (DISTURBED_BYTES if self.disturbed else 0)


def _child_moved(before: Descendant, after: Descendant, disturbed: bool) -> bool:
    if (after.moved_bytes, after.traffic) != (before.moved_bytes, before.traffic):
        return True
    ran_ns = after.ran_ns - before.ran_ns
    if disturbed:
        return ran_ns > DISTURBED_NS
    if after.awaits_orders:
        return ran_ns > IDLE_NS
    return ran_ns > 0 or after.ticks > before.ticks


def _changed(
    before: Mapping[int, T] | None, after: Mapping[int, T] | None, moved: Callable[[T, T], bool]
) -> Iterator[int]:
    """Yield what appeared, ended or moved; nothing if one of the two was not looked at."""
    if before is None or after is None:
        return
    for number in before.keys() | after.keys():
        if number not in before or number not in after or moved(before[number], after[number]):
            yield number
