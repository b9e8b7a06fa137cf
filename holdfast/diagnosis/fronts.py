"""Finds where each process group stands: which operation holds it up, and which ranks are missing
there.

A group's collectives are numbered alike on all of its ranks. The lowest number that some rank
entered and did not finish is the group's front. Ranks that have not entered it are behind: all
others wait for them. A rank may pass the front without being ahead in a race (the root of a
broadcast need not wait for others), so "behind" is measured from the front and never from the rank
that is farthest.

A rank whose recorder could not be read is neither waiting nor behind: it is unknown.

If ranks called different operations under one number, they will never meet, however long they wait.
That is looked for first, at the earliest number where it happened.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.diagnosis.flight import WORLD
from holdfast.messages.evidence import Collective, RankEvidence

_PEERS = re.compile(r"(?P<op>send|recv) (?P<own>\d+) ?(->|<-) ?(?P<peer>\d+)")
_SAME_SIZES = re.compile(r"all_?reduce|broadcast")
"""Operations that need the same sizes on all ranks."""

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
    different: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """If ranks called different operations under this number: the operations and their ranks."""


def find_fronts(evidence: Sequence[RankEvidence], world_size: int) -> list[Front]:
    """Return the fronts of all groups, those with the most waiting ranks first."""
    logs: dict[tuple[str, str, tuple[int, ...]], _Log] = defaultdict(lambda: defaultdict(list))
    members = _members(evidence)
    for each in evidence:
        for noted in each.collectives or ():
            backend = noted.op.rpartition(":")[0]
            key = (backend, noted.group, members.get((each.rank, noted.group), ()))
            logs[key][each.rank].append(noted)
    readable: set[int] = {each.rank for each in evidence if each.collectives is not None}
    fronts = []
    for (_, group, ranks), log in logs.items():
        whole = ranks or tuple(range(world_size) if group == WORLD else sorted(log))
        fronts.extend(_collective_front(group, whole, log, readable))
        fronts.extend(_pair_fronts(group, whole, log, readable))
    return sorted(fronts, key=lambda front: (-len(front.waiting), front.group))


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
    noted = {rank: [c for c in own if not _is_pair(c)] for rank, own in log.items()}
    newest = {rank: max((c.number for c in own), default=-1) for rank, own in noted.items()}
    unfinished = {rank: [c for c in own if c.state != "completed"] for rank, own in noted.items()}
    numbers = [c.number for own in unfinished.values() for c in own]
    if not numbers:
        return []
    number, different = _differences(noted, min(numbers))
    at_front = {r: c for r, own in unfinished.items() for c in own if c.number == number}
    behind = tuple(r for r in members if r in readable and newest.get(r, -1) < number)
    unknown = tuple(r for r in members if r not in readable)
    op = next(c.op for own in noted.values() for c in own if c.number == number)
    return [
        Front(
            group=group,
            number=number,
            op=op.rpartition(":")[2],
            waiting=tuple(sorted(rank for rank, own in unfinished.items() if own)),
            behind=behind,
            unknown=unknown,
            late=() if behind or unknown else _not_started(at_front),
            different=different,
        )
    ]


def _differences(
    noted: Mapping[int, list[Collective]], front: int
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Return the first number up to the front where ranks called different operations; else the
    front."""
    by_number: dict[int, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in noted.items():
        for each in own:
            if each.number <= front:
                by_number[each.number][rank].append(each)
    for number in sorted(by_number):
        done = {rank: _kinds(own) for rank, own in by_number[number].items()}
        if not set.intersection(*done.values()):
            by_kind: dict[str, list[int]] = defaultdict(list)
            for rank, kinds in done.items():
                by_kind[" and ".join(sorted(kinds))].append(rank)
            return number, {kind: tuple(sorted(ranks)) for kind, ranks in by_kind.items()}
    return front, {}


def _kinds(noted: Sequence[Collective]) -> set[str]:
    """Return what a rank called under one number: several operations if they were coalesced."""
    kinds = {each.op.rpartition(":")[2] for each in noted}
    sizes = noted[0].sizes
    if len(noted) == 1 and sizes and all(_SAME_SIZES.search(op) for op in kinds):
        return {f"{op} of {sizes}" for op in kinds}
    return kinds


def _not_started(at_front: Mapping[int, Collective]) -> tuple[int, ...]:
    started = [rank for rank, noted in at_front.items() if noted.state == "started"]
    return tuple(sorted(set(at_front) - set(started))) if started else ()


# ---- send and recv ----


def _is_pair(noted: Collective) -> bool:
    return noted.op.rpartition(":")[2].startswith(("send", "recv", "p2p"))


def _pair_fronts(
    group: str, members: tuple[int, ...], log: _Log, readable: set[int]
) -> list[Front]:
    """Return a front for each unfinished send or recv whose peer is known."""
    open_ends: dict[tuple[int, int], tuple[Collective, str]] = {}
    for rank, own in log.items():
        for noted in own:
            ends = _PEERS.search(noted.op) if noted.state != "completed" else None
            if ends and int(ends["peer"]) < len(members):
                open_ends[rank, members[int(ends["peer"])]] = (noted, ends["op"])
    fronts = []
    for (rank, peer), (noted, op) in open_ends.items():
        met = (peer, rank) in open_ends
        fronts.append(
            Front(
                group=group,
                number=noted.number,
                op=f"{op} {'to' if op == 'send' else 'from'} rank {peer}",
                waiting=(rank, peer) if met else (rank,),
                behind=(peer,) if not met and peer in readable else (),
                unknown=(peer,) if peer not in readable else (),
            )
        )
    return fronts
