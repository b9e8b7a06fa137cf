"""Decides what tests of pairs prove about nodes.

A pair passes if both of its nodes say so, and then both are *proven* good: a broken node cannot take
part in a collective whose result is right at both ends. A pair that fails only proves that one of the
two nodes or the link between them is bad. So a failure alone blames no node. A node is faulty if

    it failed its solo test, in which no other node takes part; or
    it never passed a pair test, and failed with two *confirming* nodes.

A confirming node passed with another node than the suspect, is not lost, and never failed with a proven
node. The last condition excludes intermittent nodes: once one was caught, its failures say nothing
about others.

What can go wrong: a healthy node fails only through its partner or their link, and a node that always
fails never confirms anything. So two intermittent nodes or two bad links must have hit the same
healthy node in every test it took part in. No rule can exclude that, since the tests then look the
same as for a broken node. A single intermittent node or bad link, or any number of nodes that always
fail, never gets another node blamed.

Two proven nodes that failed with each other have a *suspect link* and are both healthy. A proven node
that failed with two proven nodes is a contradiction and stays undetermined.

A missing answer is a failure only if no node of the group passed. If the partner passed, the collective
worked and only the answer is missing, which proves nothing; and a test in which one node was lost
proves nothing about the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from msgspec import Struct, field

from holdfast.messages.nodecheck import TestResult
from holdfast.messages.units import NodeId

CONFIRMATIONS = 2
"""Number of good nodes that must have failed with a node before it is blamed."""

Outcome = Literal["passed", "failed", "nothing"]


class Trial(Struct):
    """The test of one group in one round."""

    round: int
    nodes: tuple[NodeId, ...]
    """Two nodes, or one that only runs its solo test."""
    answers: dict[NodeId, TestResult] = field(default_factory=dict)


class Evidence(Struct):
    """The trials of a check, by node. Derived from them, never stored."""

    gone: Collection[NodeId]
    passed: dict[NodeId, list[NodeId]]
    """Partners that each node passed with."""
    failed: dict[NodeId, list[NodeId]]
    met: dict[NodeId, list[NodeId]]
    """Partners that each node was tested with, whatever the outcome."""
    solo_passed: set[NodeId]
    solo_failed: dict[NodeId, str]
    """Nodes that failed alone, with the reason."""


def read(nodes: Iterable[NodeId], trials: Iterable[Trial], gone: Collection[NodeId]) -> Evidence:
    """Collect the evidence of finished trials."""
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
    """Return what the collective of a finished group proves."""
    said = [trial.answers[node].passed if node in trial.answers else None for node in trial.nodes]
    if all(said):
        return "passed"
    if any(node in gone and node not in trial.answers for node in trial.nodes):
        return "nothing"
    return "failed" if False in said or not any(said) else "nothing"


def is_faulty(evidence: Evidence, node: NodeId) -> bool:
    if node in evidence.solo_failed:
        return True
    return not evidence.passed[node] and len(confirmations(evidence, node)) >= CONFIRMATIONS


def contradictions(evidence: Evidence, node: NodeId) -> list[NodeId]:
    """Return the nodes that passed with others and failed with this one."""
    return [p for p in evidence.failed[node] if evidence.passed[p] and not _is_out(evidence, p)]


def confirmations(evidence: Evidence, suspect: NodeId) -> list[NodeId]:
    """Return the good nodes that failed with the suspect."""
    return [node for node in evidence.failed[suspect] if _confirms(evidence, node, suspect)]


def _confirms(evidence: Evidence, node: NodeId, suspect: NodeId) -> bool:
    if _is_out(evidence, node) or not any(p != suspect for p in evidence.passed[node]):
        return False
    return not any(p != suspect for p in contradictions(evidence, node))


def _is_out(evidence: Evidence, node: NodeId) -> bool:
    return node in evidence.gone or node in evidence.solo_failed
