"""The vocabulary of stalls: how a rank stands, what of it still moves, and what proves a hang."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from holdfast.messages.units import Count, Float, Listed, Mapped, Rank, Seconds, StepNumber

StallKind = Literal["stopped", "gil", "locked", "waits", "ended", "elsewhere"]
"""How a late rank stands: its process is stopped by a signal or frozen; a thread keeps the GIL; every
thread waits for a lock that only this process could release; it waits for other ranks; its script has
ended and its process has not; or it is anywhere else."""

Sign = Literal["position", "cpu", "io", "network", "children", "loader workers"]
"""What of a rank can be seen to move: the training thread's line, CPU time or a wait for a CPU, bytes
read and written, bytes of its sockets, its child processes, its data loader's workers."""

Proof = Literal["stopped", "mismatch", "left", "circle", "locked", "gil"]
"""What proves that a rank cannot continue: it is stopped; ranks called different operations under one
number; a rank ended or left the loop while others wait for it; ranks wait for each other in a circle;
every thread waits for locks of its own process; a native call keeps the GIL and does nothing."""

FIRST_STEP = "first step"
"""The name of the time from a script's start to the end of its first step."""

Name = Annotated[str, Meta(max_length=64)]
PlaceName = Annotated[str, Meta(max_length=120)]
"""A line of the user's code: "eval.py:33 (upload)"; empty if unknown."""


class Stall(Struct, frozen=True):
    """A rank that is late."""

    rank: Rank
    kind: StallKind
    where: Name
    """The phase or section it is in."""
    for_s: Seconds
    """Time since its last mark."""
    place: PlaceName = ""
    still_s: Seconds = 0.0
    """How long nothing of it has moved."""
    signs: Listed[Sign] = ()
    """What moved of it in the last seconds."""


class Pause(Struct, frozen=True):
    """A time in which nothing of a rank moved, and which ended by itself."""

    place: PlaceName
    still_s: Seconds


class PlaceMemory(Struct, frozen=True):
    """What is remembered of one place of the user's code."""

    seen: Count = 0
    """Pauses there that ended by themselves."""
    still_s: Seconds = 0.0
    """Longest of them."""
    waited_s: Seconds = 0.0
    """Longest time that other ranks waited for a rank there, until it went on by itself."""
    grant_s: Seconds = 0.0
    """Deadline that it was given after it was taken for a hang; 0 for none."""
    grant_step: StepNumber = StepNumber(0)
    """The grant holds until the job has got past this step."""
    trusted: bool = False
    """Whether a person wants ranks there left alone."""


class Memory(Struct, frozen=True):
    """What is remembered of all places, over rounds and requeues."""

    places: Mapped[PlaceName, PlaceMemory] = {}


class Paces(Struct, frozen=True):
    """How long things take on a node's ranks."""

    step_s: Seconds | None = None
    """Median step time."""
    longest_s: Mapped[Name, Seconds] = {}
    """Longest completed duration of each section."""


SILENT_S: Final[Seconds] = 5.0
"""A rank of which nothing has moved for this long is silent; sooner where `--hang-after` is shorter."""


class HangTerms(Struct, frozen=True, kw_only=True):
    """What the user said about hangs; deadlines left unset are learnt, or there is none."""

    detect: bool = True
    hang_after: Seconds | None = None
    """How long a rank that others wait for may show no sign of life."""
    initial_rank_heartbeat_timeout: Seconds | None = None
    """Hard limit until a process's first step."""
    rank_heartbeat_timeout: Seconds | None = None
    """Hard limit between two signs of progress after the first step."""
    rank_out_of_section_timeout: Seconds | None = None
    """Hard limit between two signs of progress outside of all sections."""
    rank_section_timeouts: Mapped[Name, Seconds] = {}
    """Hard limits of sections."""
    safety_factor: Float | None = None
    """Factor from the longest pause seen at a place to its deadline."""

    @property
    def silent_s(self) -> Seconds:
        """How long nothing of a rank has moved before it is silent, which its agent reports at once."""
        return SILENT_S if self.hang_after is None else min(SILENT_S, self.hang_after)
