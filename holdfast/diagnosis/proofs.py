"""Decides what proves that a job cannot continue.

A rank that is late proves nothing: it may evaluate, upload or compile. A proof is a fact that no
patience changes, and a wrong one restarts a healthy job, so each is drawn only from what was seen for
certain; in doubt there is none.

*Left*: nobody finishes an all_reduce before all members have entered it. If ranks wait in one that a
member has not entered, and that member's script has ended, it never will. A process that still lives
may have a thread or an exit handler that calls collectives: then it is not proven.

*Circle*: a set of ranks, each waiting in an operation that another of the set has not entered. None
of them can leave its wait, so none can enter another's. The looks at the ranks need not be of one
moment: the first of them to leave its wait would need another that had left its wait before. But the
recorder and the wait of one rank must be of one moment (`RankEvidence.blocked`). A recv waits for a
send that was not called if the peer has called fewer sends than the rank has receives up to that one;
and so a send for a recv.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.core.hangs.deadlines import OLD_BEAT_S
from holdfast.diagnosis.frames import (
    is_library,
    main_thread,
    may_call,
    thread_in_collective,
    verb,
)
from holdfast.diagnosis.fronts import Front
from holdfast.messages.evidence import RankEvidence, ThreadStack
from holdfast.messages.units import Seconds

GIL_IDLE_S: Seconds = 3.0
"""A native call that keeps the GIL must have done nothing for this long: one that sleeps for a moment
is no hang. `core.hangs` wants to see it again after that."""

_WAITS_OUTSIDE = {"reads", "writes", "computes"}


def beat_is_old(evidence: RankEvidence) -> bool:
    """Return whether a living process has not beaten for so long that its GIL must be taken."""
    return (evidence.beat_age_s or 0.0) >= OLD_BEAT_S and evidence.process_state in ("R", "S")


def keeps_gil(evidence: RankEvidence) -> ThreadStack | None:
    """Return the thread that lets no other run Python; None if there is none, or none was seen."""
    if not beat_is_old(evidence):
        return None
    holders = [thread for thread in evidence.stacks if thread.holds_gil]
    # A careless extension may keep the GIL while it waits for the GPU, which waits for another rank.
    return next((t for t in holders if thread_in_collective(t) == "no"), None)


def is_idle_with_gil(evidence: RankEvidence) -> bool:
    """Return whether a native call keeps the GIL, and neither runs nor waits for files or peers."""
    holder = keeps_gil(evidence)
    if holder is None or evidence.idle_s is None or evidence.idle_s < GIL_IDLE_S:
        return False
    return evidence.process_state == "S" and verb(holder) not in _WAITS_OUTSIDE


def has_left(evidence: RankEvidence) -> bool:
    """Return whether a rank will never call a collective again."""
    if evidence.returned:  # It calls none before all others have returned, too.
        return not _has_callers(evidence)
    if not evidence.ended:
        return False
    if evidence.process_state in ("X", "Z"):
        return True
    main = main_thread(evidence.stacks)
    if main is None:
        return False
    exit_handler = any(f.file and not f.native and not is_library(f.file) for f in main.frames)
    return not exit_handler and not _has_callers(evidence)


def left(
    front: Front, seen: Mapping[int, RankEvidence], finished: Collection[int]
) -> tuple[list[int], bool]:
    """Return the members that ended and have not entered a front, and whether that is proven."""
    ended = [rank for rank in front.behind if seen[rank].ended or seen[rank].returned]
    gone = [rank for rank in front.unknown if rank in finished and rank not in seen]
    certain = front.needs_all and front.is_old
    proven = certain and any(has_left(seen[rank]) for rank in ended)
    if gone and not proven:
        # If all others have entered it, a finished rank may have finished this operation, too, and the
        # others are about to: nobody knows when it came. If another one is missing, it has not.
        proven = certain and any(rank not in ended for rank in front.behind)
    return sorted([*ended, *gone]), proven


def circle(fronts: Sequence[Front], seen: Mapping[int, RankEvidence]) -> frozenset[int]:
    """Return ranks that wait for each other in a circle; not those that only wait for them."""
    stuck = {rank for rank, each in seen.items() if each.blocked and not _has_callers(each)}
    while True:
        held = {rank for rank in stuck if _is_held(rank, stuck, fronts)}
        if held == stuck:
            break
        stuck = held
    while True:
        awaited = {other for front in fronts if stuck & set(front.open) for other in front.behind}
        if stuck <= awaited:
            return frozenset(stuck)
        stuck &= awaited


def _is_held(rank: int, stuck: Collection[int], fronts: Sequence[Front]) -> bool:
    """Return whether every operation that a rank is in waits for one of the stuck ranks."""
    own = [front for front in fronts if rank in front.open]
    return bool(own) and all(
        front.holds(rank) and any(other in stuck for other in front.behind) for front in own
    )


def _has_callers(evidence: RankEvidence) -> bool:
    """Return whether other threads than the one that trains may call collectives."""
    main = main_thread(evidence.stacks)
    return main is None or any(may_call(t) for t in evidence.stacks if t is not main)
