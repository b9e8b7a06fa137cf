"""Decides which rank a stalled job waits for, and whether it is proven that it waits in vain.

Pure: evidence in, verdict out. No healthy rank is blamed, and nothing is concluded from what was
not seen: an empty `guilty` is a good verdict. The rules, the most certain first; the first that
decides is taken:

1. A rank that is stopped, dead, keeps the GIL or waits for its own locks cannot continue by itself.
2. Nor can one whose script has ended, or whose restartable function has returned: if others wait for
   it, it is the one they wait for.
3. Ranks that called different operations under one number never meet. The few differ from the many;
   if there is no majority, no rank is named.
4. Ranks that wait for each other in a circle: none is named, for none is to blame alone.
5. If all ranks take steps, or none has waited for longer than a moment, nothing is wrong.
6. A rank that is stuck in the kernel (state D), unless it waits in a collective.
7. A rank that has not entered the operation that others wait in, and does not wait in another one,
   is the one they wait for. (One that waits elsewhere is followed: the rank that holds *that* up is
   guilty.)
8. All have entered it, but the GPUs of some have not reached it: those are behind as well.
9. Without a recorder: a rank that is certainly in no collective while others are in one. So it is
   before the first collective, too, when ranks wait for each other to start.

If all ranks wait in the same operation, no rank is to blame: the network between them is suspect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from holdfast.core.collectives import WAITED_S, rank_list, told
from holdfast.diagnosis import proofs, wording
from holdfast.diagnosis.frames import InCollective, in_collective, main_thread, verb
from holdfast.diagnosis.fronts import Front, find_fronts
from holdfast.diagnosis.pauses import pause
from holdfast.messages.evidence import Frame, RankEvidence, StackGroup, Verdict, cut
from holdfast.messages.hangs import Proof
from holdfast.messages.units import Rank

JUST_S = 1.0
"""A rank that finished a step this recently does not hang."""
MAX_GROUPS = 16
_GROUP_FRAMES = 48


def judge(
    evidence: Sequence[RankEvidence], world_size: int, finished: Collection[Rank] = ()
) -> Verdict:
    """Return the verdict on the newest round in the evidence.

    `finished` are ranks of it whose scripts had ended and whose processes had exited before any of
    the evidence was taken.
    """
    scene = _compare(evidence, world_size, finished)
    cause = next(filter(None, (rule(scene) for rule in _RULES)), None) or _unknown(scene)
    guilty = [scene.seen[rank] for rank in cause.guilty if rank in scene.seen]
    placed = guilty or [scene.seen[rank] for rank in cause.circle]
    absent = scene.absent if scene.seen and not cause.proof else []
    parts = [
        cause.first or wording.accused((each, cause.what(each)) for each in guilty),
        cause.because,
        "" if cause.says_all else _others(scene, cause.guilty or cause.circle),
        f"nothing is known of {rank_list(absent)}" if absent else "",
    ]
    waiting = scene.likely_waiting - set(cause.guilty)
    return Verdict(
        guilty=tuple(Rank(rank) for rank in cause.guilty),
        sentence="; ".join(part for part in parts if part),
        groups=_stack_groups(scene),
        proof=cause.proof,
        waiting=() if cause.moves else tuple(Rank(rank) for rank in sorted(waiting)),
        place=wording.place(placed[0]) if placed else "",
        pause=pause(guilty[0]) if guilty else "",
        left_s=None if cause.moves else scene.left_s(waiting),
    )


# ---- the evidence of all ranks side by side ----


@dataclass(frozen=True)
class RoundEvidence:
    """All evidence of one round, and what follows from it directly."""

    seen: dict[int, RankEvidence]
    in_collective: dict[int, InCollective]
    fronts: list[Front]
    world_size: int
    finished: frozenset[int]
    """Ranks that have exited and had ended well."""

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
        """Whether every rank has just finished a step, or nobody has waited for longer than a
        moment. Looks at moving ranks do not fit together: each is of another moment."""
        steps = [each.since_step_s for each in self.seen.values()]
        if all(since_s is not None and since_s < JUST_S for since_s in steps):
            return True
        recorded = {rank for front in self.fronts for rank in front.open}
        ages = [front.oldest_s for front in self.fronts]
        brief = all(age is not None and age < WAITED_S for age in ages)
        return bool(self.fronts) and brief and self.likely_waiting <= recorded

    @property
    def absent(self) -> list[int]:
        """Ranks without any evidence."""
        known = self.finished.union(self.seen)
        return [rank for rank in range(self.world_size) if rank not in known]

    def left_s(self, waiting: Collection[int]) -> float | None:
        """Return the time until a process group ends the first of the waiting ranks."""
        fronts = [front for front in self.fronts if front.left_s is not None]
        recorded = {rank for front in fronts for rank in front.waiting}
        others = (self.seen[rank].left_s for rank in waiting if rank in self.seen.keys() - recorded)
        times = [front.left_s for front in fronts if {*front.waiting} & {*waiting}]
        return min((left_s for left_s in (*times, *others) if left_s is not None), default=None)

    def defect(self, rank: int) -> str:
        """Return what keeps a rank from continuing by itself; empty if nothing was seen to."""
        each = self.seen[rank]
        if each.ended:
            return "has ended (its script finished)"
        if each.process_state == "T":
            return "is stopped (SIGSTOP)"
        if each.process_state in ("Z", "X"):
            return "is dead"
        if each.locked:
            return "waits for locks that only its own threads could release"
        return "holds the GIL" if _holds_gil(each) and self.in_collective[rank] != "yes" else ""


def _compare(
    evidence: Sequence[RankEvidence], world_size: int, finished: Collection[int]
) -> RoundEvidence:
    newest = max((each.round for each in evidence), default=0)
    seen = {int(each.rank): each for each in evidence if each.round == newest}
    return RoundEvidence(
        seen=dict(sorted(seen.items())),
        in_collective={rank: _in_collective(each) for rank, each in seen.items()},
        fronts=find_fronts(list(seen.values()), world_size),
        world_size=world_size,
        finished=frozenset(finished),
    )


def _in_collective(evidence: RankEvidence) -> InCollective:
    """Return whether a rank waits in a collective. One that has never called any, and is not in
    the Python code of one, is in none: that includes a GPU that waits for others."""
    by_stack = in_collective(evidence.stacks)
    main = main_thread(evidence.stacks)
    certain = main is not None and main.frames and evidence.collectives == ()
    return "no" if by_stack == "unclear" and certain else by_stack


def _python_stack(evidence: RankEvidence) -> tuple[Frame, ...]:
    """Return the comparable part of the main stack: not every rank has native frames, and their
    addresses differ."""
    main = main_thread(evidence.stacks)
    return tuple(frame for frame in main.frames if not frame.native) if main is not None else ()


def _holds_gil(evidence: RankEvidence) -> bool:
    """Return whether the process lives and one of its threads lets no other run Python."""
    if evidence.stack_source in ("py-spy", "py-spy python only"):
        # Only py-spy sees the holder. Without one the beat is late for another reason.
        return proofs.keeps_gil(evidence) is not None
    return proofs.beat_is_old(evidence)


# ---- the rules ----


@dataclass(frozen=True)
class _Cause:
    guilty: Sequence[int]
    what: Callable[[RankEvidence], str] = wording.doing
    """Returns what a guilty rank does."""
    because: str = ""
    says_all: bool = False
    """Whether the reason already tells who waits where."""
    proof: Proof | None = None
    first: str = ""
    """What is said of the guilty ranks, if not where they are."""
    circle: Sequence[int] = ()
    """Ranks that wait for each other."""
    moves: bool = False
    """Whether nothing is wrong."""


def _broken(scene: RoundEvidence) -> _Cause | None:
    found = [r for r, each in scene.seen.items() if scene.defect(r) and not each.ended]
    waits = [rank for rank in found if not scene.seen[rank].locked or _is_awaited(scene, rank)]
    if not waits:
        return None

    def what(each: RankEvidence) -> str:
        defect = scene.defect(each.rank)
        return defect if defect == "is dead" else wording.at(defect, each)

    proven = [(rank, _proof_of(scene.seen[rank])) for rank in waits]
    proof = next((proof for _, proof in proven if proof), None)
    # What is proven comes first: the place of the verdict is that of its first rank.
    return _Cause([r for r, _ in sorted(proven, key=lambda one: one[1] is None)], what, proof=proof)


def _proof_of(evidence: RankEvidence) -> Proof | None:
    if evidence.process_state == "T":
        return "stopped"
    if evidence.process_state in ("Z", "X"):
        return None  # Its death is reported by itself.
    if evidence.locked:
        return "locked"
    return "gil" if proofs.is_idle_with_gil(evidence) else None


def _is_awaited(scene: RoundEvidence, rank: int) -> bool:
    """Return whether others wait for a rank, which does not wait for them."""
    others = scene.waiting - {rank}
    held_up = [front for front in scene.fronts if rank in front.behind or rank in front.unknown]
    unrecorded = not scene.fronts or scene.seen[rank].collectives is None
    return rank not in scene.waiting and bool(others) and (bool(held_up) or unrecorded)


def _left(scene: RoundEvidence) -> _Cause | None:
    found: set[int] = set()
    proof: Proof | None = None
    for front in scene.fronts:
        ranks, proven = proofs.left(front, scene.seen, scene.finished)
        found.update(ranks)
        proof = "left" if proven else proof
    if not found and scene.waiting and not scene.fronts:  # They wait in what no recorder notes.
        left = {rank for rank, each in scene.seen.items() if each.ended or each.returned}
        found = left | scene.finished
    if not found:
        return None
    one, returned = len(found) == 1, all(r in scene.seen and scene.seen[r].returned for r in found)
    how = f"ended ({'its script' if one else 'their scripts'} finished)"
    if returned:
        how = f"returned from {'its' if one else 'their'} restartable function{'' if one else 's'}"
    first = f"{rank_list(found)} {'has' if one else 'have'} {how}"
    return _Cause(sorted(found), proof=proof, first=first)


def _mismatched(scene: RoundEvidence) -> _Cause | None:
    different = [front.different for front in scene.fronts if front.different is not None]
    if not different:
        return None
    one = next((each for each in different if each.certain), different[0])
    unknown = any(front.unknown for front in scene.fronts if front.different is one)
    proof: Proof | None = "mismatch" if one.certain else None
    said = told(one)
    if one.odd and not unknown:
        return _Cause(one.odd, because=said, says_all=True, proof=proof)
    doubt = "" if proof else "unknown: "
    return _Cause((), because=f"{doubt}{said}", says_all=True, proof=proof)


def _circle(scene: RoundEvidence) -> _Cause | None:
    ranks = sorted(proofs.circle(scene.fronts, scene.seen))
    if not ranks:
        return None
    said = wording.circle([scene.seen[rank] for rank in ranks], scene.fronts)
    return _Cause((), because=said, proof="circle", circle=ranks)


def _moving(scene: RoundEvidence) -> _Cause | None:
    if not scene.seen or not scene.is_moving:
        return None
    return _Cause((), because="no rank waits for another for long", says_all=True, moves=True)


def _stuck(scene: RoundEvidence) -> _Cause | None:
    stuck = [rank for rank, each in scene.seen.items() if each.process_state == "D"]
    # A driver may keep a process there that waits for its GPU, which waits for another rank.
    found = [r for r in stuck if r not in scene.waiting and not scene.is_blocked(r)]
    what = "is stuck in the kernel (state D)"
    return _Cause(found, partial(wording.at, what)) if found else None


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
        if scene.in_collective[rank] == "no" and (not each.collectives or not scene.fronts)
    ]
    return _Cause(found) if found and scene.likely_waiting - set(found) else None


def _unknown(scene: RoundEvidence) -> _Cause:
    """Say what is known when no rank can be named."""

    def cause(text: str, says_all: bool = False) -> _Cause:
        return _Cause((), because=f"unknown: {text}", says_all=says_all)

    if not scene.seen:
        return cause("nothing is known of any rank")
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
    if stands := wording.stands(list(scene.seen.values()), scene.world_size):
        return _Cause((), because=f"{stands}, none waits for another", says_all=True)
    return cause("no rank was seen to wait for another")


_RULES = (
    _broken,
    _left,
    _mismatched,
    _circle,
    _moving,
    _stuck,
    _behind,
    _late,
    _by_stacks,
)


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
        return f"{rank_list(ranks)}: {wording.at(defect, first)}"
    fronts = [front for front in scene.fronts if set(ranks) <= set(front.waiting)]
    if fronts and scene.in_collective[first.rank] != "no":
        return wording.waits(ranks, fronts[0])
    doing = wording.doing(first) if len(members) == 1 else wording.plural(wording.doing(first))
    return f"{rank_list(ranks)}: {doing}"


def _fullest(members: Iterable[RankEvidence]) -> tuple[Frame, ...]:
    """Return the longest stack: one with native frames, if any member has it."""
    mains = [main_thread(each.stacks) for each in members]
    return max((main.frames for main in mains if main is not None), key=len, default=())
