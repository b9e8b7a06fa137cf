"""What the coordinator is told of this node's ranks: that they began, how far they have come, which
stand still, and how they ended.

Progress is told when there is any. What steps consist of is told along with it, but with many nodes
less often, so that the coordinator hears as much of it however many there are. A rank's end is told
after what it saved: else the job would be repaired from an older state.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.agent.stall_detector import Watch
from holdfast.agent.worker import Ending, Worker
from holdfast.clock import JobClock
from holdfast.messages.events import (
    AnyEvent,
    Progress,
    RanksStalled,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.hangs import Stall
from holdfast.messages.records import Part, Raised, RankProgress
from holdfast.messages.units import NodeId, Rank, RoundNumber

log = logging.getLogger("holdfast.agent")

CANNOT_START = 126
"""What a shell says of a command that is there and cannot be run."""
NEWS_EVERY_S = 0.9
NEWS_PER_S = 50.0
"""So many nodes in a second tell what their steps consist of."""


@dataclass
class Reporter:
    node: NodeId
    clock: JobClock
    report: Callable[[AnyEvent], None]
    ended: Callable[[Rank, bool, Callable[[], None]], None]
    """Do something once what the rank saved is sealed."""
    _round: RoundNumber = RoundNumber(0)
    _nodes: int = 1
    _told_steps: dict[Rank, int] = field(default_factory=dict)
    _news_at: float = 0.0

    def begin_round(self, part: Part) -> None:
        self._round = part.round
        self._nodes = part.group_world_size
        self._told_steps = {}

    def began(self, worker: Worker, at: float) -> None:
        self.report(
            WorkerStarted(
                at=self.clock.at(at),
                node=self.node,
                round=worker.round,
                rank=worker.rank,
                pid=worker.process.pid,
                warm=worker.warm,
            )
        )

    def progressed(self, workers: Iterable[Worker], watch: Watch | None = None) -> None:
        """Tell of those that have come further; if a watch is given, also what it has seen."""
        moved = [progress for worker in workers if (progress := self._news_of(worker)) is not None]
        if not moved:
            return
        if watch is not None and not self._watch_due():
            watch = None
        self.report(
            Progress(
                at=self.clock.now(),
                node=self.node,
                round=self._round,
                ranks=tuple(moved),
                paces=watch.news() if watch is not None else None,
                timings=watch.timings() if watch is not None else (),
            )
        )

    def _news_of(self, worker: Worker) -> RankProgress | None:
        progress = worker.progress(self.clock)
        if progress.steps <= self._told_steps.get(worker.rank, 0):
            return None
        self._told_steps[worker.rank] = progress.steps
        return progress

    def _watch_due(self) -> bool:
        now = time.monotonic()
        if now < self._news_at:
            return False
        self._news_at = now + max(NEWS_EVERY_S, self._nodes / NEWS_PER_S)
        return True

    def stalled(self, stalls: tuple[Stall, ...]) -> None:
        at, node, round = self.clock.now(), self.node, self._round
        self.report(RanksStalled(at=at, node=node, round=round, stalls=stalls))

    def not_started(self, part: Part, error: BaseException) -> None:
        """There are no processes for the ranks of the part: as if the first one had died of that."""
        trace = None if isinstance(error, OSError) else error
        log.error("round %d cannot be started: %s", part.round, error, exc_info=trace)
        kind = type(error).__name__
        self.report(
            WorkerExited(
                at=self.clock.now(),
                node=self.node,
                round=part.round,
                rank=part.first_rank,
                code=CANNOT_START,
                progress=RankProgress(rank=part.first_rank),
                raised=Raised(type=kind, message=str(error), where="its start", traceback=""),
            )
        )

    def exited(self, worker: Worker, ending: Ending, progress: RankProgress) -> None:
        killed = ending.exit.signal == signal.SIGKILL
        told = WorkerExited(
            at=self.clock.now(),
            node=self.node,
            round=worker.round,
            rank=worker.rank,
            code=ending.exit.code,
            signal=ending.exit.signal,
            oom=killed and worker.memory_ran_out(),
            progress=progress,
            raised=worker.raised(),
            log_tail=worker.output.tail(),
        )
        self.ended(worker.rank, ending.exit.code == 0, lambda: self.report(told))
