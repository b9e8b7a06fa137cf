"""Decides which stalls are a hang.

Agents know their ranks' deadlines (`HangLimits`), report the ranks past them, and how each of those
stands still. This module decides what that means for all ranks together:

- A stopped process cannot continue by itself: a hang.
- Some ranks wait in a collective, and one that they need is elsewhere and does not move, or keeps
  the GIL: a hang.
- All ranks wait: what they wait for will not come. A hang.
- No rank can be seen to wait (a wait for a GPU looks like the line that it is in), but no rank
  moves, and they are not all in the same place: a hang.
- Some wait, and the rank that they wait for is busy: rank 0 evaluates, or saves. No hang yet.
- No rank waits for another, and all do the same: the script takes its time. No hang yet.

"Yet" ends when an agent reports that a rank is overdue: past many times its deadline. A waiting
rank is never overdue: the one that it waits for is.

An alarm may be false. The next deadline of the same kind is then several times as long, so that a
slow script gets through and its real duration is learnt, while a hang is found again a little
later. Alarms are forgotten with the hours, so that rare hangs are found fast however many there
were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from holdfast.messages.hangs import LINES, Paces, Stall, StallKind
from holdfast.messages.units import NodeId, Rank, Seconds, Time

FORGET = 0.9
"""Decay of a longest duration with each report, so that it follows what is usual now."""
FORGIVE_S: Seconds = 3600.0
"""Time without another alarm after which one alarm is forgotten."""
_ORDER = {"stopped": 0, "gil": 1, "still": 2, "busy": 3, "waits": 4}
_UNMOVED = frozenset({"gil", "still"})


class Hangs(Struct):
    """What is known of stalls and usual durations over the whole job."""

    stalls: dict[NodeId, tuple[Stall, ...]] = field(default_factory=dict)
    """Ranks of the current round that are past their deadlines."""
    step_s: dict[NodeId, float] = field(default_factory=dict)
    """Median step time of each node."""
    longest_s: dict[str, float] = field(default_factory=dict)
    """Longest completed duration of each phase and section, over all ranks."""
    alarms: dict[str, int] = field(default_factory=dict)
    """Alarms that each phase and section has caused."""
    alarm_at: dict[str, Time] = field(default_factory=dict)


class Hang(Struct, frozen=True):
    """A job that makes no progress, and the rank that seems to be the reason."""

    node: NodeId
    stall: Stall
    standing: int
    """Number of ranks past their deadlines."""
    certain: bool
    """Whether a script that is only slow is ruled out."""


def note_paces(hangs: Hangs, node: NodeId, paces: Paces) -> None:
    """Learn from the durations that a node reports."""
    if paces.step_s is not None:
        hangs.step_s[node] = paces.step_s
    for name, longest_s in paces.longest_s.items():
        hangs.longest_s[name] = max(longest_s, FORGET * hangs.longest_s.get(name, 0.0))


def stalled(
    hangs: Hangs, node: NodeId, stalls: tuple[Stall, ...], size: int, now: Time
) -> Hang | None:
    """Take over which ranks of a node are past their deadlines; return the hang if that is one.

    `size` is the number of ranks that have not finished.
    """
    if stalls:
        hangs.stalls[node] = stalls
    else:
        hangs.stalls.pop(node, None)
    placed = [(where, stall) for where, some in hangs.stalls.items() for stall in some]
    found = [stall for _, stall in placed]
    all_wait = bool(found) and len(found) == size and all(s.kind == "waits" for s in found)
    if not (all_wait or _is_stuck(found) or _is_uneven(found, size)):
        return None
    crowds = Counter((stall.kind, stall.place) for stall in found)
    where, worst = min(placed, key=lambda one: _worst_first(one[1], crowds))
    if worst.kind != "stopped":
        _raise_alarm(hangs, worst.where, now)
    return Hang(where, worst, len(found), all_wait or worst.kind == "stopped")


def _is_stuck(stalls: Sequence[Stall]) -> bool:
    """Return whether a rank cannot continue, or does not although others wait."""
    kinds = {stall.kind for stall in stalls}
    overdue = any(stall.overdue and stall.kind != "waits" for stall in stalls)
    return "stopped" in kinds or overdue or ("waits" in kinds and bool(kinds & _UNMOVED))


def _is_uneven(stalls: Sequence[Stall], size: int) -> bool:
    """Return whether no rank moves, and they are not all in the same place."""
    places = [stall.place for stall in stalls if stall.kind == "still" and stall.place]
    locked = sum(stall.kind == "gil" for stall in stalls)
    if len(places) + locked < size:
        return False
    if not all(place % LINES for place in places):  # A rank loops within a function.
        places = [place // LINES for place in places]
    return len(set(places)) + bool(locked) > 1


def _worst_first(stall: Stall, crowds: Mapping[tuple[StallKind, int], int]) -> tuple[float, ...]:
    """Order by kind, then the few before the many at another place, then the longest stall."""
    late = stall.overdue and stall.kind != "waits"
    crowd = crowds[stall.kind, stall.place]
    first = stall.kind != "stopped", not late, _ORDER[stall.kind]
    return *first, crowd, -stall.for_s, stall.rank


def _raise_alarm(hangs: Hangs, where: str, now: Time) -> None:
    """Count an alarm, less those forgotten since the last."""
    forgotten = int((now - hangs.alarm_at.get(where, now)) / FORGIVE_S)
    hangs.alarms[where] = max(0, hangs.alarms.get(where, 0) - forgotten) + 1
    hangs.alarm_at[where] = now


def round_over(hangs: Hangs) -> None:
    """Forget the stalls of the round that ended; what was learnt stays."""
    hangs.stalls.clear()


def paces(hangs: Hangs) -> Paces:
    """Return the usual durations over all ranks, for the workers of the next round."""
    steps = sorted(hangs.step_s.values())
    return Paces(steps[len(steps) // 2] if steps else None, dict(hangs.longest_s))


def sentence(hang: Hang) -> str:
    """Describe a hang by its stalls alone, before the ranks are examined."""
    stall = hang.stall
    how = {
        "stopped": "the process is stopped",
        "gil": "a thread keeps the GIL",
        "still": "the rank does not move",
        "busy": "the rank is busy, but makes no progress",
        "waits": "all ranks wait for each other",
    }[stall.kind]
    return f"hang in {stall.where}: {how}"


def validate(hangs: Hangs) -> None:
    """Check the invariants."""
    ranks: list[Rank] = [stall.rank for some in hangs.stalls.values() for stall in some]
    assert len(set(ranks)) == len(ranks), "a rank is stalled twice"
    assert all(hangs.stalls.values()), "a node without stalls is kept"
    assert hangs.alarms.keys() == hangs.alarm_at.keys(), "an alarm without its time"
