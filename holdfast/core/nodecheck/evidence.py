"""What tests of pairs prove about nodes, and what they do not.

A pair passes when both of its nodes say so, and then both are *proven* good: a broken node cannot take
part in a collective that is right at both ends. A pair that fails says only that something is wrong
with one of the two or with the link between them. So nobody is blamed for a failure by itself. A node
is faulty when

    it failed its solo test, in which nobody else takes part; or
    it never passed with anybody, and failed with two *witnesses*.

A witness is a node that passed with somebody other than the accused, is still there, and never failed
with a proven node. The last condition keeps out nodes that pass at one time and fail at another: once
such a node was caught, its failures say nothing about others.

Whom this can wrong: a healthy node fails only through its partner or their link, and a node that
always fails never is a witness. So at least two nodes that pass here and fail there, or two bad links,
must have hit the same healthy node in everything it took part in. No rule can exclude that: what the
tests show is then the same as for a node that is broken. One such node or link never gets anybody
else blamed, nor does any number of nodes that always fail.

Two proven nodes that failed with each other have a *suspect link* and are both healthy. A proven node
that failed with two proven nodes is a contradiction and stays undetermined.

Silence is a failure only when nobody in the group passed. When the partner passed, the collective
worked and only the answer is missing, which proves nothing; and a test in which a node was lost
proves nothing about the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from msgspec import Struct, field

from holdfast.messages.nodecheck import TestResult
from holdfast.messages.units import NodeId

WITNESSES = 2
"""How many good nodes must have failed with a node before it is blamed."""

Outcome = Literal["passed", "failed", "nothing"]


class Trial(Struct):
    """The test of one group in one round."""

    round: int
    nodes: tuple[NodeId, ...]
    """Two, or one that only takes its solo test."""
    answers: dict[NodeId, TestResult] = field(default_factory=dict)


class Evidence(Struct):
    """The trials of a check, by node. Derived, never kept."""

    gone: Collection[NodeId]
    passed: dict[NodeId, list[NodeId]]
    """With whom it passed."""
    failed: dict[NodeId, list[NodeId]]
    met: dict[NodeId, list[NodeId]]
    """With whom it was tested, whatever came of it."""
    solo_passed: set[NodeId]
    solo_failed: dict[NodeId, str]
    """With what was said about it."""


def read(nodes: Iterable[NodeId], trials: Iterable[Trial], gone: Collection[NodeId]) -> Evidence:
    """All that these trials, which are over, say."""
    passed, failed, met = ({node: list[NodeId]() for node in nodes} for _ in range(3))
    evidence = Evidence(gone, passed, failed, met, set(), {})
    for trial in trials:
        for answer in trial.answers.values():
            _read_solo(evidence, answer)
        if len(trial.nodes) == 2:
            _read_pair(evidence, trial)
    return evidence


def _read_solo(evidence: Evidence, answer: TestResult) -> None:
    if answer.solo_passed:
        evidence.solo_passed.add(answer.node)
    elif answer.solo_passed is False:
        evidence.solo_failed.setdefault(answer.node, answer.detail)


def _read_pair(evidence: Evidence, trial: Trial) -> None:
    a, b = trial.nodes
    found = outcome(trial, evidence.gone)
    for node, partner in ((a, b), (b, a)):
        evidence.met[node].append(partner)
        if found == "passed":
            evidence.passed[node].append(partner)
        elif found == "failed":
            evidence.failed[node].append(partner)


def outcome(trial: Trial, gone: Collection[NodeId]) -> Outcome:
    """What the collective of a group that is over has shown."""
    said = [trial.answers[node].passed if node in trial.answers else None for node in trial.nodes]
    if all(said):
        return "passed"
    if any(node in gone and node not in trial.answers for node in trial.nodes):
        return "nothing"
    return "failed" if False in said or not any(said) else "nothing"


def is_faulty(evidence: Evidence, node: NodeId) -> bool:
    if node in evidence.solo_failed:
        return True
    return not evidence.passed[node] and len(witnesses(evidence, node)) >= WITNESSES


def contradictions(evidence: Evidence, node: NodeId) -> list[NodeId]:
    """Nodes that passed with others and failed with this one."""
    return [p for p in evidence.failed[node] if evidence.passed[p] and not _is_out(evidence, p)]


def witnesses(evidence: Evidence, accused: NodeId) -> list[NodeId]:
    """Good nodes that failed with the accused."""
    return [node for node in evidence.failed[accused] if _can_witness(evidence, node, accused)]


def _can_witness(evidence: Evidence, node: NodeId, accused: NodeId) -> bool:
    if _is_out(evidence, node) or not any(p != accused for p in evidence.passed[node]):
        return False
    return not any(p != accused for p in contradictions(evidence, node))


def _is_out(evidence: Evidence, node: NodeId) -> bool:
    return node in evidence.gone or node in evidence.solo_failed
