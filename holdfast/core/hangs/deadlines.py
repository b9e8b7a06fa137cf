"""Sets when a rank is late, by what its phases and sections usually take.

Late is only a suspicion: the agent then looks at the rank and reports it, and nothing is done to it.
What is usual is the median of the latest durations, because the longest ones are often waits for other
ranks. The limits for heartbeats are here too, for the worker that beats, the agent that looks and the
verdict that explains.
"""

from __future__ import annotations

from holdfast.messages.units import Seconds

BEAT_EVERY_S: Seconds = 0.1
OLD_BEAT_S: Seconds = 1.25
"""A heartbeat older than this means that no other thread got the GIL."""
LATE_FLOOR_S: Seconds = 1.0
LATE_BASE_S: Seconds = 0.5
LATE_FACTOR = 1.2
LATE_UNKNOWN_S: Seconds = 5.0
"""Limit while it is unknown what is usual, as before the first step."""
SECTION_FLOOR_S: Seconds = 5.0
SECTION_FACTOR = 2.0
ENDED_LATE_S: Seconds = 2.0
"""Time for a process to exit after its script has ended."""


def late_between_marks(usual_s: Seconds | None) -> Seconds:
    """Return the time since its last mark after which a rank is late."""
    if usual_s is None:
        return LATE_UNKNOWN_S
    return max(LATE_FLOOR_S, LATE_BASE_S + LATE_FACTOR * usual_s)


def late_in_collective(usual_s: Seconds | None) -> Seconds:
    """Return the time at one line of a collective after which a rank is late, by the usual duration of
    the whole phase."""
    if usual_s is None:
        return LATE_UNKNOWN_S
    return max(LATE_FLOOR_S, LATE_FACTOR * usual_s)


def late_in_section(usual_s: Seconds | None) -> Seconds:
    """Return the time in a section after which a rank is late."""
    return max(SECTION_FLOOR_S, SECTION_FACTOR * (usual_s or 0.0))
