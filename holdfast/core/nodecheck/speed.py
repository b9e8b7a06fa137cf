"""Decides which nodes are slow, by the times of the tests that they passed.

A node's time is its best: the shortest solo test for compute, the shortest pair test for communication.
A pair is as slow as the slower of the two, so a healthy partner of a slow node looks slow until it is
tested with another one; the shortest time is the least disturbed.

A node is slow if its time is more than twice that of the *typical* node and a tenth of a second longer
(less is noise). The typical node is the slowest of the faster half: with exactly half of the nodes slow
it is a fast one, where the usual median would lie between the two; and never more than half of the
nodes are slow, because what most nodes do is the norm.

One measurement does not suffice. A node that took twice as long as the fastest is measured again: after
two solo tests the better one counts, and a pair time counts against a node only if one of its partners
was fast with another node.

Not detectable: if every tested pair contains a node with a slow network, all times are alike. Compute
is measured alone, so a slow node is always seen there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from statistics import median_low

from msgspec import Struct, field

from holdfast.core.nodecheck.evidence import Trial, outcome
from holdfast.messages.units import NodeId, Seconds

SLOW_FACTOR = 2.0
SLOW_FLOOR_S: Seconds = 0.1
SOLO_TESTS = 2
"""Solo tests that it takes to call a node slow."""


class Speeds(Struct):
    """Times of passed tests, by node."""

    solo: dict[NodeId, list[Seconds]] = field(default_factory=dict)
    pair: dict[NodeId, dict[NodeId, Seconds]] = field(default_factory=dict)
    """Times by partner."""


def read(trials: Iterable[Trial], gone: Collection[NodeId], out: Collection[NodeId]) -> Speeds:
    """Collect the times of all nodes that are still in the check."""
    speeds = Speeds()
    for trial in trials:
        passed = len(trial.nodes) == 2 and outcome(trial, gone) == "passed"
        for node, answer in trial.answers.items():
            if node in out:
                continue
            if answer.solo_passed and answer.solo_s is not None:
                speeds.solo.setdefault(node, []).append(answer.solo_s)
            if passed and answer.seconds is not None:
                (partner,) = (other for other in trial.nodes if other != node)
                speeds.pair.setdefault(node, {})[partner] = answer.seconds
    return speeds


def must_solo(speeds: Speeds) -> set[NodeId]:
    """Return the nodes that were slow in their only solo test."""
    best = {node: min(times) for node, times in speeds.solo.items()}
    fastest = min(best.values(), default=0.0)
    late = {node for node, time in best.items() if is_slower(time, fastest)}
    return {node for node in late if len(speeds.solo[node]) < SOLO_TESTS}


def must_pair(speeds: Speeds) -> set[NodeId]:
    """Return the nodes that were slow in pairs, and have not been with a fast partner yet."""
    best = {node: min(times.values()) for node, times in speeds.pair.items()}
    fastest = min(best.values(), default=0.0)
    late = {node for node, time in best.items() if is_slower(time, fastest)}
    return {node for node in late if not _quick_partners(speeds, node, late)}


def _quick_partners(speeds: Speeds, node: NodeId, late: Collection[NodeId]) -> list[NodeId]:
    return [p for p in speeds.pair[node] if p in speeds.pair and p not in late]


def slow(speeds: Speeds) -> dict[NodeId, str]:
    """Return the slow nodes, each with the reason."""
    return {**_slow_in_pairs(speeds), **_slow_alone(speeds)}


def _slow_alone(speeds: Speeds) -> dict[NodeId, str]:
    best = {node: min(times) for node, times in speeds.solo.items()}
    usual = typical(best.values())
    return {
        node: f"its solo test took {time:.3g} s, where {usual:.3g} s is typical"
        for node, time in best.items()
        if is_slower(time, usual) and len(speeds.solo[node]) >= SOLO_TESTS
    }


def _slow_in_pairs(speeds: Speeds) -> dict[NodeId, str]:
    best = {node: min(times.values()) for node, times in speeds.pair.items()}
    usual = typical(best.values())
    late = {node for node, time in best.items() if is_slower(time, usual)}
    reasons = {}
    for node in late:
        if quick := _quick_partners(speeds, node, late):
            reasons[node] = (
                f"its best pair test took {best[node]:.3g} s, where {usual:.3g} s is typical, "
                f"though {quick[0]} was fast with another node"
            )
    return reasons


def typical(times: Iterable[Seconds]) -> Seconds:
    """Return the slowest time of the faster half."""
    return median_low(list(times) or [0.0])


def is_slower(time: Seconds, than: Seconds) -> bool:
    return time > SLOW_FACTOR * than and time > than + SLOW_FLOOR_S
