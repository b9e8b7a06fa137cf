"""The vocabulary of stalls: how a rank stands still, and how long phases and sections usually
take."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.messages.units import Rank, Seconds

StallKind = Literal["stopped", "gil", "waits", "still", "busy"]
"""How a rank stands still: its process is stopped; a thread keeps the GIL; it waits in a
collective; it is elsewhere and does not move; or it moves without reaching the next mark."""

LINES = 1 << 24
"""A place is a number for the function times this, plus the line."""
FIRST_STEP = "first step"
"""The name of the time from a script's start to the end of its first step."""

Name = Annotated[str, Meta(max_length=64)]


class Stall(Struct, frozen=True):
    """A rank past its deadline."""

    rank: Rank
    kind: StallKind
    where: Name
    """The phase or section it is in."""
    for_s: Seconds
    limit_s: Seconds
    overdue: bool = False
    """Whether it is so late that its kind does not matter any more."""
    place: int = 0
    """Code location of a still rank, the same number on all ranks. Line 0 of the function if the
    rank loops within it; 0 if it stays nowhere for long."""


class Paces(Struct, frozen=True):
    """How long things take on a node's ranks: what deadlines are learnt from."""

    step_s: Seconds | None = None
    """Median step time."""
    longest_s: dict[Name, Seconds] = {}
    """Longest completed duration of each phase and section."""


class HangTerms(Struct, frozen=True, kw_only=True):
    """The user's own deadlines; those left unset are learnt. The names are NVRx's."""

    detect: bool = True
    initial_rank_heartbeat_timeout: Seconds | None = None
    """Until a process's first step."""
    rank_heartbeat_timeout: Seconds | None = None
    """Between two signs of progress after the first step."""
    rank_out_of_section_timeout: Seconds | None = None
    """Between two signs of progress outside of all sections."""
    rank_section_timeouts: dict[Name, Seconds] = {}
    safety_factor: float | None = None
    """Factor from the longest observed duration to the deadline."""
