"""Remembers a job's past while its journal is replayed, in bounded memory.

The core keeps what it needs to decide, and no more. A viewer wants to show how it came to that: what
each rank did and when, how the goodput went, which saves there were, how fast training was. The history
hears every event after the core has, and keeps that. Nothing in it is ever read by the core.

Like the job's own machines it is made of structs, so that it can be written to a file and read back
(`kept`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct, field

from holdfast.core.job import Job
from holdfast.core.ledger.books import Ledger
from holdfast.core.replay import Entry
from holdfast.core.stragglers import windows as stragglers
from holdfast.core.stragglers.windows import Stragglers
from holdfast.core.view import JobLoss
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import CoordinatorRestarted, HealthFound, NodeSampled, Progress
from holdfast.messages.health import HealthResult
from holdfast.messages.reports import Booking
from holdfast.messages.units import NodeId, RoundNumber, Time
from holdfast.view.history.checkpoints import CheckpointHistory
from holdfast.view.history.nodes import Seats, UsageHistory
from holdfast.view.history.series import Series
from holdfast.view.history.stories import Stories
from holdfast.view.history.timeline import Timeline

SCORES_KEPT = 256
RANKS_PER_S = 100
"""Speeds are looked at once a second, and the more seldom the more ranks there are."""


class SpeedPoint(NamedTuple):
    """How fast the job was."""

    step: int
    steps_per_s: float | None
    samples_per_s: float | None
    world_size: int


class JobHistory(Struct, dict=True):
    """What a viewer remembers of a job; the ledger's newest bookings are kept beside its fields."""

    since: Time
    """From when on it remembers: since the job was opened, or since its newest snapshot."""
    timeline: Timeline
    stories: Stories
    checkpoints: CheckpointHistory = field(default_factory=CheckpointHistory)
    speed: Series[SpeedPoint] = field(default_factory=Series)
    loss: Series[JobLoss] = field(default_factory=Series)
    scores: dict[NodeId, Series[float]] = field(default_factory=dict)
    """Lowest score of each node's ranks."""
    seats: Seats = field(default_factory=Seats)
    usage: UsageHistory = field(default_factory=UsageHistory)
    health: dict[NodeId, dict[str, HealthResult]] = field(default_factory=dict)
    """What each node's own checks found last, by the name of the check."""
    rounds: list[tuple[Time, RoundNumber]] = field(default_factory=list)
    """When each round was frozen."""
    coordinators: int = 1
    """Coordinators that the job has had."""
    _window_opened: Time | None = None

    @classmethod
    def begun(cls, job: Job, since: Time) -> JobHistory:
        """Remember what happens to a job from now on."""
        timeline = Timeline.begun(job.opened_at, job.of(Ledger).accounts)
        history = cls(since, timeline, Stories.after(job))
        history.attach(job)
        return history

    def attach(self, job: Job) -> None:
        """Go on with this job, as it was when this history was last told of it."""
        self._bookings: list[Booking] = []
        job.of(Ledger).spans = self._bookings
        self.timeline.attach(job.of(Ledger).accounts)

    def hear(self, job: Job, entry: Entry, actions: Sequence[AnyAction]) -> None:
        """Note what an event has changed."""
        self.stories.hear(job, entry, actions)
        self.checkpoints.hear(job, entry, actions)
        if job.membership.round and (not self.rounds or self.rounds[-1][1] != job.membership.round):
            self.rounds.append((entry.at, job.membership.round))
            if job.world is not None:
                self.seats.begin_round(job.world, entry.at)
        self._note_loss(job, entry.at)
        if isinstance(entry.event, Progress):
            self._progressed(job, entry.at)
        elif isinstance(entry.event, NodeSampled):
            self.usage.add(entry.event.node, entry.event.at, entry.event.usage)
        elif isinstance(entry.event, CoordinatorRestarted):
            self.coordinators += 1
        elif isinstance(entry.event, HealthFound):
            found = self.health.setdefault(entry.event.node, {})
            found.update({result.check: result for result in entry.event.results})

    def settle(self) -> None:
        """Take in what the ledger has booked since the last time."""
        self.timeline.take(self._bookings)
        self._bookings.clear()

    def _note_loss(self, job: Job, at: Time) -> None:
        loss, noted = job.loss, self.loss.newest
        if loss is not None and (noted is None or loss != noted[1]):
            self.loss.add(at, loss)

    def _progressed(self, job: Job, at: Time) -> None:
        self.speed.every_s = max(self.speed.every_s, len(job.ranks) / RANKS_PER_S)
        if self.speed.due(at):
            found = job.speed
            world_size = len(job.ranks)
            self.speed.add(
                at, SpeedPoint(job.highest, found.steps_per_s, found.samples_per_s, world_size)
            )
        opened_at = job.of(Stragglers).opened_at
        if opened_at != self._window_opened:  # A window was judged, or a round began.
            self._window_opened = opened_at
            self._judged(job, at)

    def _judged(self, job: Job, at: Time) -> None:
        lowest: dict[NodeId, float] = {}
        for rank, score in stragglers.scores(job.of(Stragglers)).items():
            known = [one for one in (score.relative, score.individual) if one is not None]
            if known and rank in job.ranks:
                node = job.ranks[rank].node
                lowest[node] = min(lowest.get(node, 1.0), *known)
        for node, value in lowest.items():
            if node not in self.scores:
                self.scores[node] = Series(SCORES_KEPT, every_s=5.0)
            self.scores[node].add(at, round(value, 4))
