"""The nodes that a job wants of a platform, and what the platform says of them.

A *position* is one of the wanted nodes, by number; a *request* is one try to fill it. A *plan* tells
the supplier which requests to make and to release; *sightings* tell the core what became of them. See
`docs/supply.md`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

from msgspec import Meta, Struct

from holdfast.messages.units import Count, ExitCode, Listed, NodeCount, Seconds, Text, Word

RequestId = Annotated[str, Meta(max_length=64)]
"""POSITION-ATTEMPT, such as "3-2"."""

PositionNumber = Annotated[int, Meta(ge=0, le=1 << 31)]

SeenStatus = Literal["pending", "running", "succeeded", "failed", "deleted"]
"""What a platform can say of a request that it knows, or has removed."""

PositionStatus = Literal[
    "wanted", "requested", "pending", "running", "succeeded", "failed", "deleted", "lost"
]
STANDING: Final[frozenset[PositionStatus]] = frozenset({"requested", "pending", "running"})
"""Of a position whose request is not over."""

ExitReason = Literal[
    "finished",
    "preempted",
    "evicted",
    "excluded",
    "killed",
    "deleted",
    "lost",
    "oom",
    "hardware",
    "fatal",
    "unknown",
]
"""Why a request is over."""
EXIT_REASONS: Final[tuple[ExitReason, ...]] = get_args(ExitReason)

MAX_MEMORY_MIB = 1 << 40
MemoryMib = Annotated[int, Meta(ge=0, le=MAX_MEMORY_MIB)]


class SupplyTerms(Struct, frozen=True, kw_only=True):
    """What the user asks of the platform, beyond the number of nodes."""

    memory_mib: MemoryMib = 0
    """Memory of a node; 0: as the platform's own settings say."""
    memory_limit_mib: MemoryMib = 65_536
    """What a node's memory is raised to at most after it ran out."""
    relaunches: Count = 3
    """Budget of a position."""
    critical: Listed[PositionNumber] = ()
    """Positions whose loss for good ends the job."""
    group: NodeCount = 1
    """Nodes that the platform provides only together."""
    priority: Word = ""
    """Name of a priority, for the platform; or a number from 0 to 1: the share of positions that get
    the platform's high one, the others its low one."""
    pending_s: Seconds | None = None
    """How long a request may be pending; learnt when not given."""


class NodeWish(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, as the platform is asked for it."""

    id: RequestId
    position: PositionNumber
    attempt: Count
    memory_mib: MemoryMib = 0
    """0: as the platform's own settings say."""
    seen: bool = False
    """Whether the platform was seen to have it: then it is never made again under this name."""
    group: PositionNumber = 0
    """Number of its group; its own position where nodes come one by one."""
    priority: Word = ""


class Cordon(Struct, frozen=True, kw_only=True):
    """A host that is not asked for again."""

    host: Word
    why: Text


class SupplyPlan(Struct, frozen=True, kw_only=True, tag=True):
    """What the supplier is to do."""

    number: Count
    ask: Listed[NodeWish] = ()
    release: Listed[RequestId] = ()
    avoid: Listed[Cordon] = ()
    """All hosts that are to be avoided from now on, not only those that are new."""
    whole: bool = False
    """Whether `ask` is all that is wanted: what it does not name is to be released."""
    more: bool = False
    """Whether the plan goes on in the next message."""
    final: bool = False
    """Whether the job is over: the supplier ends once it has carried this out."""


class Sighting(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a platform says of one request."""

    request: RequestId
    status: SeenStatus
    reason: ExitReason | None = None
    """Why it is over, where the platform says so; else it follows from the code."""
    code: ExitCode | None = None
    """Exit code of its node, 128 more than the signal's number after a signal."""
    host: Word = ""
    """The platform's name for where it is."""
    detail: Text = ""
    """The platform's own words: what a pending one waits for, how one failed."""
