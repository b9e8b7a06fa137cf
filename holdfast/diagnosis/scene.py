"""All evidence of one round side by side, and what follows from it at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from holdfast.diagnosis.fronts import Front, find_fronts
from holdfast.diagnosis.places import OLD_BEAT_S, Stance, main_thread, stance, thread_stance, verb
from holdfast.messages.evidence import Frame, RankEvidence

JUST_S = 1.0
"""Who finished a step so lately does not hang: nobody is called hung so soon."""


@dataclass(frozen=True)
class Scene:
    seen: dict[int, RankEvidence]
    stances: dict[int, Stance]
    fronts: list[Front]
    world_size: int

    @cached_property
    def waiting(self) -> set[int]:
        """Ranks that wait for others: they are in an operation and not known to be elsewhere."""
        inside = {rank for front in self.fronts for rank in front.waiting}
        by_stack = {rank for rank, own in self.stances.items() if own == "waits"}
        return by_stack | {r for r in inside if self.stances.get(r) != "elsewhere"}

    @cached_property
    def likely_waiting(self) -> set[int]:
        """Those, and ranks that stand just as they do; or as most ranks do, if most are blocked.

        Good enough to say that somebody waits, never to excuse a rank or to blame it.
        """
        alike: dict[tuple[Frame, ...], set[int]] = defaultdict(set)
        for rank, each in self.seen.items():
            if self.stances[rank] != "elsewhere" and not self.ailment(rank):
                alike[python_stack(each)].add(rank)
        found = set(self.waiting)
        for stack, ranks in alike.items():
            most = len(ranks) * 2 > len(self.seen) and all(self.is_blocked(r) for r in ranks)
            if stack and (ranks & self.waiting or most):
                found |= ranks
        return found

    def is_blocked(self, rank: int) -> bool:
        """Whether its main thread waits for something, whatever that is."""
        main = main_thread(self.seen[rank].stacks)
        return main is not None and verb(main) == "waits"

    @property
    def is_moving(self) -> bool:
        """Whether every rank that was seen has just finished a step. Looks at ranks that move do not
        fit together: each is of another moment."""
        steps = [each.since_step_s for each in self.seen.values()]
        return all(since_s is not None and since_s < JUST_S for since_s in steps)

    @property
    def absent(self) -> list[int]:
        """Ranks of which there is no evidence at all."""
        return [rank for rank in range(self.world_size) if rank not in self.seen]

    def ailment(self, rank: int) -> str:
        """What keeps a rank from going on by itself; empty when nothing is seen to."""
        each = self.seen[rank]
        if each.process_state == "T":
            return "is stopped (SIGSTOP)"
        if each.process_state in ("Z", "X"):
            return "is dead"
        return "holds the GIL" if _holds_gil(each) and self.stances[rank] != "waits" else ""


def look_at(evidence: Sequence[RankEvidence], world_size: int) -> Scene:
    """The newest round that there is evidence of."""
    newest = max((each.round for each in evidence), default=0)
    seen = {int(each.rank): each for each in evidence if each.round == newest}
    return Scene(
        seen=dict(sorted(seen.items())),
        stances={rank: stance(each.stacks) for rank, each in seen.items()},
        fronts=find_fronts(list(seen.values()), world_size),
        world_size=world_size,
    )


def python_stack(evidence: RankEvidence) -> tuple[Frame, ...]:
    """The main thread's place as far as it can be compared: not every rank has native frames, and
    their addresses differ."""
    main = main_thread(evidence.stacks)
    return tuple(frame for frame in main.frames if not frame.native) if main is not None else ()


def _holds_gil(evidence: RankEvidence) -> bool:
    """Whether its interpreter lives and lets no other thread run."""
    if evidence.beat_age_s is None or evidence.beat_age_s < OLD_BEAT_S:
        return False
    if evidence.process_state not in ("R", "S"):
        return False
    if evidence.stack_source in ("py-spy", "py-spy python only"):
        # Only py-spy sees who has it. If nobody does, the beat is late for another reason; and a
        # careless extension may have it while it waits for the GPU, which waits for another rank.
        holders = [thread for thread in evidence.stacks if thread.holds_gil]
        return any(thread_stance(thread) == "elsewhere" for thread in holders)
    return True
