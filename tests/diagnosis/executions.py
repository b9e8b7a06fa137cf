"""Simulated executions of a program of collectives, and what is seen of its ranks.

All ranks run the same program: collectives over several groups, called synchronously or waited for
later, with work of any length between them; and sends and receives, which gloo does not record. When
each rank enters and finishes each operation follows from that. A rank is then seen at any moment, each
at another; its dump is made as a recorder makes it, with a ring of limited size, and read as an agent
reads it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter, defaultdict
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


@dataclass(frozen=True)
class PairCall:
    """A send or a recv that a rank has called."""

    op: str
    group: str
    peer: int
    number: int
    """Of the calls of this kind to that peer in that group."""
    world: int
    at: float


@dataclass(frozen=True)
class PairWait:
    """A rank's wait for one of these."""

    call: PairCall
    began: float
    until: float


@dataclass
class Channel:
    """The sends from one rank to another in one group, and the receives that they meet."""

    sends: list[float] = field(default_factory=list)
    receives: list[float] = field(default_factory=list)

    def meets(self, number: int) -> float:
        """Return when both ends of that number have been called; never, as long as one has not."""
        if number > min(len(self.sends), len(self.receives)):
            return math.inf
        return max(self.sends[number - 1], self.receives[number - 1])


@dataclass
class Trace:
    """What one rank did."""

    rank: int
    clock: float = 0.0
    stays: list[Stay] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    """When it waited for operations that it had called before."""
    pair_calls: list[PairCall] = field(default_factory=list)
    pair_waits: list[PairWait] = field(default_factory=list)
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
        self._channels: dict[tuple[str, int, int], Channel] = defaultdict(Channel)
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

    def call_pair(self, number: int, op: str, group: str, peer: int, work_s: Any) -> PairCall:
        """Have a rank call a send or a recv, after some work, without waiting for it."""
        one = self.ranks[number]
        one.clock += work_s()
        channel = self._channel(number, op, group, peer)
        calls = channel.sends if op == "send" else channel.receives
        calls.append(one.clock)
        call = PairCall(op, group, peer, len(calls), self._world, one.clock)
        one.pair_calls.append(call)
        return call

    def can_meet(self, number: int, call: PairCall) -> bool:
        """Return whether the other end of a call comes, as far as the program is known."""
        return self._met_at(number, call) < math.inf

    def await_pair(self, number: int, call: PairCall, lag_s: Any) -> None:
        """Have a rank wait for a call: forever, if the other end never comes."""
        one = self.ranks[number]
        until = max(one.clock, self._met_at(number, call)) + lag_s()
        one.pair_waits.append(PairWait(call, one.clock, until))
        one.clock = until
        if until == math.inf:
            one.ended = one.gone = math.inf

    def _met_at(self, number: int, call: PairCall) -> float:
        return self._channel(number, call.op, call.group, call.peer).meets(call.number)

    def _channel(self, number: int, op: str, group: str, peer: int) -> Channel:
        source, target = (number, peer) if op == "send" else (peer, number)
        return self._channels[group, source, target]

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
        waits = waits or any(wait.began <= at < wait.until for wait in one.pair_waits)
        stack = IN_ALL_REDUCE if inside else IN_WAIT if waits else (ASLEEP, IN_KERNEL)[number % 2]
        more: dict[str, Any] = {}
        if at >= one.ended:
            more["ended"], stack = True, EXITING
        if at >= one.gone:
            more["process_state"], stack = "X", ()
        recorded = flight.read(self.dump(number, min(at, one.ended), inside is not None))
        more |= {"blocked": recorded.blocked, "evicted": recorded.evicted, "world": recorded.world}
        more |= {"pairs": recorded.pairs}
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
            "pairs": self._pairs(one, world, at),
            "pair": self._pair(one, at),
        }
        return b"holdfast flight 1\n" + zlib.compress(json.dumps(body).encode())

    def _pairs(self, one: Trace, world: int, at: float) -> list[dict[str, Any]]:
        """Return the counts that a worker keeps."""
        calls = [call for call in one.pair_calls if call.at <= at and call.world == world]
        counts = Counter((call.group, call.peer, call.op) for call in calls)
        return [
            {
                "process_group": [group, "undefined"],
                "peer": peer,
                "sends": counts[group, peer, "send"],
                "receives": counts[group, peer, "recv"],
            }
            for group, peer in sorted({(group, peer) for group, peer, _ in counts})
        ]

    def _pair(self, one: Trace, at: float) -> dict[str, Any] | None:
        """Return the send or recv that a rank waits for."""
        wait = next((wait for wait in one.pair_waits if wait.began <= at < wait.until), None)
        if wait is None:
            return None
        members = self.groups[wait.call.group]
        arrow = "->" if wait.call.op == "send" else "<-"
        ends = f"{members.index(one.rank)}{arrow}{members.index(wait.call.peer)}"
        return {
            "profiling_name": f"gloo:{wait.call.op} {ends}",
            "process_group": [wait.call.group, "undefined"],
            "is_p2p": True,
            "p2p_seq_id": wait.call.number,
            "time_created_ns": int((1 + wait.began) * SECOND_NS),
        }

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
