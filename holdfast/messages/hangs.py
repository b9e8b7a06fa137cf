"""What is said about ranks that stand still, and about how long things usually take."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.messages.units import Rank, Seconds

StallKind = Literal["stopped", "gil", "waits", "still", "busy"]
"""How a rank stands still: its process is stopped; somebody holds the interpreter's lock; it waits in
a collective; it is somewhere else and does not move; or it moves, but gets nowhere."""

LINES = 1 << 24
"""A place is a number for the function times this, plus the line."""

Name = Annotated[str, Meta(max_length=64)]


class Stall(Struct, frozen=True):
    """A rank that is past its deadline."""

    rank: Rank
    kind: StallKind
    where: Name
    """The phase or section it is in."""
    for_s: Seconds
    limit_s: Seconds
    overdue: bool = False
    """For so long that it does not matter any more how."""
    place: int = 0
    """Of one that is still: stands for the line it is at, the same number on all ranks. One that goes
    round within a function is at the function's line 0. 0: it is nowhere for long."""


class Paces(Struct, frozen=True):
    """How long things take on a node's ranks: what deadlines are learnt from."""

    step_s: Seconds | None = None
    """The median step."""
    longest_s: dict[Name, Seconds] = {}
    """For each phase and section the longest that was seen to end."""


class HangTerms(Struct, frozen=True, kw_only=True):
    """What the user says about deadlines; what is not said is learnt. Named as NVRx names them."""

    detect: bool = True
    initial_rank_heartbeat_timeout: Seconds | None = None
    """Until a process's first step."""
    rank_heartbeat_timeout: Seconds | None = None
    """Between two signs of progress, once there was a step."""
    rank_out_of_section_timeout: Seconds | None = None
    """The same, for scripts that have sections: while none is open."""
    rank_section_timeouts: dict[Name, Seconds] = {}
    safety_factor: float | None = None
    """How many times the longest time seen is too long."""
