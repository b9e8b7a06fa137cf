"""Simulated executions of a program of collectives, and what is seen of its ranks.

All ranks run the same program: collectives over several groups, called synchronously or waited for
later, with work of any length between them. When each rank enters and finishes each operation follows
from that. A rank is then seen at any moment, each at another; its dump is made as a recorder makes
it, with a ring of limited size, and read as an agent reads it.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass, field
from typing import Any

from test_verdict import ASLEEP, IN_ALL_REDUCE, IN_KERNEL, frame, rank

from holdfast.diagnosis import flight
from holdfast.messages.evidence import RankEvidence

EXITING = (frame("_shutdown", "/usr/lib/python3.11/threading.py"),)
IN_WAIT = (frame("wait", "/src/holdfast/worker/torch_hooks/waits.py"), frame("step"))
ROOTED = {"broadcast", "reduce", "gather", "scatter"}
SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class Call:
    """One operation of a program."""

    group: str
    op: str = "all_reduce"
    waits: bool = True
    """Whether its ranks wait for it at once; else before their next operation of the same group."""
    root: int = 0
    """For an operation with one: its index among the members."""
    sizes: tuple[int, ...] = (3,)


@dataclass(frozen=True)
class Stay:
    """A rank's time in one operation, or in the wait for one."""

    call: Call
    number: int
    world: int
    entered: float
    finished: float


@dataclass
class Trace:
    """What one rank did."""

    rank: int
    clock: float = 0.0
    stays: list[Stay] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    """When it waited for operations that it had called before."""
    worlds: list[float] = field(default_factory=list)
    """When it created its groups, once for each time that it did."""
    destroyed: list[float] = field(default_factory=list)
    ended: float = 0.0
    gone: float = 0.0


class Execution:
    """Runs programs on ranks; `draw_s` says how long each piece of work takes."""

    def __init__(self, groups: dict[str, tuple[int, ...]], size: int, ring: int = 2000) -> None:
        self.groups = {"0": tuple(range(size)), **groups}
        self.ring = ring
        self.ranks = [Trace(r) for r in range(size)]
        self._world = -1

    def begin_world(self, meet: bool, work_s: Any) -> None:
        """Create the groups; whether ranks wait for each other there depends on the backend."""
        self._world += 1
        self._numbers = dict.fromkeys(self.groups, 0)
        self._pending: dict[tuple[int, str], float] = {}
        for one in self.ranks:
            one.clock += work_s()
        if meet:
            latest = max(one.clock for one in self.ranks)
            for one in self.ranks:
                one.clock = latest + 0.001
        for one in self.ranks:
            one.worlds.append(one.clock)

    def run(self, call: Call, work_s: Any, lag_s: Any) -> None:
        """Have all members call an operation, after some work."""
        members = [self.ranks[r] for r in self.groups[call.group]]
        self._numbers[call.group] += 1
        entered = []
        for one in members:
            self._catch_up(one, call.group)
            one.clock += work_s()
            entered.append(one.clock)
        for index, one in enumerate(members):
            met = self._met(call, index, entered)
            stay = Stay(call, self._numbers[call.group], self._world, entered[index], met + lag_s())
            one.stays.append(stay)
            if call.waits:
                one.clock = stay.finished
            else:
                self._pending[one.rank, call.group] = stay.finished

    def stick(self, calls: dict[int, Call], work_s: Any) -> None:
        """Have each of these ranks enter an operation that never finishes, after some work."""
        for number, call in calls.items():
            one = self.ranks[number]
            self._catch_up(one, call.group)
            one.clock += work_s()
            at = self._numbers[call.group] + 1
            one.stays.append(Stay(call, at, self._world, one.clock, math.inf))
            one.clock, one.ended, one.gone = math.inf, math.inf, math.inf

    def leave(self, number: int, work_s: Any) -> None:
        """End a rank's script."""
        one = self.ranks[number]
        for group in self.groups:
            self._catch_up(one, group)
        one.ended = one.clock + work_s()
        one.gone = one.ended + work_s()

    def _met(self, call: Call, index: int, entered: list[float]) -> float:
        """Return when a member's operation may finish."""
        own, root = entered[index], call.root % len(entered)
        if call.op not in ROOTED:
            return max(entered)
        if call.op in ("broadcast", "scatter"):
            return own if index == root else max(own, entered[root])
        return max(entered) if index == root else own

    def _catch_up(self, one: Trace, group: str) -> None:
        until = self._pending.pop((one.rank, group), 0.0)
        if until > one.clock:
            one.waits.append((one.clock, until))
            one.clock = until

    def end_world(self, work_s: Any) -> None:
        for one in self.ranks:
            for group in self.groups:
                self._catch_up(one, group)
            one.clock += work_s()
            one.destroyed.append(one.clock)

    def end(self, work_s: Any) -> None:
        for one in self.ranks:
            self.leave(one.rank, work_s)

    # ---- what is seen ----

    def seen(self, number: int, at: float) -> RankEvidence:
        """Return the evidence of a rank at a moment."""
        one = self.ranks[number]
        inside = next((s for s in one.stays if s.call.waits and s.entered <= at < s.finished), None)
        waits = any(began <= at < until for began, until in one.waits)
        stack = IN_ALL_REDUCE if inside else IN_WAIT if waits else (ASLEEP, IN_KERNEL)[number % 2]
        more: dict[str, Any] = {}
        if at >= one.ended:
            more["ended"], stack = True, EXITING
        if at >= one.gone:
            more["process_state"], stack = "X", ()
        recorded = flight.read(self.dump(number, min(at, one.ended), inside is not None))
        more |= {"blocked": recorded.blocked, "evicted": recorded.evicted, "world": recorded.world}
        return rank(number, stack, collectives=recorded.collectives, **more)

    def dump(self, number: int, at: float, blocked: bool) -> bytes:
        """Return what a worker would have written at a moment."""
        one = self.ranks[number]
        world = sum(began <= at for began in one.worlds) - 1
        lives = world >= 0 and not (len(one.destroyed) > world and one.destroyed[world] <= at)
        own = [name for name, members in self.groups.items() if number in members]
        called = sorted((s for s in one.stays if s.entered <= at), key=lambda s: s.entered)
        used = {stay.call.group for stay in called if stay.world == world}
        groups = {name: {"ranks": self.groups[name], "used": name in used} for name in own if lives}
        entries = [self._entry(own, index, stay, at) for index, stay in enumerate(called)]
        body = {
            "groups": groups,
            "traces": [{"entries": entries[-self.ring :]}],
            "at_ns": int((1 + at) * SECOND_NS),
            "world": max(world + 1, 1),
            "call": "all_reduce" if blocked else "",
        }
        return b"holdfast flight 1\n" + zlib.compress(json.dumps(body).encode())

    def _entry(self, own: list[str], index: int, stay: Stay, at: float) -> dict[str, Any]:
        return {
            "profiling_name": f"gloo:{stay.call.op}",
            "process_group": [stay.call.group, "undefined"],
            "collective_seq_id": stay.number,
            "op_id": stay.number,
            "record_id": index,
            "pg_id": stay.world * len(own) + own.index(stay.call.group),
            "retired": stay.finished <= at,
            "time_created_ns": int((1 + stay.entered) * SECOND_NS),
            "timeout_ms": 1_800_000,
            "input_sizes": [list(stay.call.sizes)],
            "input_dtypes": ["Float"],
        }
