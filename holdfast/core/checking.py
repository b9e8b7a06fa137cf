"""Checks nodes before they get a place, when the user wants that.

Before a round is frozen, all nodes that wait for it test each other (`nodecheck`): before training and
again after each fault. Each round of tests is an order to every node in it; it is over when all have
answered, or its time is up. Faulty nodes are sent away and their hosts remembered; slow ones too, if
stragglers are to be excluded and enough others are left.
"""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.core import nodecheck
from holdfast.core.membership import Membership
from holdfast.core.nodecheck import NodeCheck
from holdfast.messages.actions import AnyAction, TestNode
from holdfast.messages.nodecheck import NodeVerdict, TestResult
from holdfast.messages.units import NodeId, Seconds, Time

UNKNOWN_S: Seconds = 60.0
"""For the first round of tests: processes may have to import torch for it."""
FLOOR_S: Seconds = 5.0
FACTOR = 10.0


class Checking(Struct):
    number: int = 0
    """Counts the checks; orders and answers carry it."""
    check: NodeCheck | None = None
    """The one that is running."""
    began_at: Time | None = None
    until: Time | None = None
    longest_s: Seconds | None = None
    done: dict[NodeId, str] = field(default_factory=dict)
    """Nodes that were checked since the last fault, and what came of it."""


def due(checking: Checking, m: Membership) -> bool:
    """Whether a node waits that was not checked."""
    return any(node not in checking.done for node in m.waiting)


def begin(checking: Checking, m: Membership, now: Time) -> list[AnyAction]:
    checking.number += 1
    checking.check = nodecheck.begin(m.waiting)
    return go_on(checking, m, now)


def go_on(checking: Checking, m: Membership, now: Time) -> list[AnyAction]:
    """Order the next round of tests. When there is none, the check is over: see `take_verdicts`."""
    assert checking.check is not None
    planned = nodecheck.plan(checking.check)
    if planned is None:
        checking.until = None
        return []
    limit_s = UNKNOWN_S
    if checking.longest_s is not None:
        limit_s = max(FLOOR_S, FACTOR * checking.longest_s)
    checking.began_at, checking.until = now, Time(now + limit_s)
    actions: list[AnyAction] = []
    for index, group in enumerate(planned.groups):
        host = m.waiting.get(group[0])
        for rank, node in enumerate(group):
            if host is not None and node in m.waiting:
                actions.append(
                    TestNode(
                        node=node,
                        check=checking.number,
                        round=planned.number,
                        group=index,
                        rank=rank,
                        size=len(group),
                        address=host.spec.address,
                        port=host.store_port,
                        limit_s=limit_s,
                    )
                )
    return actions


def tested(checking: Checking, number: int, result: TestResult, now: Time) -> bool:
    """A node tells how its test went; True when that was the last of the round."""
    if checking.check is None or number != checking.number:
        return False
    if not nodecheck.take(checking.check, result) or checking.check.owed:
        return False
    if checking.began_at is not None:
        took_s = max(0.0, now - checking.began_at)
        checking.longest_s = max(took_s, checking.longest_s or 0.0)
    return True


def times_up(checking: Checking, now: Time) -> bool:
    """Whether a round of tests has to end without those who did not answer."""
    if checking.check is None or checking.until is None or checking.until > now:
        return False
    nodecheck.time_out(checking.check)
    return True


def lost(checking: Checking, node: NodeId) -> bool:
    """A node is gone; True when the round only waited for it."""
    checking.done.pop(node, None)
    if checking.check is None or node not in checking.check.nodes:
        return False
    nodecheck.lost(checking.check, node)
    return not checking.check.owed


def take_verdicts(checking: Checking) -> list[NodeVerdict]:
    """The check is over: what it found."""
    assert checking.check is not None
    found = nodecheck.verdicts(checking.check)
    checking.done |= {one.node: one.verdict for one in found}
    checking.check = checking.until = checking.began_at = None
    return found


def validate(checking: Checking) -> None:
    if checking.check is not None:
        nodecheck.validate(checking.check)
        assert checking.until is not None, "a check that nobody ends"
