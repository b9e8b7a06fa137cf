"""Finds where each process group stands: which operation holds it up, and which ranks are missing
there.

A group's collectives are numbered alike on all of its ranks. The lowest number that some rank
entered and did not finish is the group's front. Ranks that have not entered it are behind: all
others wait for them. A rank may pass the front without being ahead in a race (the root of a
broadcast need not wait for others), so "behind" is measured from the front and never from the rank
that is farthest.

A rank whose recorder could not be read is neither waiting nor behind: it is unknown.

If ranks called different operations under one number, they will never meet, however long they wait
(see `core.collectives`). That is looked for first, at the earliest number where it happened.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.collectives import (
    SYNCHRONIZING,
    WAITED_S,
    Difference,
    difference,
    family,
    is_old,
    is_pair,
    operation,
)
from holdfast.diagnosis.flight import is_world, world_of
from holdfast.messages.evidence import ANY_PEER, UNCOUNTED, Collective, RankEvidence
from holdfast.messages.units import Seconds

_PEERS = re.compile(r"(?P<op>send|recv) (?P<own>\d+) ?(->|<-) ?(?P<peer>\d+)")

_Log = dict[int, list[Collective]]
"""What each rank recorded of one group."""


@dataclass(frozen=True)
class Front:
    """The operation that holds up one group, or one pair of ranks."""

    group: str
    number: int
    op: str
    waiting: tuple[int, ...]
    """Ranks that are in an operation of this group and have not finished it."""
    behind: tuple[int, ...]
    """Ranks that have not entered the front."""
    unknown: tuple[int, ...] = ()
    """Members without a readable recorder."""
    late: tuple[int, ...] = ()
    """If no rank is behind: ranks whose GPU has not reached the operation while that of others
    has."""
    open: Mapping[int, tuple[Collective, ...]] = field(default_factory=dict)
    """What each waiting rank is in and has not finished, in this group."""
    different: Difference | None = None
    """If ranks called different operations under one number up to this one."""
    uncalled: bool = False
    """Of a send or recv: whether it is known that the peer has not called the other end."""
    left_s: Seconds | None = None
    """Time until the group's timeout ends the first waiting rank; None if unknown."""

    @property
    def inside(self) -> dict[int, Collective]:
        """Ranks in the front itself, and what they recorded of it."""
        return {r: c for r, own in self.open.items() for c in own if c.number == self.number}

    @property
    def needs_all(self) -> bool:
        """Whether nobody finishes the front before all members have entered it."""
        calls = self.inside.values()
        return bool(calls) and all(family(call) in SYNCHRONIZING for call in calls)

    @property
    def youngest_s(self) -> Seconds:
        """How long the last rank to enter the front has been in it; 0 if unknown."""
        return min((call.age_s or 0.0 for call in self.inside.values()), default=0.0)

    @property
    def oldest_s(self) -> Seconds | None:
        """How long the first waiting rank has waited; None if unknown."""
        ages = [call.age_s for own in self.open.values() for call in own]
        return max((age for age in ages if age is not None), default=None)

    @property
    def is_old(self) -> bool:
        """Whether every rank in the front has been there for long enough to wait."""
        return self.youngest_s >= WAITED_S

    def holds(self, rank: int) -> bool:
        """Return whether nothing that a rank is in here can finish before all have entered it."""
        return all(
            (self.uncalled or family(call) in SYNCHRONIZING) and is_old(call)
            for call in self.open[rank]
        )


def find_fronts(evidence: Sequence[RankEvidence], world_size: int) -> list[Front]:
    """Return the fronts of all groups, those with the most waiting ranks first."""
    logs: dict[tuple[str, str, tuple[int, ...]], _Log] = defaultdict(lambda: defaultdict(list))
    members = _members(evidence)
    for each in evidence:
        for noted in each.collectives or ():
            backend = noted.op.rpartition(":")[0]
            key = (backend, noted.group, members.get((each.rank, noted.group), ()))
            logs[key][each.rank].append(noted)
    seen = {int(each.rank): each for each in evidence}
    fronts = []
    for (_, group, ranks), log in logs.items():
        readable = {int(each.rank) for each in evidence if _is_readable(each, group, log)}
        whole = ranks or tuple(range(world_size) if is_world(group) else sorted(log))
        fronts.extend(_collective_front(group, whole, log, readable))
        pairs = _Pairs(group, whole, bool(ranks) or is_world(group), readable, seen)
        fronts.extend(_pair_fronts(pairs, log))
    return sorted(fronts, key=lambda front: (-len(front.waiting), front.group))


def _is_readable(evidence: RankEvidence, group: str, log: _Log) -> bool:
    """Return whether it is known what a rank has entered of a group."""
    if evidence.collectives is None:
        return False
    if evidence.world > world_of(group):
        return False  # It has created its groups anew, and left this one behind.
    return evidence.rank in log or not evidence.evicted


def _members(evidence: Iterable[RankEvidence]) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return the members of each recorded group: as that rank told, or else as another member did."""
    own: dict[tuple[int, str], tuple[int, ...]] = {}
    told: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for each in evidence:
        for noted in each.collectives or ():
            own[each.rank, noted.group] = noted.ranks or own.get((each.rank, noted.group), ())
            told[noted.group].add(noted.ranks)
    return {
        (rank, group): ranks or next((t for t in sorted(told[group]) if rank in t), ())
        for (rank, group), ranks in own.items()
    }


def _collective_front(
    group: str, members: tuple[int, ...], log: _Log, readable: set[int]
) -> list[Front]:
    noted = {rank: [c for c in own if not is_pair(c)] for rank, own in log.items()}
    newest = {rank: max((c.number for c in own), default=-1) for rank, own in noted.items()}
    unfinished = {rank: [c for c in own if c.state != "completed"] for rank, own in noted.items()}
    open_calls = [c for own in unfinished.values() for c in own]
    if not open_calls:
        return []
    lowest = min(c.number for c in open_calls)
    different = difference(group, noted, members, lowest)
    number = different.number if different else lowest
    inside = {r: c for r, own in unfinished.items() for c in own if c.number == number}
    behind = tuple(r for r in members if r in readable and newest.get(r, -1) < number)
    unknown = tuple(r for r in members if r not in readable)
    return [
        Front(
            group=group,
            number=number,
            op=next(operation(c) for own in noted.values() for c in own if c.number == number),
            waiting=tuple(sorted(rank for rank, own in unfinished.items() if own)),
            behind=behind,
            unknown=unknown,
            late=() if behind or unknown else _not_started(inside),
            open={rank: tuple(own) for rank, own in unfinished.items() if own},
            different=different,
            left_s=_left_s(open_calls),
        )
    ]


def _not_started(inside: Mapping[int, Collective]) -> tuple[int, ...]:
    started = [rank for rank, noted in inside.items() if noted.state == "started"]
    return tuple(sorted(set(inside) - set(started))) if started else ()


def _left_s(calls: Iterable[Collective]) -> Seconds | None:
    """Return the time until the first of these operations reaches its group's timeout."""
    left = (
        max(0.0, c.timeout_s - c.age_s)
        for c in calls
        if c.timeout_s is not None and c.age_s is not None
    )
    return min(left, default=None)


# ---- send and recv ----


@dataclass(frozen=True)
class _Pairs:
    """What is known of the members of a group that send to each other."""

    group: str
    members: tuple[int, ...]
    certain: bool
    """Whether these are its members."""
    readable: set[int]
    seen: Mapping[int, RankEvidence]

    def is_called(self, rank: int, peer: int, op: str, noted: Collective) -> bool | None:
        """Return whether a peer has called the other end of a rank's send or recv; None if unknown,
        as always where the backend records these operations and the worker does not count them."""
        each, by_gloo = self.seen.get(peer), noted.op.startswith("gloo:")
        if not (self.certain and by_gloo and noted.number) or each is None or each.pairs is None:
            return None
        own = {pair.peer: pair for pair in each.pairs if pair.group == self.group}
        if each.world != world_of(self.group) or (op == "send" and ANY_PEER in own):
            return None
        if rank not in own:
            return False
        count = own[rank].sends if op == "recv" else own[rank].receives
        return None if count == UNCOUNTED else count >= noted.number


def _pair_fronts(pairs: _Pairs, log: _Log) -> list[Front]:
    """Return a front for each unfinished send or recv whose peer is known."""
    open_ends: dict[tuple[int, int, str], Collective] = {}
    for rank, own in log.items():
        for noted in own:
            ends = _PEERS.search(noted.op) if noted.state != "completed" else None
            if ends and int(ends["peer"]) < len(pairs.members):
                open_ends[rank, pairs.members[int(ends["peer"])], ends["op"]] = noted
    fronts = []
    for (rank, peer, op), noted in open_ends.items():
        # Two sends to each other do not meet.
        met = (peer, rank, "recv" if op == "send" else "send") in open_ends
        called = pairs.is_called(rank, peer, op, noted)
        behind = called is False or (called is None and not met and peer in pairs.readable)
        fronts.append(
            Front(
                group=pairs.group,
                number=noted.number,
                op=f"{op} {'to' if op == 'send' else 'from'} rank {peer}",
                waiting=(rank, peer) if met else (rank,),
                behind=(peer,) if behind else (),
                unknown=(peer,) if called is None and peer not in pairs.readable else (),
                open={rank: (noted,)},
                uncalled=called is False,
                left_s=_left_s([noted]),
            )
        )
    return fronts
