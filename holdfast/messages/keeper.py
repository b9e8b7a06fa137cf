"""Defines what passes between a keeper and the process that started it: actions in, events out.

They are the actions and events of the core, each in an envelope with a number. Every order is answered
exactly once, under its number: with the event that came of it, or with an error. An order without an
answer when its keeper dies goes to the next one. Events of number 0 are unsolicited.

A keeper has no job clock: the times of its events are of the machine's monotonic clock.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from holdfast.messages.actions import Action, CommitCheckpoint, WriteRankFiles
from holdfast.messages.checkpoints import (
    Attempt,
    CheckpointerId,
    Holder,
    ImageId,
    Missed,
    SnapshotId,
    Wish,
)
from holdfast.messages.events import (
    CheckpointWritten,
    Event,
    ImagesHeld,
    RankFilesWritten,
    SnapshotMissed,
    SnapshotsSealed,
    StoredFound,
)
from holdfast.messages.local import OpenCheckpointer, Piece
from holdfast.messages.requests import Denied, ImageAt, LocateImage
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time


class KeeperTerms(Struct, frozen=True, kw_only=True):
    """The first packet: what a keeper has to know before any order."""

    node: NodeId
    images: str
    token: str
    job: str
    listener_fd: int | None
    """The socket at which other nodes ask for images; None in a script's own keeper."""
    tls: tuple[str, str, str] | None = None
    """Paths of certificate, key and authority."""
    own: bool = False
    """A script started this keeper for itself: if the script is killed, its images are removed."""


# ---- actions that only a keeper is given --------------------------------------------------------


class SealImage(Action, frozen=True, kw_only=True):
    """Take the digests of an image that is whole. Answered: SnapshotsSealed, of this rank alone, or
    SnapshotMissed when a newer snapshot has overwritten the image."""

    node: NodeId
    image: ImageId
    path: str
    state: int
    """The image's state counter when it was whole."""
    wish: Wish
    attempt: Attempt = 1


class BeginRound(Action, frozen=True, kw_only=True):
    """Keep the images of these ranks, which are the node's from now on."""

    ranks: tuple[Rank, ...]
    copies: tuple[Holder, ...] = ()
    """Nodes that each sealed image is replicated to."""


class DiscardRankFiles(Action, frozen=True, kw_only=True):
    """Remove what these ranks wrote for a checkpoint of its own directory: nothing came of it, and no
    manifest of it was begun."""

    node: NodeId
    snapshot: SnapshotId
    ranks: tuple[Rank, ...]


class FindStored(Action, frozen=True, kw_only=True):
    """List the checkpoints on storage. Answered: StoredFound."""

    node: NodeId
    round: RoundNumber
    checkpointer: CheckpointerId


class FetchImage(Action, frozen=True, kw_only=True):
    """Copy an image from the node that holds it."""

    image: ImageId
    holder: Holder


class FailWrites(Action, frozen=True, kw_only=True):
    """Fail to write the next files as if the disk were full."""

    files: int


class WriteAdvanced(Event, frozen=True, kw_only=True):
    """Unsolicited: how much of a snapshot is written."""

    step: StepNumber
    done_bytes: int
    of_bytes: int


# ---- envelopes ----------------------------------------------------------------------------------

KeeperAction = (
    OpenCheckpointer
    | SealImage
    | BeginRound
    | WriteRankFiles
    | CommitCheckpoint
    | DiscardRankFiles
    | FindStored
    | FetchImage
    | LocateImage
    | FailWrites
)
KeeperEvent = (
    SnapshotsSealed
    | SnapshotMissed
    | RankFilesWritten
    | CheckpointWritten
    | StoredFound
    | ImagesHeld
    | WriteAdvanced
)


class KeeperOrder(Struct, frozen=True, tag=True):
    number: int
    action: KeeperAction


class KeeperReply(Struct, frozen=True, tag=True):
    number: int
    event: KeeperEvent | ImageAt | Denied | None = None
    """None: the action has no event of its own, or it failed."""
    error: str = ""


ToKeeper = KeeperOrder | Piece
FromKeeper = KeeperReply | Piece


def completed(action: KeeperAction, reply: KeeperReply, at: Time) -> KeeperReply:
    """Give a reply the event by which its action fails, if it has only an error; and name the action
    as the event's cause."""
    event, error = reply.event, reply.error
    if event is None and error:
        event = _failure(action, error, at)
    if isinstance(event, Event) and isinstance(action, Action) and action.id:
        event = msgspec.structs.replace(event, cause=action.id)
    return KeeperReply(reply.number, event, error)


def _failure(action: KeeperAction, error: str, at: Time) -> KeeperEvent | Denied | None:
    if isinstance(action, SealImage):
        return missed_by(action, "failed", error, at)
    if isinstance(action, WriteRankFiles):
        return RankFilesWritten(at=at, node=action.node, snapshot=action.snapshot, error=error)
    if isinstance(action, CommitCheckpoint):
        return CheckpointWritten(at=at, node=action.node, snapshot=action.snapshot, error=error)
    if isinstance(action, FindStored):
        node, round, refused = action.node, action.round, (f"storage: {error}",)
        name = action.checkpointer
        return StoredFound(at=at, node=node, round=round, checkpointer=name, refused=refused)
    return Denied(reason="image", detail=error) if isinstance(action, LocateImage) else None


def missed_by(seal: SealImage, outcome: Missed, reason: str, at: Time) -> SnapshotMissed:
    """The event by which a seal says that there is no such image."""
    return SnapshotMissed(
        at=at,
        node=seal.node,
        rank=seal.image.rank,
        snapshot=seal.image.snapshot,
        outcome=outcome,
        reason=reason,
        attempt=seal.attempt,
    )
