"""Simulates the tests that a node makes when the coordinator checks the nodes.

An unfit host fails its solo test; what two nodes test together passes. An order that comes again with
a size of one asks for what is known without the other node, as in `holdfast.agent.nodecheck`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.messages.actions import TestNode
from holdfast.messages.events import NodeTested
from holdfast.messages.nodecheck import TestResult
from holdfast.messages.units import Seconds

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent

COLD_S: Seconds = 3.0
"""How much longer a test takes on a node that has to import torch for it."""


class SimTester:
    """The tests of one node."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent
        self._latest = (0, 0)
        self._order: TestNode | None = None

    def act(self, order: TestNode) -> None:
        wanted, waiting = (order.check, order.round), self._order is not None
        if wanted > self._latest or (wanted == self._latest and order.size == 1 and waiting):
            self._latest, self._order = wanted, order
            solo_s = self._agent.rng.uniform(0.1, 0.4) + (0.0 if self._agent.warm else COLD_S)
            self._agent.later(solo_s, self._tell, order, solo_s)

    def end(self) -> None:
        """Give up the test that is running."""
        self._order = None

    def _tell(self, order: TestNode, solo_s: Seconds) -> None:
        if self._order is not order:
            return
        self._order = None
        fit = not self._agent.host.unfit
        result = TestResult(
            node=order.node,
            round=order.round,
            group=order.group,
            solo_passed=fit,
            solo_s=solo_s,
            passed=True if fit and order.size > 1 else None,
            seconds=0.05 if fit and order.size > 1 else None,
            detail="" if fit else "matmul gave a wrong result",
        )
        self._agent.report(NodeTested, check=order.check, result=result)
