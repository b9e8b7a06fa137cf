"""Defines the terms in which scripts, agents and the coordinator speak of data sets, shards and leases.

The records of a data set are used in an order that each epoch has of its own; a *position* counts along
it. Only workers translate positions into records (`holdfast.data.order`), so no message grows with the
data set. A *line* is what positions are counted on: an epoch of a data set that has a size, or a
partition of a stream. A shard, a lease, and what was used are all spans of positions of a line.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.messages.units import Listed, Rank, StepNumber, Word

MAX_STATE_BYTES = 256 << 10
"""Limit of what was used of a data set, packed."""

DataName = Annotated[str, Meta(min_length=1, max_length=128)]
Line = Annotated[int, Meta(ge=0, le=1 << 53)]
"""An epoch, from 0, or the index of a partition."""
Position = Annotated[int, Meta(ge=0, le=1 << 53)]
Records = Annotated[int, Meta(ge=1, le=1 << 53)]
PackedState = Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)]
"""Positions that were used, by line: see `holdfast.messages.spans`."""

Task = Literal["training", "evaluation", "prediction"]
OrderKind = Literal["plain", "shards", "records"]
"""Whether an epoch's order is that of the records, or shuffles shards, or all records."""
Sharing = Literal["lockstep", "leases"]
"""How ranks share a data set: each step's records among all of them by a rule that needs no messages,
or shard by shard, as each asks for more."""


class DataSpec(Struct, frozen=True, kw_only=True):
    """A data set, the same on all ranks."""

    name: DataName
    sharing: Sharing
    size: Records | None = None
    """Number of records; None for a stream."""
    partitions: Listed[Word] = ()
    """Of a stream."""
    shard: Records = 1
    """Records of a shard; the last one of an epoch or sub-epoch may have fewer."""
    epochs: Annotated[int, Meta(ge=0, le=1 << 53)] = 1
    """0 for no end."""
    sub_epochs: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    """Parts of an epoch; no shard lies in two of them."""
    order: OrderKind = "plain"
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    task: Task = "training"
    exact: bool = True
    """Whether what was used belongs to the model's state, and goes back with it. If not, a shard that
    is finished stays so, and one that was begun is lent again."""
    failures: Annotated[int, Meta(ge=1, le=1 << 20)] = 3
    """Number of failures of one shard at which it is given up."""
    skip: bool = False
    """Whether a shard that is given up is left out; if not, the job stops."""


class Span(Struct, frozen=True, order=True, array_like=True):
    """The positions from `start` up to `stop`, exclusive, of a line."""

    line: Line
    start: Position
    stop: Position


class Used(Struct, frozen=True):
    """Positions that were used.

    Of data shared by leases: by one rank. Of data shared in lockstep: by the whole round, at the same
    number of positions each step; `records` says how many of them this rank was given.
    """

    span: Span
    first_step: StepNumber
    """The last step that was finished before the first of them was handed to the script."""
    last_step: StepNumber
    """The same for the last of them."""
    records: Records


class UsedBy(Struct, frozen=True):
    rank: Rank
    used: Used


class ShardFailure(Struct, frozen=True):
    """A shard that could not be read or processed."""

    rank: Rank
    span: Span
    error: Annotated[str, Meta(max_length=2000)]
