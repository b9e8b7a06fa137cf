"""Checks nodes before they get a place, when the user wants that.

Before a round is frozen, all nodes that wait for it test each other (`nodecheck`): before training and
again after each fault. Each round of tests is an order to every node in it; it is over when all have
answered, or its time is up. Faulty nodes are sent away and their hosts remembered; slow ones too, if
stragglers are to be excluded and enough others are left.

A test of two cannot end well when one of them is gone or has failed already; and one that hangs says
nothing by itself. So whoever waits in vain is told to do without the other: the same order again, with
a size of one. It answers then with what its solo test has shown. How long tests may take is learnt from
those that passed: of other checks, and of the other pairs in the same round.

A node that comes while others are checked has its turn in the next check, but the others do not wait
for it when they are enough; nor do they wait again and again for one that comes and goes.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from holdfast.core.leases import AFTER_RESTART_S
from holdfast.core.nodecheck import trials as nodecheck
from holdfast.core.nodecheck.evidence import Trial
from holdfast.core.nodecheck.trials import NodeCheck
from holdfast.core.view import Members
from holdfast.messages.actions import AnyAction, TestNode
from holdfast.messages.nodecheck import NodeVerdict, TestResult
from holdfast.messages.units import NodeId, Seconds, Time

UNKNOWN_S: Seconds = 60.0
"""Until a pair was seen to pass, and for nodes that have to import torch first."""
FLOOR_S: Seconds = 5.0
FACTOR = 10.0
ANSWER_S: Seconds = 3.0
"""How long a node may take to say what it knows, once it is told to."""
IN_A_ROW = 3
"""After so many checks newcomers are not waited for any more, if the others are enough."""


class Checking(Struct):
    number: int = 0
    """Counts the checks; orders and answers carry it."""
    check: NodeCheck | None = None
    """The one that is running."""
    began_at: Time | None = None
    """Its round of tests."""
    until: Time | None = None
    hurried: bool = False
    """Time was up: whoever has not answered was told to do without the other."""
    longest_s: Seconds | None = None
    """That a pair took to pass."""
    done: dict[NodeId, str] = field(default_factory=dict)
    """Nodes that were checked since the last fault, and what came of it."""
    row: int = 0
    """How many checks there were since the last round of training."""
    sick: dict[NodeId, str] = field(default_factory=dict)
    """Nodes whose own checks failed, and that the job could not do without so far."""


def due(checking: Checking, m: Members, min_nodes: int) -> bool:
    """Whether a node waits that was not checked, and has to be before the next round."""
    checked = {node: c for node, c in m.waiting.items() if node in checking.done}
    if len(checked) == len(m.waiting):
        return False
    enough = m.largest if checking.row < IN_A_ROW else max(1, min_nodes)
    return len(checked) < enough or m.formable(checked) < enough


def unchecked(checking: Checking, m: Members) -> list[NodeId]:
    """Name the waiting nodes that were not checked: they get no place in the next round."""
    return [node for node in m.waiting if node not in checking.done]


def begin(checking: Checking, m: Members, now: Time) -> list[AnyAction]:
    checking.number += 1
    checking.row += 1
    checking.check = nodecheck.begin(m.waiting)
    return go_on(checking, m, now)


def go_on(checking: Checking, m: Members, now: Time) -> list[AnyAction]:
    """Order the next round of tests. When there is none, the check is over: see `take_verdicts`."""
    assert checking.check is not None
    planned = nodecheck.plan(checking.check)
    if planned is None:
        checking.until = None
        return []
    limit_s = UNKNOWN_S
    if checking.longest_s is not None and _all_warm(m, checking.check.owed):
        limit_s = _limit_s(checking.longest_s)
    checking.hurried = False
    checking.began_at, checking.until = now, Time(now + limit_s)
    return [*_orders(checking, m, checking.check.owed)]


def take(
    checking: Checking, m: Members, number: int, result: TestResult, now: Time
) -> list[AnyAction] | None:
    """A node tells how its test went; None when nobody waits for that any more."""
    check = checking.check
    if check is None or number != checking.number or not nodecheck.take(check, result):
        return None
    if result.passed:
        _learn(checking, m, now)
    return _release(checking, m, result.node)


def lost(checking: Checking, m: Members, node: NodeId) -> list[AnyAction]:
    """A node is gone: whoever is tested with it need not wait for it."""
    checking.done.pop(node, None)
    checking.sick.pop(node, None)
    check = checking.check
    if check is None or node not in check.nodes or node in check.gone:
        return []
    nodecheck.lost(check, node)
    return _release(checking, m, node)


def is_over(checking: Checking) -> bool:
    """Whether nobody is waited for in the running round of tests."""
    return checking.check is not None and not checking.check.owed


def is_late(checking: Checking, now: Time) -> bool:
    return checking.until is not None and checking.until <= now


def hurry(checking: Checking, m: Members, now: Time) -> list[AnyAction]:
    """The time for a round of tests is up: ask once for what is known, then go on without."""
    assert checking.check is not None
    if checking.hurried:
        nodecheck.time_out(checking.check)
        return []
    checking.hurried = True
    checking.until = Time(now + ANSWER_S)
    return [*_orders(checking, m, checking.check.owed)]


def warmed(checking: Checking, node: NodeId, now: Time) -> None:
    """A node had to import torch for its test: the time for it begins only now."""
    owes = checking.check is not None and node in checking.check.owed
    if owes and not checking.hurried:
        assert checking.began_at is not None
        assert checking.until is not None
        limit_s = checking.until - checking.began_at
        checking.began_at, checking.until = now, Time(now + limit_s)


def remind(checking: Checking, m: Members, node: NodeId) -> list[AnyAction]:
    """A node is back on a new stream: its order again, if its answer is waited for."""
    owes = checking.check is not None and node in checking.check.owed
    return [*_orders(checking, m, [node])] if owes else []


def restarted(checking: Checking, now: Time) -> None:
    """The coordinator was away: whoever could not reach it meanwhile has time to do so."""
    if checking.until is not None:
        later = now + AFTER_RESTART_S + ANSWER_S
        checking.until = Time(max(checking.until, later))


def take_verdicts(checking: Checking) -> list[NodeVerdict]:
    """The check is over: what it found about those who are still there."""
    assert checking.check is not None
    there = [node for node in checking.check.nodes if node not in checking.check.gone]
    found = [one for one in nodecheck.verdicts(checking.check) if one.node in there]
    checking.done |= {one.node: one.verdict for one in found}
    abandon(checking)
    return found


def abandon(checking: Checking) -> None:
    """Nobody wants to know any more; answers that still come are of an older check."""
    checking.check = checking.until = checking.began_at = None
    checking.hurried = False


# ---- orders ------------------------------------------------------------------------------------


def _orders(checking: Checking, m: Members, nodes: Iterable[NodeId]) -> list[TestNode]:
    check = checking.check
    assert check is not None
    running = check.trials[check.first :]
    of = {node: (index, trial) for index, trial in enumerate(running) for node in trial.nodes}
    return [_order(checking, m, node, *of[node]) for node in nodes if node in m.waiting]


def _order(checking: Checking, m: Members, node: NodeId, index: int, trial: Trial) -> TestNode:
    assert checking.check is not None
    assert checking.began_at is not None
    assert checking.until is not None
    first = node
    rank, size = 0, 1
    there = trial.nodes[0] in m.waiting  # Else it has passed, and left since.
    if there and not checking.hurried and _in_company(checking.check, trial, node):
        first = trial.nodes[0]
        rank, size = trial.nodes.index(node), len(trial.nodes)
    host = m.waiting[first].spec
    return TestNode(
        node=node,
        check=checking.number,
        round=checking.check.round,
        group=index,
        rank=rank,
        size=size,
        address=host.address,
        port=host.test_port,
        limit_s=checking.until - checking.began_at,
    )


def _in_company(check: NodeCheck, trial: Trial, node: NodeId) -> bool:
    """Whether the test of this group may still end well for that node."""
    others = [other for other in trial.nodes if other != node]
    return all(
        trial.answers[other].passed if other in trial.answers else other not in check.gone
        for other in others
    )


def _release(checking: Checking, m: Members, node: NodeId) -> list[AnyAction]:
    """Tell who waits for that node in vain to do without it."""
    check = checking.check
    assert check is not None
    trials = [trial for trial in check.trials[check.first :] if node in trial.nodes]
    waiting = [
        other
        for trial in trials
        for other in trial.nodes
        if other in check.owed and not _in_company(check, trial, other)
    ]
    return [*_orders(checking, m, waiting)] if waiting and not checking.hurried else []


# ---- how long tests may take -------------------------------------------------------------------


def _limit_s(took_s: Seconds) -> Seconds:
    return max(FLOOR_S, FACTOR * took_s)


def _learn(checking: Checking, m: Members, now: Time) -> None:
    """A pair has passed: by that, and once half of the nodes have answered, others are judged."""
    check = checking.check
    assert check is not None
    assert checking.began_at is not None
    assert checking.until is not None
    took_s = max(0.0, now - checking.began_at)
    checking.longest_s = max(took_s, checking.longest_s or 0.0)
    tested = sum(len(trial.nodes) for trial in check.trials[check.first :])
    if 2 * len(check.owed) <= tested and not checking.hurried and _all_warm(m, check.owed):
        sooner = checking.began_at + _limit_s(took_s)
        checking.until = Time(min(checking.until, sooner))


def _all_warm(m: Members, nodes: Iterable[NodeId]) -> bool:
    return all(m.waiting[node].warm for node in nodes if node in m.waiting)


def validate(checking: Checking, m: Members) -> None:
    assert (checking.check is None) == (checking.until is None), "a check that nobody ends"
    if checking.check is not None:
        nodecheck.validate(checking.check)
        assert checking.began_at is not None, "a check that never began"
        assert checking.check.owed, "a round of tests that is over and nobody goes on"
        there = set(checking.check.nodes) - checking.check.gone.keys()
        assert there <= m.waiting.keys(), "a node is checked that does not wait"
