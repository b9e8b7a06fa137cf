"""Ranks that stand at the same place, told as one: of 4,096 stacks a person wants to read two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.diagnosis import wording
from holdfast.diagnosis.places import main_thread
from holdfast.diagnosis.scene import Scene, python_stack
from holdfast.messages.evidence import Frame, RankEvidence, StackGroup, cut

MAX_GROUPS = 16
_FRAMES = 48


def stack_groups(scene: Scene) -> tuple[StackGroup, ...]:
    """Groups of ranks with the same Python stack, the largest first."""
    alike: dict[tuple[object, ...], list[RankEvidence]] = {}
    for rank, each in scene.seen.items():
        waits = rank in scene.likely_waiting
        key = (python_stack(each), waits, scene.ailment(rank))
        alike.setdefault(key, []).append(each)
    groups = [
        StackGroup(
            ranks=tuple(each.rank for each in members),
            headline=_headline(scene, members),
            frames=cut(_fullest(members), _FRAMES),
        )
        for members in alike.values()
    ]
    return tuple(sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))[:MAX_GROUPS])


def _headline(scene: Scene, members: Sequence[RankEvidence]) -> str:
    first = members[0]
    ranks = [int(each.rank) for each in members]
    if ailment := scene.ailment(first.rank):
        return f"{wording.rank_list(ranks)}: {wording.at(ailment, first)}"
    fronts = [front for front in scene.fronts if set(ranks) <= set(front.waiting)]
    if fronts and scene.stances[first.rank] != "elsewhere":
        return wording.waits(ranks, fronts[0])
    doing = wording.doing(first) if len(members) == 1 else wording.plural(wording.doing(first))
    return f"{wording.rank_list(ranks)}: {doing}"


def _fullest(members: Iterable[RankEvidence]) -> tuple[Frame, ...]:
    """The stack with the most to say: one with native frames, if anybody has it."""
    mains = [main_thread(each.stacks) for each in members]
    return max((main.frames for main in mains if main is not None), key=len, default=())
