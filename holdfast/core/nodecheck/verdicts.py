"""Turns the evidence into a verdict and a reason for each node.

A reason names the nodes and times that it rests on, so that a reader who doubts it can repeat the test.
A node that cannot be told from its partners, or that did not answer, is undetermined.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.core.nodecheck import evidence as proofs
from holdfast.core.nodecheck.evidence import Evidence
from holdfast.messages.nodecheck import NodeVerdict
from holdfast.messages.units import NodeId

MAX_NAMED = 4
"""Nodes that a reason names."""


def verdict(
    evidence: Evidence, node: NodeId, fit: Collection[NodeId], slow: dict[NodeId, str]
) -> NodeVerdict:
    """Return the verdict on a node; `fit` are the nodes that are neither lost nor faulty."""
    if node in evidence.solo_failed:
        said = evidence.solo_failed[node]
        reason = f"failed its solo test: {said}" if said else "failed its solo test"
        return NodeVerdict(node=node, verdict="faulty", reason=reason)
    if node in evidence.gone:
        reason = "was lost before the check was over"
        return NodeVerdict(node=node, verdict="undetermined", reason=reason)
    if evidence.passed[node]:
        return _verdict_on_proven(evidence, node, slow)
    return _verdict_on_unproven(evidence, node, fit)


def _verdict_on_proven(evidence: Evidence, node: NodeId, slow: dict[NodeId, str]) -> NodeVerdict:
    against = proofs.contradictions(evidence, node)
    passed = f"passed with {_names(evidence.passed[node])}"
    if len(against) >= proofs.CONFIRMATIONS:
        reason = f"{passed}, but failed with {_names(against)}, which passed with others"
        return NodeVerdict(node=node, verdict="undetermined", reason=reason)
    if node in slow:
        return NodeVerdict(node=node, verdict="slow", reason=f"{passed}, but {slow[node]}")
    if against:
        passed += f"; failed with {against[0]}, which passed with others: a suspect link"
    return NodeVerdict(node=node, verdict="healthy", reason=passed)


def _verdict_on_unproven(evidence: Evidence, node: NodeId, fit: Collection[NodeId]) -> NodeVerdict:
    failed, confirmed_by = evidence.failed[node], proofs.confirmations(evidence, node)
    if len(confirmed_by) >= proofs.CONFIRMATIONS:
        both = "both" if len(confirmed_by) == 2 else "all"
        reason = f"failed with {_names(confirmed_by)}, which {both} passed with others"
        return NodeVerdict(node=node, verdict="faulty", reason=reason)
    alone = len(fit) == 1 and set(failed) <= evidence.solo_failed.keys()
    if alone and node in evidence.solo_passed:
        reason = "passed its solo test, and there is no good node to test it with"
        return NodeVerdict(node=node, verdict="healthy", reason=reason)
    if confirmed_by:
        reason = (
            f"failed with {confirmed_by[0]}, which passed with others; no second node confirms it"
        )
    elif failed:
        reason = f"failed with {_names(failed)}, none of which is known to be good"
    else:
        reason = "no test with another node was completed"
    return NodeVerdict(node=node, verdict="undetermined", reason=reason)


def _names(nodes: list[NodeId]) -> str:
    named = list[str](nodes[:MAX_NAMED])
    if len(nodes) > MAX_NAMED:
        named.append(f"{len(nodes) - MAX_NAMED} more")
    return " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
