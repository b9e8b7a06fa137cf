"""How long a rank that others wait for may show no sign of life, by the place it is at.

The first time a place is seen it has the floor (`--hang-after`, 60 s). Pauses that ended by
themselves are learnt from: a place that was seen to pause for long gets several times that, and
only one that was seen often gets less than the floor. A place that is a section, or known by a
framework's own name (a save, an evaluation), has much longer. Nothing is learnt from a rank that
was ended: a true hang leaves the deadline as it is.

A place that was taken for a hang may have been healthy: the same step then comes to the same pause.
Until the job has got past that step the place has several times as long, so no healthy pause costs
a restart twice.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.core.hangs.state import Hangs, remember, remembered
from holdfast.messages.hangs import HangTerms, Pause
from holdfast.messages.units import Seconds, StepNumber

FLOOR_S: Seconds = 60.0
LEARNT_LEAST_S: Seconds = 30.0
OFTEN = 10
"""Pauses at a place from which on its deadline may be below the floor."""
FACTOR = 5.0
NAMED_S: Seconds = 600.0
"""Deadline of a section, and of what a framework names, until it was seen to end."""
GRANT_FACTOR = 4.0
GRANT_MOST_S: Seconds = 3600.0


def floor_s(terms: HangTerms) -> Seconds:
    return FLOOR_S if terms.hang_after is None else terms.hang_after


def silence_s(hangs: Hangs, place: str, pause: str, highest: StepNumber) -> Seconds | None:
    """Return how long a rank may show no sign of life there; None for as long as it likes."""
    known, floor = remembered(hangs, place), floor_s(hangs.terms)
    if known.trusted:
        return None
    factor = hangs.terms.safety_factor or FACTOR
    learnt = factor * known.still_s
    limit_s = max(min(floor, LEARNT_LEAST_S) if known.seen >= OFTEN else floor, learnt)
    if pause:
        longest = hangs.longest_s.get(pause)
        limit_s = max(limit_s, NAMED_S if longest is None else factor * longest)
    if known.grant_s and highest <= known.grant_step:
        limit_s = max(limit_s, known.grant_s)
    return limit_s


def note_pause(hangs: Hangs, pause: Pause) -> None:
    """Learn from a pause that ended by itself."""
    known = remembered(hangs, pause.place)
    longest_s = max(known.still_s, pause.still_s)
    remember(hangs, pause.place, replace(known, seen=known.seen + 1, still_s=longest_s))


def note_wait(hangs: Hangs, place: str, waited_s: Seconds) -> None:
    """Learn how long others waited for a rank there that went on by itself."""
    known = remembered(hangs, place)
    if waited_s > known.waited_s:
        remember(hangs, place, replace(known, waited_s=waited_s))


def grant_more(hangs: Hangs, place: str, limit_s: Seconds, step: StepNumber) -> None:
    """Give a place that was taken for a hang more time, should the same step come to it again."""
    more_s = min(GRANT_MOST_S, GRANT_FACTOR * limit_s)
    known = remembered(hangs, place)
    remember(hangs, place, replace(known, grant_s=more_s, grant_step=step))


def trust(hangs: Hangs, place: str) -> None:
    """Leave ranks at this place alone from now on."""
    remember(hangs, place, replace(remembered(hangs, place), trusted=True))
