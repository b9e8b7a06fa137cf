"""What is said about snapshots and checkpoints: by scripts, by agents, by the coordinator.

A snapshot is named by its checkpointer, step and round: the same step saved again after a fault is
another snapshot, and the two are never mixed.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber

Digest = Annotated[bytes, Meta(max_length=16)]
CheckpointerId = Annotated[str, Meta(pattern="^[0-9A-Za-z_]{1,64}$")]
"""Files are named by it."""
Tier = Literal["memory", "storage"]
Wish = Literal["never", "if needed", "now"]
"""Whether a snapshot is to go to storage: never, when a fault makes it worth while, or at once."""
WISHES: Final[tuple[Wish, ...]] = ("never", "if needed", "now")
"""In their order: where ranks differ, the last one counts."""
Attempt = Annotated[int, Meta(ge=1)]
"""Of two saves of one step in one round, the later has the higher number, on all ranks alike."""

Missed = Literal["skipped", "failed"]
"""Why there is no image: it was not worth while, or did not work."""


class SnapshotId(Struct, frozen=True, order=True):
    checkpointer: CheckpointerId
    step: StepNumber
    round: RoundNumber


class ImageId(Struct, frozen=True):
    """One rank's image of a snapshot."""

    snapshot: SnapshotId
    rank: Rank
    world_size: int


class Sealed(Struct, frozen=True):
    """A rank's image is whole, and its digests are taken."""

    rank: Rank
    shared: Digest
    """Of all that every rank should have alike; equal on all ranks, or they do not share it."""


class Shard(Struct, frozen=True):
    """A rank's file on storage, durable but not yet part of a checkpoint."""

    rank: Rank
    name: str
    size: int
    trailer: str
    """Its trailer's digest; the trailer has those of all the rest."""
    contents: str
    """The digest of its contents."""


class Holder(Struct, frozen=True):
    """Where an image can be had."""

    rank: Rank
    node: NodeId
    address: str
    port: int


class StoredStep(Struct, frozen=True):
    """A checkpoint on storage whose manifest says that it is complete."""

    step: StepNumber
    round: RoundNumber
    world_size: int


class Tried(Struct, frozen=True):
    """How a rank fared with the state that it was told to load."""

    error: Annotated[str, Meta(max_length=1000)] = ""
    """Empty: it is loaded."""
