"""What an agent, or a script without one, says to its keeper, and what it hears.

Every order has a number, and is answered exactly once with that number; an order that was not
answered when a keeper died is given to the next one.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.messages.checkpoints import Holder, ImageId, Sealed, Shard, SnapshotId, StoredStep
from holdfast.messages.local import Piece


class Begin(Struct, frozen=True, kw_only=True):
    """The first packet: what a keeper has to know before any order."""

    images: str
    token: str
    job: str
    listener_fd: int | None
    """Where other nodes ask for images; None when there are none."""
    tls: tuple[str, str, str] | None = None
    """Paths of certificate, key and authority."""
    own: bool = False
    """A script started the keeper for itself: if it is killed, its images are to be removed."""


class Order(Struct, frozen=True, kw_only=True, tag=True):
    number: int


class Open(Order, frozen=True, kw_only=True):
    """A script has this checkpointer. Answered: Done."""

    checkpointer: str
    directory: str
    """Where its checkpoints go; empty when they stay in memory."""
    keep: bytes
    """Which checkpoints stay, as `retention` encodes it."""


class Seal(Order, frozen=True, kw_only=True):
    """An image is whole in that state: take its digests. Answered: ImageSealed."""

    path: str
    state: int


class BeginRound(Order, frozen=True, kw_only=True):
    """From now on these ranks are the node's. Answered: Done."""

    ranks: tuple[int, ...]
    copies: tuple[Holder, ...]
    """Nodes that each sealed image is to be copied to."""


class Write(Order, frozen=True, kw_only=True):
    """Write these ranks' shards. Answered: ShardsDone."""

    snapshot: SnapshotId
    ranks: tuple[int, ...]
    world_size: int
    alike: bool
    at: str = ""
    """Where, if the checkpoint is to be a directory by itself and no step of its checkpointer's."""


class Commit(Order, frozen=True, kw_only=True):
    """Write the manifest, then see which checkpoints may go. Answered: Done."""

    snapshot: SnapshotId
    world_size: int
    shards: tuple[Shard, ...]
    at: str = ""
    """As with Write; what is there already is replaced."""


class Look(Order, frozen=True, kw_only=True):
    """Which checkpoints are on storage? Answered: Stored."""

    checkpointer: str


class Fetch(Order, frozen=True, kw_only=True):
    """Have a copy of an image that another node holds. Answered: Done."""

    image: ImageId
    holder: Holder


class Where(Order, frozen=True, kw_only=True):
    """A rank wants to read that image now. Answered: WhereFound."""

    image: ImageId


class FailWrites(Order, frozen=True, kw_only=True):
    """Somebody wants to see what happens when the disk is full. Answered: Done."""

    files: int
    """The next so many cannot be written."""


class Reply(Struct, frozen=True, kw_only=True, tag=True):
    number: int
    error: str = ""


class Done(Reply, frozen=True, kw_only=True):
    pass


class ImageSealed(Reply, frozen=True, kw_only=True):
    image: ImageId | None = None
    """None, without an error: a newer one took its place before."""
    sealed: Sealed | None = None


class ShardsDone(Reply, frozen=True, kw_only=True):
    shards: tuple[Shard, ...] = ()
    gone: bool = False


class Stored(Reply, frozen=True, kw_only=True):
    steps: tuple[StoredStep, ...] = ()
    refused: tuple[str, ...] = ()
    """What is newer than those, and why it does not count."""


class WhereFound(Reply, frozen=True, kw_only=True):
    path: str = ""
    """Empty: it is not on this node."""


class Received(Struct, frozen=True, kw_only=True, tag=True):
    """Unasked: another node gave us a copy of its image."""

    image: ImageId


class Wrote(Struct, frozen=True, kw_only=True, tag=True):
    """Unasked: how far writing has come."""

    step: int
    done_bytes: int
    of_bytes: int


AnyOrder = Open | Seal | BeginRound | Write | Commit | Look | Fetch | Where | FailWrites
AnyReply = Done | ImageSealed | ShardsDone | Stored | WhereFound
FromKeeper = AnyReply | Received | Wrote | Piece
ToKeeper = AnyOrder | Piece
