"""Holds what is known of a job's snapshots and checkpoints: see `rules` and `restoring`."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from holdfast.core.decisions import Asker
from holdfast.messages.actions import AnyAction
from holdfast.messages.checkpoints import Missed, SnapshotId, StoredFile, StoredStep, Tier, Wish
from holdfast.messages.requests import AnyAnswer, SaveSettled
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber

KEPT_SNAPSHOTS = 4
KEPT_OUTCOMES = 64
REFUSALS_TOLD = 16

Address = tuple[str, int]
Reach = Callable[[NodeId], Address | None]


class Snapshot(Struct):
    """A step of a round as it is in memory."""

    id: SnapshotId
    world_size: int
    wish: Wish = "never"
    """The wish of the nodes that sealed it; a copy has none."""
    holders: dict[Rank, list[NodeId]] = field(default_factory=dict)
    """The nodes that have each rank's image."""
    shared: list[bytes] = field(default_factory=list)
    """The distinct digests of what should be equal on all ranks."""
    sealed_by: dict[NodeId, int] = field(default_factory=dict)
    """How many ranks each node has sealed."""
    attempt: int = 1
    """The last attempt at it that is known."""
    counts: bool = False
    """Every rank's image was sealed at some time: the ranks may go back to this snapshot."""
    sent: bool = False
    """It was put on its way to storage."""
    stored: bool = False

    @property
    def alive(self) -> bool:
        """Whether every rank's image still has a holder."""
        return len(self.holders) == self.world_size and all(self.holders.values())

    @property
    def sealed(self) -> bool:
        """Whether every rank's own node has reported it; some may be known from copies alone."""
        return sum(self.sealed_by.values()) == self.world_size


class Writing(Struct):
    """A snapshot on its way to storage."""

    snapshot: SnapshotId
    world_size: int
    alike: bool
    pending: dict[NodeId, list[Rank]]
    """The ranks whose shards each node still has to write."""
    shards: dict[Rank, StoredFile] = field(default_factory=dict)
    committer: NodeId | None = None
    """The node that writes the manifest, once all shards are written."""
    nodes: list[NodeId] = field(default_factory=list)
    """The nodes to be told how it ends."""


class RestoreCandidate(Struct, frozen=True):
    """A state that the ranks might restore."""

    where: Tier
    step: StepNumber
    round: RoundNumber
    world_size: int

    @property
    def place(self) -> tuple[int, bool, int]:
        """Sort key: candidates are tried from the highest to the lowest."""
        return self.step, self.where == "memory", self.round


class Search(Struct):
    """A restore in progress."""

    step: int | None
    memory: bool = True
    """Whether snapshots in memory are offered."""
    asked: dict[Rank, Asker] = field(default_factory=dict)
    errors: dict[Rank, str] = field(default_factory=dict)
    current: RestoreCandidate | None = None
    """The candidate that all ranks were offered last."""
    refused: list[str] = field(default_factory=list)
    all_ranks: set[Rank] = field(default_factory=set)
    """Ranks that need the images of all ranks."""


class SaveWait(Struct, frozen=True):
    """A save whose result is waited for."""

    step: int
    round: RoundNumber
    to: Tier
    attempt: int = 1


class SaveOutcome(Struct, frozen=True):
    """The result of an attempt at a save."""

    settled: SaveSettled
    attempt: int

    def answers(self, attempt: int) -> bool:
        """Whether it is also the result of that attempt. What is saved stays saved."""
        return self.settled.outcome == "saved" or attempt <= self.attempt


class LostSave(Struct, frozen=True):
    """A save of which nothing came, on all ranks."""

    snapshot: SnapshotId
    outcome: Missed
    why: str


class Book(Struct):
    """What is known of one checkpointer."""

    snapshots: list[Snapshot] = field(default_factory=list)
    """In the order in which they were begun."""
    writing: Writing | None = None
    wanted: SnapshotId | None = None
    """The snapshot to be written next."""
    ended: SnapshotId | None = None
    """The snapshot whose writing ended last, well or not."""
    ended_error: str = ""
    stored: SnapshotId | None = None
    """The newest snapshot that this job wrote."""
    found: list[StoredStep] = field(default_factory=list)
    """The checkpoints on storage, as of the last look."""
    found_refused: list[str] = field(default_factory=list)
    """Checkpoints on storage that do not count, with the reason."""
    failures: int = 0
    """Checkpoints in a row that could not be written."""
    lost: dict[Missed, int] = field(default_factory=dict)
    """How many saves were skipped, and how many failed before they were whole in memory."""
    last_lost: LostSave | None = None
    """The last save, if nothing came of it."""
    last_told: bool = False
    """Whether that is an incident."""
    outcomes: dict[str, SaveOutcome] = field(default_factory=dict)
    """Results of the saves of this round, by tier, step and round."""
    waits: dict[Asker, SaveWait] = field(default_factory=dict)
    scattered: RoundNumber | None = None
    """The last round in which a snapshot was given up that only some nodes had saved."""
    search: Search | None = None
    agreed: bool = False
    """The ranks of this round have restored, or know that there is nothing to restore."""


class Commits(Struct):
    books: dict[str, Book] = field(default_factory=dict)

    def book(self, checkpointer: str) -> Book:
        return self.books.setdefault(checkpointer, Book())


class CommitEffects(Struct):
    """What follows from an event."""

    actions: list[AnyAction] = field(default_factory=list)
    answers: list[tuple[Asker, AnyAnswer]] = field(default_factory=list)
    failed: list[tuple[SnapshotId, str]] = field(default_factory=list)
    """Checkpoints that could not be written, and why."""
    lost_saves: list[LostSave] = field(default_factory=list)
    """Saves of which nothing came, as far as they are worth an incident."""
    lost: NodeId | None = None
    """The node whose loss caused this."""


def age(id: SnapshotId) -> tuple[int, int]:
    return id.round, id.step


def on_their_way(book: Book) -> list[SnapshotId]:
    """The snapshots that are being written or are to be written next."""
    writing = book.writing.snapshot if book.writing is not None else None
    return [id for id in (writing, book.wanted) if id is not None]
