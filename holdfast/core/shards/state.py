"""Holds what is known of a job's data sets: see `opening`, `lending` and `history` for the rules.

Every position of a data set that is shared by leases is, while the set is open, in exactly one place:

    used        a rank has used it, or it was left out
    leases      lent to a node
    returned    it came back, and is lent again before anything else
    ahead       never lent in this round: beyond a mark on its line
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from holdfast.core.decisions import Asker
from holdfast.core.shards.history import UseHistory
from holdfast.messages.data import DataName, DataSpec, Line, PackedState, Position, Span
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import NodeId, Rank, RoundNumber

MOST_SETS = 1024
"""Data sets of one job."""
MOST_SKIPPED = 10_000
"""Shards that may be left out of one data set before the job stops in any case."""


class Skipped(Struct, frozen=True):
    """A shard that was given up and left out."""

    span: Span
    error: str
    round: RoundNumber


class Opening(Struct):
    """What the ranks of a round have said about the state of a data set."""

    rank: Rank | None = None
    """The rank that decided what was used; None while nobody has."""
    resumed: Literal["fresh", "whole"] = "fresh"
    given: PackedState = b""
    """What that rank says was used."""
    used: PackedState = b""
    """What all ranks are told was used before their round."""
    parts: dict[Rank, Asker] = field(default_factory=dict)
    """Ranks that restored only their own part, and wait."""


class DataSet(Struct):
    spec: DataSpec
    round: RoundNumber = RoundNumber(0)
    """The newest round in which a rank opened it."""
    opening: Opening = field(default_factory=Opening)
    is_open: bool = False
    """Whether it is known what was used: shards may be lent."""
    used: SpanSet = field(default_factory=SpanSet)
    returned: SpanSet = field(default_factory=SpanSet)
    returned_count: int = 0
    """Positions in `returned`."""
    ahead: dict[Line, Position] = field(default_factory=dict)
    """The first position that was never lent: of the epoch that is being lent, or of each partition."""
    turn: int = 0
    """The partition whose turn it is."""
    leases: dict[NodeId, SpanSet] = field(default_factory=dict)
    wants: dict[NodeId, int] = field(default_factory=dict)
    """Nodes that wait for shards, the first to ask first, and how many each wants."""
    heard: dict[NodeId, int] = field(default_factory=dict)
    """Number of the last report of each node in this round."""
    nodes: dict[NodeId, None] = field(default_factory=dict)
    """Nodes whose ranks have opened it in this round."""
    told: bool = False
    """Whether these nodes were told that it is finished."""
    failures: dict[Line, dict[Position, int]] = field(default_factory=dict)
    """How often each shard has failed by its own fault, by where it begins."""
    skipped: list[Skipped] = field(default_factory=list)
    misfits: int = 0
    """Reported positions that were not lent to the node that spoke of them."""
    by_rank: dict[Rank, int] = field(default_factory=dict)
    """Records that each rank of the newest round was given."""
    history: UseHistory = field(default_factory=UseHistory)

    @property
    def is_stream(self) -> bool:
        return self.spec.size is None

    @property
    def is_coupled(self) -> bool:
        """Whether what was used goes back with the model."""
        return self.spec.exact or self.spec.sharing == "lockstep"


class Shards(Struct):
    sets: dict[DataName, DataSet] = field(default_factory=dict)


def named(spec: DataSpec, span: Span) -> str:
    """Describe a span in words."""
    line = f"epoch {span.line}"
    if spec.size is None:
        known = span.line < len(spec.partitions)
        line = f"partition {spec.partitions[span.line] if known else span.line}"
    return f"positions {span.start} to {span.stop} of {line}"
