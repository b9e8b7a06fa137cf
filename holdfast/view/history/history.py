"""Remembers a job's past while its journal is replayed, in bounded memory.

The core keeps what it needs to decide, and no more. A viewer wants to show how it came to that: what
each rank did and when, how the goodput went, which saves there were, how fast training was. The history
hears every event after the core has, and keeps that. Nothing in it is ever read by the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.core.job import Job
from holdfast.core.ledger.books import Ledger
from holdfast.core.replay import Entry
from holdfast.core.stragglers import windows as stragglers
from holdfast.core.stragglers.windows import Stragglers
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


class JobHistory:
    """What a viewer remembers of a job."""

    def __init__(self, job: Job) -> None:
        ledger = job.of(Ledger)
        self._bookings: list[Booking] = []
        ledger.spans = self._bookings
        self.timeline = Timeline(job.opened_at, ledger.accounts)
        self.checkpoints = CheckpointHistory()
        self.stories = Stories()
        self.speed: Series[SpeedPoint] = Series()
        self.scores: dict[NodeId, Series[float]] = {}
        """Lowest score of each node's ranks."""
        self.seats = Seats()
        self.usage = UsageHistory()
        self.health: dict[NodeId, dict[str, HealthResult]] = {}
        """What each node's own checks found last, by the name of the check."""
        self.rounds: list[tuple[Time, RoundNumber]] = []
        """When each round was frozen."""
        self.coordinators = 1
        """Coordinators that the job has had."""
        self._window_opened: Time | None = None

    def hear(self, job: Job, entry: Entry, actions: Sequence[AnyAction]) -> None:
        """Note what an event has changed."""
        self.stories.hear(job, entry, actions)
        self.checkpoints.hear(job, entry, actions)
        if job.membership.round and (not self.rounds or self.rounds[-1][1] != job.membership.round):
            self.rounds.append((entry.at, job.membership.round))
            if job.world is not None:
                self.seats.begin_round(job.world, entry.at)
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
