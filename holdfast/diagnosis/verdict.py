"""Decides which rank a stalled job waits for.

Pure: evidence in, verdict out. No healthy rank is blamed, and nothing is concluded from what was
not seen: an empty `guilty` with a sentence that begins with "unknown" is a good verdict. The rules,
the most certain first; the first that names a rank decides:

1. A rank that is stopped, dead or keeps the GIL cannot continue by itself.
2. Nor can one that is stuck in the kernel (state D), unless it waits in a collective.
3. Ranks that called different operations under one number never meet. The few differ from the many;
   if there is no majority, no rank is named.
4. A rank that has not entered the operation that others wait in, and does not wait in another one,
   is the one they wait for. (One that waits elsewhere is followed: the rank that holds *that* up is
   guilty.)
5. All have entered it, but the GPUs of some have not reached it: those are behind as well.
6. Without a recorder: a rank that is certainly in no collective while others are in one.

If all ranks wait in the same operation, no rank is to blame: the network between them is suspect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from holdfast.core.hangs.deadlines import OLD_BEAT_S
from holdfast.diagnosis import wording
from holdfast.diagnosis.frames import (
    InCollective,
    in_collective,
    main_thread,
    thread_in_collective,
    verb,
)
from holdfast.diagnosis.fronts import Front, find_fronts
from holdfast.messages.evidence import Frame, RankEvidence, StackGroup, Verdict, cut

JUST_S = 1.0
"""A rank that finished a step this recently does not hang."""
MAX_GROUPS = 16
_GROUP_FRAMES = 48


def judge(evidence: Sequence[RankEvidence], world_size: int) -> Verdict:
    """Return the verdict on the newest round in the evidence."""
    scene = _compare(evidence, world_size)
    rules = (_broken, _stuck, _mismatched, _behind, _late, _by_stacks)
    cause = next(filter(None, (rule(scene) for rule in rules)), None) or _unknown(scene)
    guilty = [scene.seen[rank] for rank in cause.guilty if rank in scene.seen]
    absent = scene.absent if scene.seen else []
    parts = [
        wording.accused((each, cause.what(each)) for each in guilty),
        cause.because,
        "" if cause.says_all else _others(scene, cause.guilty),
        f"nothing is known of {wording.rank_list(absent)}" if absent else "",
    ]
    return Verdict(
        guilty=tuple(each.rank for each in guilty),
        sentence="; ".join(part for part in parts if part),
        groups=_stack_groups(scene),
    )


# ---- the evidence of all ranks side by side ----


@dataclass(frozen=True)
class RoundEvidence:
    """All evidence of one round, and what follows from it directly."""

    seen: dict[int, RankEvidence]
    in_collective: dict[int, InCollective]
    fronts: list[Front]
    world_size: int

    @cached_property
    def waiting(self) -> set[int]:
        """Ranks that wait for others: in an operation and not known to be elsewhere."""
        inside = {rank for front in self.fronts for rank in front.waiting}
        by_stack = {rank for rank, answer in self.in_collective.items() if answer == "yes"}
        return by_stack | {rank for rank in inside if self.in_collective.get(rank) != "no"}

    @cached_property
    def likely_waiting(self) -> set[int]:
        """Waiting ranks and those at the same place as one; or as most ranks, if most are blocked.

        Enough to say that some rank waits, never to excuse or blame one.
        """
        alike: dict[tuple[Frame, ...], set[int]] = defaultdict(set)
        for rank, each in self.seen.items():
            if self.in_collective[rank] != "no" and not self.defect(rank):
                alike[_python_stack(each)].add(rank)
        found = set(self.waiting)
        for stack, ranks in alike.items():
            most = len(ranks) * 2 > len(self.seen) and all(self.is_blocked(r) for r in ranks)
            if stack and (ranks & self.waiting or most):
                found |= ranks
        return found

    def is_blocked(self, rank: int) -> bool:
        """Return whether its main thread waits for anything at all."""
        main = main_thread(self.seen[rank].stacks)
        return main is not None and verb(main) == "waits"

    @property
    def is_moving(self) -> bool:
        """Whether every rank has just finished a step. Looks at moving ranks do not fit together:
        each is of another moment."""
        steps = [each.since_step_s for each in self.seen.values()]
        return all(since_s is not None and since_s < JUST_S for since_s in steps)

    @property
    def absent(self) -> list[int]:
        """Ranks without any evidence."""
        return [rank for rank in range(self.world_size) if rank not in self.seen]

    def defect(self, rank: int) -> str:
        """Return what keeps a rank from continuing by itself; empty if nothing was seen to."""
        each = self.seen[rank]
        if each.process_state == "T":
            return "is stopped (SIGSTOP)"
        if each.process_state in ("Z", "X"):
            return "is dead"
        return "holds the GIL" if _holds_gil(each) and self.in_collective[rank] != "yes" else ""


def _compare(evidence: Sequence[RankEvidence], world_size: int) -> RoundEvidence:
    newest = max((each.round for each in evidence), default=0)
    seen = {int(each.rank): each for each in evidence if each.round == newest}
    return RoundEvidence(
        seen=dict(sorted(seen.items())),
        in_collective={rank: in_collective(each.stacks) for rank, each in seen.items()},
        fronts=find_fronts(list(seen.values()), world_size),
        world_size=world_size,
    )


def _python_stack(evidence: RankEvidence) -> tuple[Frame, ...]:
    """Return the comparable part of the main stack: not every rank has native frames, and their
    addresses differ."""
    main = main_thread(evidence.stacks)
    return tuple(frame for frame in main.frames if not frame.native) if main is not None else ()


def _holds_gil(evidence: RankEvidence) -> bool:
    """Return whether the process lives and one of its threads lets no other run Python."""
    if evidence.beat_age_s is None or evidence.beat_age_s < OLD_BEAT_S:
        return False
    if evidence.process_state not in ("R", "S"):
        return False
    if evidence.stack_source in ("py-spy", "py-spy python only"):
        # Only py-spy sees the holder. Without one the beat is late for another reason; and a careless
        # extension may keep the GIL while it waits for the GPU, which waits for another rank.
        holders = [thread for thread in evidence.stacks if thread.holds_gil]
        return any(thread_in_collective(thread) == "no" for thread in holders)
    return True


# ---- the rules ----


@dataclass(frozen=True)
class _Cause:
    guilty: Sequence[int]
    what: Callable[[RankEvidence], str] = wording.doing
    """Returns what a guilty rank does."""
    because: str = ""
    says_all: bool = False
    """Whether the reason already tells who waits where."""


def _broken(scene: RoundEvidence) -> _Cause | None:
    found = [rank for rank in scene.seen if scene.defect(rank)]

    def what(each: RankEvidence) -> str:
        defect = scene.defect(each.rank)
        return defect if defect == "is dead" else wording.at(defect, each)

    return _Cause(found, what) if found else None


def _stuck(scene: RoundEvidence) -> _Cause | None:
    stuck = [rank for rank, each in scene.seen.items() if each.process_state == "D"]
    # A driver may keep a process there that waits for its GPU, which waits for another rank.
    found = [r for r in stuck if r not in scene.waiting and not scene.is_blocked(r)]
    what = "is stuck in the kernel (state D)"
    return _Cause(found, partial(wording.at, what)) if found else None


def _mismatched(scene: RoundEvidence) -> _Cause | None:
    for front in scene.fronts:
        if front.different:
            many = max(front.different.values(), key=len)
            few = [rank for ranks in front.different.values() for rank in ranks if rank not in many]
            sure = len(many) > len(few) and not front.unknown
            said = wording.mismatch(front)
            if sure:
                return _Cause(sorted(few), because=said, says_all=True)
            return _Cause((), because=f"unknown: {said}", says_all=True)
    return None


def _behind(scene: RoundEvidence) -> _Cause | None:
    behind = {rank for front in scene.fronts for rank in front.behind} - scene.waiting
    return _Cause(sorted(behind)) if behind else None


def _late(scene: RoundEvidence) -> _Cause | None:
    for front in scene.fronts:
        elsewhere = {rank for f in scene.fronts if f is not front for rank in f.waiting}
        what = f"has not reached {wording.name(front)} on its GPU and is"
        if late := sorted(set(front.late) - elsewhere):
            return _Cause(late, partial(wording.at, what))
    return None


def _by_stacks(scene: RoundEvidence) -> _Cause | None:
    """Recorders take precedence where there are any: a rank that finished its part may be
    anywhere."""
    found = [
        rank
        for rank, each in scene.seen.items()
        if scene.in_collective[rank] == "no" and (each.collectives is None or not scene.fronts)
    ]
    return _Cause(found) if found and scene.likely_waiting else None


def _unknown(scene: RoundEvidence) -> _Cause:
    """Say what is known when no rank can be named."""

    def cause(text: str, says_all: bool = False) -> _Cause:
        return _Cause((), because=f"unknown: {text}", says_all=says_all)

    if not scene.seen:
        return cause("nothing is known of any rank")
    if scene.is_moving:
        return cause("all ranks finish steps, and none holds the others up")
    if any(front.behind for front in scene.fronts):
        return cause("ranks wait for each other in a cycle, or in operations that are not recorded")
    for front in scene.fronts:
        suspect = f"{wording.name(front)}; the network between them is suspect"
        if len(front.waiting) == scene.world_size:
            return cause(f"all ranks wait in {suspect}", says_all=True)
        if not front.unknown and len(front.waiting) > 1:
            return cause(f"all members have entered {suspect}")
    if scene.waiting:
        return cause("the evidence that could tell which rank they wait for is missing")
    return cause("no rank was seen to wait for another")


# ---- saying it ----


def _others(scene: RoundEvidence, guilty: Sequence[int]) -> str:
    """Say which ranks wait, and in what."""
    told = {rank for front in scene.fronts for rank in front.waiting}.union(guilty)
    rest = sorted(scene.likely_waiting - told)
    by_stack = wording.wait_somewhere(rest) if rest else ""
    return "; ".join(filter(None, (wording.waiters(scene.fronts, guilty), by_stack)))


def _stack_groups(scene: RoundEvidence) -> tuple[StackGroup, ...]:
    """Group the ranks with the same Python stack, the largest group first: of 4,096 stacks a person
    wants to read two."""
    alike: dict[tuple[object, ...], list[RankEvidence]] = {}
    for rank, each in scene.seen.items():
        key = (_python_stack(each), rank in scene.likely_waiting, scene.defect(rank))
        alike.setdefault(key, []).append(each)
    groups = [
        StackGroup(
            ranks=tuple(each.rank for each in members),
            headline=_headline(scene, members),
            frames=cut(_fullest(members), _GROUP_FRAMES),
        )
        for members in alike.values()
    ]
    return tuple(sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))[:MAX_GROUPS])


def _headline(scene: RoundEvidence, members: Sequence[RankEvidence]) -> str:
    first = members[0]
    ranks = [int(each.rank) for each in members]
    if defect := scene.defect(first.rank):
        return f"{wording.rank_list(ranks)}: {wording.at(defect, first)}"
    fronts = [front for front in scene.fronts if set(ranks) <= set(front.waiting)]
    if fronts and scene.in_collective[first.rank] != "no":
        return wording.waits(ranks, fronts[0])
    doing = wording.doing(first) if len(members) == 1 else wording.plural(wording.doing(first))
    return f"{wording.rank_list(ranks)}: {doing}"


def _fullest(members: Iterable[RankEvidence]) -> tuple[Frame, ...]:
    """Return the longest stack: one with native frames, if any member has it."""
    mains = [main_thread(each.stacks) for each in members]
    return max((main.frames for main in mains if main is not None), key=len, default=())
