"""Which nodes are slow, by the times of the tests that they passed.

A node's time is its best: the shortest solo test for computing, the shortest pair test for
communicating. A pair is as slow as the slower of the two, so a healthy partner of a slow node looks
slow until it is tested with somebody else, and the shortest time is the one that was least held up.

A node is slow when its time is more than twice that of the *typical* node and a tenth of a second
longer (below that it is noise). Typical is the slowest node of the faster half: with exactly half of
the nodes slow it is a fast one, where the usual median lies between the two; and never more than half
of the nodes are slow, because what most nodes do is the norm.

Nobody is called slow on one measurement. Whoever took twice as long as the fastest node is measured
again: after two solo tests the better one counts, and a pair time counts against a node only when
one of its partners was quick with somebody else.

What cannot be seen: if every pair that was tested holds a node with a slow network, all times are
alike. Computing is measured alone, so it is always seen.
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
"""How many solo tests it takes to call a node slow."""


class Speeds(Struct):
    solo: dict[NodeId, list[Seconds]] = field(default_factory=dict)
    pair: dict[NodeId, dict[NodeId, Seconds]] = field(default_factory=dict)
    """By partner."""


def read(trials: Iterable[Trial], gone: Collection[NodeId], out: Collection[NodeId]) -> Speeds:
    """The times of all nodes but those that are out of the check."""
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
    """Who took long in its only solo test."""
    best = {node: min(times) for node, times in speeds.solo.items()}
    fastest = min(best.values(), default=0.0)
    late = {node for node, time in best.items() if is_slower(time, fastest)}
    return {node for node in late if len(speeds.solo[node]) < SOLO_TESTS}


def must_pair(speeds: Speeds) -> set[NodeId]:
    """Who took long in pairs, and was not yet with a quick partner."""
    best = {node: min(times.values()) for node, times in speeds.pair.items()}
    fastest = min(best.values(), default=0.0)
    late = {node for node, time in best.items() if is_slower(time, fastest)}
    return {node for node in late if not _quick_partners(speeds, node, late)}


def _quick_partners(speeds: Speeds, node: NodeId, late: Collection[NodeId]) -> list[NodeId]:
    return [p for p in speeds.pair[node] if p in speeds.pair and p not in late]


def slow(speeds: Speeds) -> dict[NodeId, str]:
    """The slow nodes, and what each was slow in."""
    return {**_slow_in_pairs(speeds), **_slow_alone(speeds)}


def _slow_alone(speeds: Speeds) -> dict[NodeId, str]:
    best = {node: min(times) for node, times in speeds.solo.items()}
    usual = typical(best.values())
    return {
        node: f"its solo test took {time:.3g} s, where {usual:.3g} s are usual"
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
                f"its best pair test took {best[node]:.3g} s, where {usual:.3g} s are usual, "
                f"though {quick[0]} was quick with another"
            )
    return reasons


def typical(times: Iterable[Seconds]) -> Seconds:
    """The slowest of the faster half."""
    return median_low(list(times) or [0.0])


def is_slower(time: Seconds, than: Seconds) -> bool:
    return time > SLOW_FACTOR * than and time > than + SLOW_FLOOR_S
