"""Defines the terms in which scripts, agents and the coordinator speak of snapshots and checkpoints.

A snapshot is named by its checkpointer, step and round: the same step saved again after a fault is
another snapshot, and the two are never mixed.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from holdfast.messages.units import (
    Count,
    NodeId,
    Port,
    Rank,
    RoundNumber,
    StepNumber,
    Text,
    Word,
    WorldSize,
)

Digest = Annotated[bytes, Meta(max_length=16)]
CheckpointerId = Annotated[str, Meta(pattern="^[0-9A-Za-z_]{1,64}$")]
"""Name of a checkpointer, which is part of file names."""
Tier = Literal["memory", "storage"]
Wish = Literal["never", "if needed", "now"]
"""Whether a snapshot is to go to storage: never, when a fault makes that worthwhile, or at once."""
WISHES: Final[tuple[Wish, ...]] = ("never", "if needed", "now")
"""From the weakest to the strongest: where ranks differ, the strongest counts."""
Attempt = Annotated[int, Meta(ge=1, le=1 << 53)]
"""Number of a save among those of the same step in one round; the same on all ranks."""

Missed = Literal["skipped", "failed"]
"""Why there is no image: it was left out on purpose, or an error occurred."""


class SnapshotId(Struct, frozen=True, order=True):
    checkpointer: CheckpointerId
    step: StepNumber
    round: RoundNumber


class ImageId(Struct, frozen=True):
    """One rank's image of a snapshot."""

    snapshot: SnapshotId
    rank: Rank
    world_size: WorldSize


class Sealed(Struct, frozen=True):
    """A rank's image that is whole and has its digests."""

    rank: Rank
    shared: Digest
    """Digest of everything that should be equal on all ranks."""


class StoredFile(Struct, frozen=True):
    """A rank's file on storage, durable but not yet part of a checkpoint."""

    rank: Rank
    name: Text
    size: Count
    trailer: Word
    """Digest of its trailer, which has the digests of everything else."""
    contents: Word
    """Digest of its table of contents."""


class Holder(Struct, frozen=True):
    """A node that serves an image to others."""

    rank: Rank
    node: NodeId
    address: Word
    port: Port


class StoredStep(Struct, frozen=True):
    """A checkpoint on storage that is complete by its manifest."""

    step: StepNumber
    round: RoundNumber
    world_size: WorldSize


class Tried(Struct, frozen=True):
    """A rank's report on the state that it was to load."""

    error: Annotated[str, Meta(max_length=1000)] = ""
    """Empty: the state is loaded."""
