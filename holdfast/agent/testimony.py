"""Tells what can be seen of this node's workers, when somebody wants to know why a job stands still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.agent.evidence import examine
from holdfast.agent.workers import Crew
from holdfast.messages.units import NodeId, RoundNumber, Seconds
from holdfast.messages.wire import Testimony


@dataclass
class Witness:
    node: NodeId
    crew: Crew
    tell: Callable[[Testimony], None]

    async def testify(self, inquest: int, round: RoundNumber, limit_s: Seconds) -> None:
        """Whoever asked does not wait for ever."""
        seen = [worker.examined() for worker in self.crew.workers.values()]
        workers = [worker for worker in seen if worker is not None]
        evidence = await examine(self.node, round, workers, limit_s)
        # One rank at a time: a frame has a limit, and a node may have many ranks.
        for index, one in enumerate(evidence):
            more = index + 1 < len(evidence)
            self.tell(Testimony(inquest=inquest, evidence=(one,), more=more))
        if not evidence:
            self.tell(Testimony(inquest=inquest, evidence=()))
