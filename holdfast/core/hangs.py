"""Which silence is a hang.

Agents know their ranks' deadlines (`HangLimits`) and say which are past them, and how each stands
there. Here it is decided what that means, for all ranks together:

- A rank that is stopped, or whose interpreter is locked up, cannot go on by itself: a hang.
- Some wait in a collective, and one that should have come is somewhere else and does not move: a hang.
- All ranks wait: they wait for something that will not come. A hang.
- Some wait, and whoever they wait for is busy: rank 0 evaluates, or saves. No hang, for now.
- Nobody waits for anybody: the script takes its time. No hang, for now.

"For now" ends when an agent says that a rank is overdue: past many times its deadline.

An alarm may be false. The next deadline of the same kind is then several times as long, so a script
that was only slow gets through, and one that hangs is found again, a little later.
"""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.messages.hangs import Paces, Stall
from holdfast.messages.units import NodeId, Rank

FORGET = 0.9
"""With each report a longest time shrinks towards what is usual now."""
_ORDER = {"stopped": 0, "gil": 1, "still": 2, "overdue": 3, "busy": 4, "waits": 5}


class Hangs(Struct):
    stalls: dict[NodeId, tuple[Stall, ...]] = field(default_factory=dict)
    """Ranks of the round in force that are past their deadlines."""
    step_s: dict[NodeId, float] = field(default_factory=dict)
    longest_s: dict[str, float] = field(default_factory=dict)
    """By phase and section: the longest that any rank was seen to take."""
    alarms: dict[str, int] = field(default_factory=dict)
    """How often each was the reason for an alarm."""


class Hang(Struct, frozen=True):
    """A job that stands still, and who seems to be the reason."""

    node: NodeId
    stall: Stall
    standing: int
    """How many ranks are past their deadlines."""


def note_paces(hangs: Hangs, node: NodeId, paces: Paces) -> None:
    if paces.step_s is not None:
        hangs.step_s[node] = paces.step_s
    for name, longest_s in paces.longest_s.items():
        hangs.longest_s[name] = max(longest_s, FORGET * hangs.longest_s.get(name, 0.0))


def stalled(hangs: Hangs, node: NodeId, stalls: tuple[Stall, ...], size: int) -> Hang | None:
    """A node says which of its ranks are past their deadlines now; is that a hang?"""
    if stalls:
        hangs.stalls[node] = stalls
    else:
        hangs.stalls.pop(node, None)
    everybody = [(where, stall) for where, some in hangs.stalls.items() for stall in some]
    if not everybody:
        return None
    kinds = {stall.kind for _, stall in everybody}
    stuck = bool(kinds & {"stopped", "gil", "overdue"})
    missed = "waits" in kinds and "still" in kinds
    all_wait = kinds == {"waits"} and len(everybody) == size
    if not (stuck or missed or all_wait):
        return None
    where, worst = min(everybody, key=lambda one: (_ORDER[one[1].kind], one[1].rank))
    hangs.alarms[worst.where] = hangs.alarms.get(worst.where, 0) + 1
    return Hang(where, worst, len(everybody))


def round_over(hangs: Hangs) -> None:
    hangs.stalls.clear()


def paces(hangs: Hangs) -> Paces:
    """What is known of all ranks, for those that start anew."""
    steps = sorted(hangs.step_s.values())
    return Paces(steps[len(steps) // 2] if steps else None, dict(hangs.longest_s))


def sentence(hang: Hang) -> str:
    """What is known at once, before anybody looked closer."""
    stall = hang.stall
    how = {
        "stopped": "is stopped",
        "gil": "holds the interpreter's lock",
        "still": "does not move",
        "overdue": "is overdue",
        "busy": "is busy, but gets nowhere",
        "waits": "waits, as all others do",
    }[stall.kind]
    return f"hangs: {how} in {stall.where}"


def validate(hangs: Hangs) -> None:
    ranks: list[Rank] = [stall.rank for some in hangs.stalls.values() for stall in some]
    assert len(set(ranks)) == len(ranks), "a rank stands still twice"
    assert all(hangs.stalls.values()), "a node without stalls is kept"
