"""What is known of a job's snapshots and checkpoints, as data: see `commits` and `restoring`."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from holdfast.core.decisions import Asker
from holdfast.messages.actions import AnyAction
from holdfast.messages.checkpoints import Shard, SnapshotId, StoredStep, Tier, Wish
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
    """What those say who sealed it; who has a copy does not know."""
    holders: dict[Rank, list[NodeId]] = field(default_factory=dict)
    shared: list[bytes] = field(default_factory=list)
    """The different digests of what all ranks should have alike."""
    sealed_by: dict[NodeId, int] = field(default_factory=dict)
    """Who told such digests, and of how many ranks."""
    attempt: int = 1
    """The last at it that was heard of."""
    counts: bool = False
    sent: bool = False
    """It was put on its way to storage."""
    stored: bool = False

    @property
    def alive(self) -> bool:
        """Whether each rank's image can still be had from somebody."""
        return len(self.holders) == self.world_size and all(self.holders.values())

    @property
    def sealed(self) -> bool:
        """Whether all ranks' own nodes have told of it: some may be known from copies alone."""
        return sum(self.sealed_by.values()) == self.world_size


class Writing(Struct):
    """A snapshot on its way to storage."""

    snapshot: SnapshotId
    world_size: int
    alike: bool
    pending: dict[NodeId, list[Rank]]
    """Who has still to write which ranks' shards."""
    shards: dict[Rank, Shard] = field(default_factory=dict)
    committer: NodeId | None = None
    nodes: list[NodeId] = field(default_factory=list)
    """Everybody who was told, and wants to know how it ends."""


class Candidate(Struct, frozen=True):
    where: Tier
    step: StepNumber
    round: RoundNumber
    world_size: int

    @property
    def place(self) -> tuple[int, bool, int]:
        """Its place in the order in which they are tried, the highest first."""
        return self.step, self.where == "memory", self.round


class Search(Struct):
    """Ranks that want to restore, and what they were offered."""

    step: int | None
    asked: dict[Rank, Asker] = field(default_factory=dict)
    errors: dict[Rank, str] = field(default_factory=dict)
    current: Candidate | None = None
    """What all were offered last."""
    refused: list[str] = field(default_factory=list)


class Wait(Struct, frozen=True):
    step: int
    round: RoundNumber
    to: Tier
    attempt: int = 1


class Outcome(Struct, frozen=True):
    """How a save went, and which attempt at it."""

    settled: SaveSettled
    attempt: int

    def answers(self, attempt: int) -> bool:
        """Whether that is what somebody wants to know. What is saved stays so."""
        return self.settled.outcome == "saved" or attempt <= self.attempt


class Book(Struct):
    """One checkpointer's."""

    snapshots: list[Snapshot] = field(default_factory=list)
    """In the order in which they were begun."""
    writing: Writing | None = None
    wanted: SnapshotId | None = None
    """Goes to storage when what is being written is done."""
    ended: SnapshotId | None = None
    """What was written last, or not."""
    ended_error: str = ""
    stored: SnapshotId | None = None
    """The newest that this job wrote."""
    found: list[StoredStep] = field(default_factory=list)
    """What is on storage, as it was last looked up."""
    found_refused: list[str] = field(default_factory=list)
    """What does not count of it, and why."""
    failures: int = 0
    """How many in a row could not be written."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By tier, step and round; those of the round in force are of use."""
    waits: dict[Asker, Wait] = field(default_factory=dict)
    scattered: RoundNumber | None = None
    """The last round in which a snapshot was given up that only some nodes had saved."""
    search: Search | None = None
    agreed: bool = False
    """The ranks of this round know what they restored, or that there was nothing."""


class Commits(Struct):
    books: dict[str, Book] = field(default_factory=dict)

    def book(self, checkpointer: str) -> Book:
        return self.books.setdefault(checkpointer, Book())


class Taken(Struct):
    """What comes of an event."""

    actions: list[AnyAction] = field(default_factory=list)
    answers: list[tuple[Asker, AnyAnswer]] = field(default_factory=list)
    failed: list[tuple[SnapshotId, str]] = field(default_factory=list)
    """Checkpoints that could not be written, and why."""
    lost: NodeId | None = None
    """The node whose loss it is that all this comes of."""


def age(id: SnapshotId) -> tuple[int, int]:
    return id.round, id.step


def on_their_way(book: Book) -> list[SnapshotId]:
    writing = book.writing.snapshot if book.writing is not None else None
    return [id for id in (writing, book.wanted) if id is not None]
