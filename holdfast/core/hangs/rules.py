"""Which silence is a hang.

Agents know their ranks' deadlines (`HangLimits`) and say which are past them, and how each stands
there. Here it is decided what that means, for all ranks together:

- A rank that is stopped cannot go on by itself: a hang.
- Some wait in a collective, and one that should have come is somewhere else and does not move, or
  holds its interpreter's lock: a hang.
- All ranks wait: they wait for something that will not come. A hang.
- Nobody can be seen to wait (a wait for a GPU looks like the line that it is in), but no rank moves,
  and they are not all in the same place: a hang.
- Some wait, and whoever they wait for is busy: rank 0 evaluates, or saves. No hang, for now.
- Nobody waits for anybody, and all do the same: the script takes its time. No hang, for now.

"For now" ends when an agent says that a rank is overdue: past many times its deadline. One that waits
is never overdue: whoever it waits for is.

An alarm may be false. The next deadline of the same kind is then several times as long, so a script
that was only slow gets through, is seen to take that long, and one that hangs is found again, a little
later. Alarms are forgotten with the hours, so that rare hangs are found fast, however many there were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from holdfast.messages.hangs import LINES, Paces, Stall, StallKind
from holdfast.messages.units import NodeId, Rank, Seconds, Time

FORGET = 0.9
"""With each report a longest time shrinks towards what is usual now."""
FORGIVE_S: Seconds = 3600.0
"""After which time without another one an alarm counts no more."""
_ORDER = {"stopped": 0, "gil": 1, "still": 2, "busy": 3, "waits": 4}
_UNMOVED = frozenset({"gil", "still"})


class Hangs(Struct):
    stalls: dict[NodeId, tuple[Stall, ...]] = field(default_factory=dict)
    """Ranks of the round in force that are past their deadlines."""
    step_s: dict[NodeId, float] = field(default_factory=dict)
    longest_s: dict[str, float] = field(default_factory=dict)
    """By phase and section: the longest that any rank was seen to take."""
    alarms: dict[str, int] = field(default_factory=dict)
    """How often each was the reason for an alarm."""
    alarm_at: dict[str, Time] = field(default_factory=dict)


class Hang(Struct, frozen=True):
    """A job that stands still, and who seems to be the reason."""

    node: NodeId
    stall: Stall
    standing: int
    """How many ranks are past their deadlines."""
    certain: bool
    """It cannot be a script that is only slow."""


def note_paces(hangs: Hangs, node: NodeId, paces: Paces) -> None:
    if paces.step_s is not None:
        hangs.step_s[node] = paces.step_s
    for name, longest_s in paces.longest_s.items():
        hangs.longest_s[name] = max(longest_s, FORGET * hangs.longest_s.get(name, 0.0))


def stalled(
    hangs: Hangs, node: NodeId, stalls: tuple[Stall, ...], size: int, now: Time
) -> Hang | None:
    """A node says which of its ranks are past their deadlines now; is that a hang?

    `size` is the number of ranks that have not finished.
    """
    if stalls:
        hangs.stalls[node] = stalls
    else:
        hangs.stalls.pop(node, None)
    everybody = [(where, stall) for where, some in hangs.stalls.items() for stall in some]
    found = [stall for _, stall in everybody]
    all_wait = bool(found) and len(found) == size and all(s.kind == "waits" for s in found)
    if not (all_wait or _is_stuck(found) or _is_uneven(found, size)):
        return None
    crowds = Counter((stall.kind, stall.place) for stall in found)
    where, worst = min(everybody, key=lambda one: _worst_first(one[1], crowds))
    if worst.kind != "stopped":
        _raise_alarm(hangs, worst.where, now)
    return Hang(where, worst, len(found), all_wait or worst.kind == "stopped")


def _is_stuck(stalls: Sequence[Stall]) -> bool:
    """Whether somebody cannot go on, or does not although others wait."""
    kinds = {stall.kind for stall in stalls}
    overdue = any(stall.overdue and stall.kind != "waits" for stall in stalls)
    return "stopped" in kinds or overdue or ("waits" in kinds and bool(kinds & _UNMOVED))


def _is_uneven(stalls: Sequence[Stall], size: int) -> bool:
    """Whether no rank moves, and they are not all in the same place."""
    places = [stall.place for stall in stalls if stall.kind == "still" and stall.place]
    locked = sum(stall.kind == "gil" for stall in stalls)
    if len(places) + locked < size:
        return False
    if not all(place % LINES for place in places):  # Somebody goes round within a function.
        places = [place // LINES for place in places]
    return len(set(places)) + bool(locked) > 1


def _worst_first(stall: Stall, crowds: Mapping[tuple[StallKind, int], int]) -> tuple[float, ...]:
    """Of those who stand alike the few, where there are many elsewhere, and who does so longest."""
    late = stall.overdue and stall.kind != "waits"
    crowd = crowds[stall.kind, stall.place]
    first = stall.kind != "stopped", not late, _ORDER[stall.kind]
    return *first, crowd, -stall.for_s, stall.rank


def _raise_alarm(hangs: Hangs, where: str, now: Time) -> None:
    forgiven = int((now - hangs.alarm_at.get(where, now)) / FORGIVE_S)
    hangs.alarms[where] = max(0, hangs.alarms.get(where, 0) - forgiven) + 1
    hangs.alarm_at[where] = now


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
        "busy": "is busy, but gets nowhere",
        "waits": "all ranks wait for each other",
    }[stall.kind]
    return f"hangs: {how} in {stall.where}"


def validate(hangs: Hangs) -> None:
    ranks: list[Rank] = [stall.rank for some in hangs.stalls.values() for stall in some]
    assert len(set(ranks)) == len(ranks), "a rank stands still twice"
    assert all(hangs.stalls.values()), "a node without stalls is kept"
    assert hangs.alarms.keys() == hangs.alarm_at.keys(), "an alarm without its time"
