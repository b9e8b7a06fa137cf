"""The workers of the round that are there now, and what the others had done when they ended.

It is only the list, for all who need one worker or every one of them; who gets onto it, and off it, is
for `relay` to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.agent.fault_injector import FaultTarget
from holdfast.agent.worker import Worker
from holdfast.messages.local import ScriptReply
from holdfast.messages.records import RankProgress
from holdfast.messages.units import Rank, Seconds


@dataclass
class Crew:
    workers: dict[Rank, Worker] = field(default_factory=dict)
    ended: list[RankProgress] = field(default_factory=list)
    slowest_stop_s: Seconds | None = None
    """The longest that a worker of the round took to end after it was asked to."""

    def begin_round(self) -> None:
        self.ended = []
        self.slowest_stop_s = None

    def add(self, worker: Worker) -> None:
        self.workers[worker.rank] = worker

    def remove(self, worker: Worker) -> None:
        del self.workers[worker.rank]

    def note_end(self, progress: RankProgress, stop_took_s: Seconds | None) -> None:
        self.ended.append(progress)
        if stop_took_s is not None:
            self.slowest_stop_s = max(stop_took_s, self.slowest_stop_s or 0.0)

    def all_stepped(self) -> bool:
        return all(worker.stepped for worker in self.workers.values())

    def targets(self) -> dict[Rank, FaultTarget]:
        return {rank: worker.target() for rank, worker in self.workers.items()}

    def reply(self, rank: Rank, message: ScriptReply) -> None:
        """Say it to that rank's worker, if it is still there and listens."""
        worker = self.workers.get(rank)
        if worker is not None and worker.standby is not None:
            worker.standby.reply(message)

    def ask_to_stop(self, grace_s: Seconds) -> None:
        for worker in self.workers.values():
            worker.ask_to_stop(grace_s)

    def kill(self) -> None:
        for worker in self.workers.values():
            worker.kill()
