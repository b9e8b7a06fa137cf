"""A job whose nodes are tested: what each was told, and what it answers.

A node is healthy, or *broken* (it fails with whomever it is tested), or *dead* (it fails alone). Pairs
fail when one of the two is not healthy, as they would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from driver import Driver

from holdfast.core.nodecheck.schedule import Checking
from holdfast.messages.actions import AnyAction, Finish, StartWorkers, TestNode
from holdfast.messages.events import AnyEvent, NodeTested, NodeWarm
from holdfast.messages.nodecheck import TestResult
from holdfast.messages.units import NodeId

TOOK_S = 0.6
"""A round of tests; longer than the grace for newcomers."""


class Lab(Driver):
    def __init__(self, **terms: Any) -> None:
        self.orders: dict[str, TestNode] = {}
        """What each node is testing at this moment."""
        self.told: dict[str, list[TestNode]] = {}
        """All that each node was ever told to test."""
        super().__init__(**{"node_check": True, **terms})

    def take(self, event: AnyEvent) -> list[AnyAction]:
        actions = super().take(event)
        for action in actions:
            if isinstance(action, TestNode):
                self.orders[action.node] = action
                self.told.setdefault(action.node, []).append(action)
            elif isinstance(action, Finish | StartWorkers):
                self.orders.pop(action.node, None)
        return actions

    def join(self, node: str, slots: int = 2, **more: Any) -> list[AnyAction]:
        more = {"host": f"host-{node}", "test_port": 7000, **more}
        actions = super().join(node, slots, **more)
        return actions + self.take(NodeWarm(at=self.at, node=NodeId(node)))

    def lose(self, node: str) -> list[AnyAction]:
        self.orders.pop(node, None)
        return super().lose(node)

    def gather(self, *nodes: str) -> Lab:
        """All of them join, and it is waited until no more are waited for."""
        for node in nodes:
            self.join(node)
        if self.job.of(Checking).check is None and self.job.world is None:
            self.after(60).tick()
        return self

    def pairs(self) -> list[tuple[str, ...]]:
        """Who is being tested with whom."""
        groups: dict[int, list[TestNode]] = {}
        for order in self.orders.values():
            groups.setdefault(order.group, []).append(order)
        return sorted(
            tuple(order.node for order in sorted(group, key=lambda order: order.rank))
            for group in groups.values()
        )

    def answer(self, node: str, **how: Any) -> list[AnyAction]:
        """One node's answer to what it was told; it passes unless it is said how it went."""
        order = self.orders.pop(node)
        return self.take(self.tested(order, **how))

    def tested(self, order: TestNode, **how: Any) -> NodeTested:
        """The words in which a node would answer."""
        check = how.pop("check", order.check)
        passed = {"passed": True, "seconds": 0.01} if order.size > 1 else {}
        result: dict[str, Any] = {
            "node": order.node,
            "round": order.round,
            "group": order.group,
            "solo_passed": True,
            "solo_s": 0.01,
            **passed,
            **how,
        }
        return NodeTested(at=self.at, node=order.node, check=check, result=TestResult(**result))

    def answer_round(
        self, broken: Collection[str] = (), dead: Collection[str] = ()
    ) -> list[AnyAction]:
        """Everybody answers what the node was told last, those who fail before those who pass."""
        self.after(TOOK_S)
        actions: list[AnyAction] = []
        round = {order.round for order in self.orders.values()}
        for node in sorted(self.orders, key=lambda node: (node not in dead, node not in broken)):
            order = self.orders.get(node)
            if order is None or order.round not in round:
                continue  # It was sent away, or has another test by now.
            partners = {o.node for o in self.orders.values() if o.group == order.group}
            if node in dead:
                how: dict[str, Any] = {"solo_passed": False, "passed": None, "detail": "no GPU"}
            elif order.size > 1 and (partners | {node}) & {*broken, *dead}:
                how = {"passed": False, "detail": "no link"}
            else:
                how = {}
            actions += self.answer(node, **how)
        return actions

    def answer_all(
        self, broken: Collection[str] = (), dead: Collection[str] = ()
    ) -> list[AnyAction]:
        """Answer one round of tests after the other until nobody is tested any more."""
        actions: list[AnyAction] = []
        for _ in range(30):
            if not self.orders:
                return actions
            actions += self.answer_round(broken, dead)
        raise AssertionError("the check does not come to an end")


def started(actions: Iterable[AnyAction]) -> list[str]:
    return [action.node for action in actions if isinstance(action, StartWorkers)]


def sent_away(actions: Iterable[AnyAction]) -> dict[str, int]:
    return {action.node: action.code for action in actions if isinstance(action, Finish)}


def ordered(actions: Iterable[AnyAction]) -> list[tuple[str, int]]:
    """Who is told to test, and in a group of how many."""
    return [(action.node, action.size) for action in actions if isinstance(action, TestNode)]
