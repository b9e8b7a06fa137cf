"""Chooses the step that all ranks go on from, and from whom each rank gets its state.

Every rank says where it stands; all ranks see the same table, so all of them choose alike without
another word. A rank's *part* of the state is what it has of every tensor: with DDP all ranks have
the same part, with FSDP each rank its own, with HSDP those ranks that hold the same shards. The
newest step is chosen for which each part that some rank needs is held by some rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct


class RankStanding(Struct, frozen=True):
    """Where one rank stands."""

    step: int = -1
    """Last committed step; -1: this process was never here."""
    whole: bool = False
    """Whether the state is that of the step. If not, the rank was left between two steps."""
    spoilt: bool = False
    """Whether objects that this entry uses were changed by a step that was not finished."""
    needs: int = 0
    """Fingerprint of the part that this rank has to get; 0: it cannot be told."""
    holds: int = 0
    """Fingerprint of the part that this rank has."""
    trouble: str = ""
    """Why the rank cannot take part."""


class LivingChoice(Struct, frozen=True):
    """The step to go on from."""

    step: int
    sources: dict[int, int]
    """The rank that each rank gets its state from; its own if it has it."""


class LivingRefusal(Struct, frozen=True):
    """Why no living state can be used."""

    reasons: tuple[str, ...]
    nothing_lost: bool
    """Whether no step was ever finished, so that training can begin with what there is."""


def choose(standings: Sequence[RankStanding]) -> LivingChoice | LivingRefusal:
    """Choose the newest step of which every part is held somewhere."""
    holders: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, one in enumerate(standings):
        if one.whole and one.step >= 0 and one.holds:
            holders[one.holds][one.step].append(rank)
    needed = {one.needs for one in standings}
    common = set.intersection(*(set(holders[part]) if part else set() for part in needed))
    if not common:
        return _refusal(standings, {part: set(steps) for part, steps in holders.items()})
    step = max(common)
    return LivingChoice(step, _sources(standings, {p: holders[p][step] for p in needed}))


def _sources(standings: Sequence[RankStanding], holders: dict[int, list[int]]) -> dict[int, int]:
    """Assign the ranks that lack their part to those that hold it, in turn."""
    found = {}
    served: defaultdict[int, int] = defaultdict(int)
    for rank, one in enumerate(standings):
        having = holders[one.needs]
        if rank in having:
            found[rank] = rank
        else:
            found[rank] = having[served[one.needs] % len(having)]
            served[one.needs] += 1
    return found


def _refusal(standings: Sequence[RankStanding], steps: dict[int, set[int]]) -> LivingRefusal:
    reasons = [f"rank {r}: {one.trouble}" for r, one in enumerate(standings) if one.trouble]
    lacking = [r for r, one in enumerate(standings) if not steps.get(one.needs)]
    began = any(one.step >= 0 for one in standings)
    if began and lacking:
        reasons.append(f"no rank has a whole copy of what {_ranks_need(lacking)}")
    elif began:
        standing = ", ".join(str(one.step) for one in standings[:8])
        reasons.append(f"no step is held of every part of the state; ranks stand at {standing}")
    spoilt = any(one.spoilt for one in standings)
    nothing_lost = not spoilt and all(one.step <= 0 for one in standings)
    return LivingRefusal(tuple(reasons), nothing_lost)


def diverged(
    choice: LivingChoice, standings: Sequence[RankStanding], sums: Sequence[int]
) -> str | None:
    """Say which ranks hold different states of the same part at the same step; None if none do.

    Before the first step they may: ranks need not begin with the same parameters."""
    if choice.step == 0:
        return None
    first: dict[int, int] = {}
    for rank, one in enumerate(standings):
        if one.whole and one.step == choice.step and one.holds:
            other = first.setdefault(one.holds, rank)
            if sums[other] != sums[rank]:
                return (
                    f"ranks {other} and {rank} both hold step {choice.step}, and their parameters or"
                    " optimizer states differ"
                )
    return None


def _ranks_need(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    if len(ranks) == 1:
        return f"rank {ranks[0]} needs"
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} need"
