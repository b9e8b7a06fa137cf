"""Whom a job that stands still waits for.

Pure: evidence in, verdict out. Nobody healthy is blamed, and what was not seen is not concluded: an
empty `guilty` with a sentence that begins with "unknown" is a good verdict. The rules, the surest
first; the first that finds anybody decides:

1. A rank that is stopped, dead or holds the GIL for good cannot go on by itself.
2. Nor can one that is stuck in the kernel (state D), unless it waits in a collective.
3. Ranks that did different things under one number never meet. The few differ from the many; if there
   are no many, nobody is named.
4. A rank that has not entered the operation that others wait in, and does not wait in another one, is
   whom they wait for. (One that waits elsewhere is followed: whoever holds *that* up is guilty.)
5. All have entered it, but the GPUs of some have not come to it: those are behind as well.
6. Without a recorder: a rank that is certainly in no collective while others are in one.

If everybody waits in the same operation, no rank is to blame: the network between them is suspect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.diagnosis import wording
from holdfast.diagnosis.groups import stack_groups
from holdfast.diagnosis.scene import Scene, look_at
from holdfast.messages.evidence import RankEvidence, Verdict


@dataclass(frozen=True)
class _Finding:
    guilty: Sequence[int]
    what: Callable[[RankEvidence], str] = wording.doing
    """What to say that a guilty rank does."""
    because: str = ""
    says_all: bool = False
    """Whether that reason already tells who waits where."""


def judge(evidence: Sequence[RankEvidence], world_size: int) -> Verdict:
    """The verdict on the newest round that there is evidence of."""
    scene = look_at(evidence, world_size)
    found = (rule(scene) for rule in (_broken, _stuck, _mismatched, _behind, _late, _by_stacks))
    return _verdict(scene, next(filter(None, found), None) or _unknown(scene))


# ---- the rules ----


def _broken(scene: Scene) -> _Finding | None:
    found = [rank for rank in scene.seen if scene.ailment(rank)]

    def what(each: RankEvidence) -> str:
        ailment = scene.ailment(each.rank)
        return ailment if ailment == "is dead" else wording.at(ailment, each)

    return _Finding(found, what) if found else None


def _stuck(scene: Scene) -> _Finding | None:
    stuck = [rank for rank, each in scene.seen.items() if each.process_state == "D"]
    # A driver may keep one there that waits for its GPU, which waits for another rank.
    found = [r for r in stuck if r not in scene.waiting and not scene.is_blocked(r)]
    what = "is stuck in the kernel (state D)"
    return _Finding(found, partial(wording.at, what)) if found else None


def _mismatched(scene: Scene) -> _Finding | None:
    for front in scene.fronts:
        if front.different:
            many = max(front.different.values(), key=len)
            few = [rank for ranks in front.different.values() for rank in ranks if rank not in many]
            sure = len(many) > len(few) and not front.unknown
            said = wording.mismatch(front)
            return _Finding(
                sorted(few) if sure else (),
                because=said if sure else f"unknown: {said}",
                says_all=True,
            )
    return None


def _behind(scene: Scene) -> _Finding | None:
    behind = {rank for front in scene.fronts for rank in front.behind} - scene.waiting
    return _Finding(sorted(behind)) if behind else None


def _late(scene: Scene) -> _Finding | None:
    for front in scene.fronts:
        elsewhere = {rank for f in scene.fronts if f is not front for rank in f.waiting}
        what = f"has not come to {wording.name(front)} on its GPU and is"
        if late := sorted(set(front.late) - elsewhere):
            return _Finding(late, partial(wording.at, what))
    return None


def _by_stacks(scene: Scene) -> _Finding | None:
    """Recorders decide where there are any: a rank that finished its part may be anywhere."""
    found = [
        rank
        for rank, each in scene.seen.items()
        if scene.stances[rank] == "elsewhere" and (each.collectives is None or not scene.fronts)
    ]
    return _Finding(found) if found and scene.likely_waiting else None


def _unknown(scene: Scene) -> _Finding:
    """What can be said when nobody can be named."""
    if not scene.seen:
        return _Finding((), because="unknown: nothing is known of any rank")
    if scene.is_moving:
        return _Finding((), because="unknown: all ranks finish steps, and nobody holds them up")
    if any(front.behind for front in scene.fronts):
        circle = "unknown: ranks wait for each other in a circle, or in what no recorder notes"
        return _Finding((), because=circle)
    for front in scene.fronts:
        suspect = f"{wording.name(front)}; the network between them is suspect"
        if len(front.waiting) == scene.world_size:
            return _Finding((), because=f"unknown: all ranks wait in {suspect}", says_all=True)
        if not front.unknown and len(front.waiting) > 1:
            return _Finding((), because=f"unknown: everybody has come to {suspect}")
    if scene.waiting:
        return _Finding((), because="unknown: what could tell for whom they wait is missing")
    return _Finding((), because="unknown: no rank was seen to wait for another")


# ---- saying it ----


def _verdict(scene: Scene, finding: _Finding) -> Verdict:
    guilty = [scene.seen[rank] for rank in finding.guilty if rank in scene.seen]
    absent = scene.absent if scene.seen else []
    parts = [
        wording.accused((each, finding.what(each)) for each in guilty),
        finding.because,
        "" if finding.says_all else _others(scene, finding.guilty),
        f"nothing is known of {wording.rank_list(absent)}" if absent else "",
    ]
    return Verdict(
        guilty=tuple(each.rank for each in guilty),
        sentence="; ".join(part for part in parts if part),
        groups=stack_groups(scene),
    )


def _others(scene: Scene, guilty: Sequence[int]) -> str:
    """Who waits, and in what."""
    told = {rank for front in scene.fronts for rank in front.waiting}.union(guilty)
    rest = sorted(scene.likely_waiting - told)
    by_stack = wording.wait_somewhere(rest) if rest else ""
    return "; ".join(filter(None, (wording.waiters(scene.fronts, guilty), by_stack)))
