"""What the evidence means for each node, in a word and a sentence.

A reason names the nodes and times that it rests on, so that a person who doubts it can repeat the
test. Whoever cannot be told from its partners is undetermined, and so is whoever was not heard of.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.core.nodecheck import evidence as proofs
from holdfast.core.nodecheck.evidence import Evidence
from holdfast.messages.nodecheck import NodeVerdict
from holdfast.messages.units import NodeId

MAX_NAMED = 4
"""How many nodes a reason names."""


def verdict(
    evidence: Evidence, node: NodeId, fit: Collection[NodeId], slow: dict[NodeId, str]
) -> NodeVerdict:
    """What is known of a node; `fit` are those still there and not found faulty."""
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
    if len(against) >= proofs.WITNESSES:
        reason = f"{passed}, but failed with {_names(against)}, which passed with others"
        return NodeVerdict(node=node, verdict="undetermined", reason=reason)
    if node in slow:
        return NodeVerdict(node=node, verdict="slow", reason=f"{passed}, but {slow[node]}")
    if against:
        passed += f"; failed with {against[0]}, which passed with others: a suspect link"
    return NodeVerdict(node=node, verdict="healthy", reason=passed)


def _verdict_on_unproven(evidence: Evidence, node: NodeId, fit: Collection[NodeId]) -> NodeVerdict:
    failed, witnesses = evidence.failed[node], proofs.witnesses(evidence, node)
    if len(witnesses) >= proofs.WITNESSES:
        both = "both" if len(witnesses) == 2 else "all"
        reason = f"failed with {_names(witnesses)}, which {both} passed with others"
        return NodeVerdict(node=node, verdict="faulty", reason=reason)
    alone = len(fit) == 1 and set(failed) <= evidence.solo_failed.keys()
    if alone and node in evidence.solo_passed:
        reason = "passed its solo test, and there is no good node to test it with"
        return NodeVerdict(node=node, verdict="healthy", reason=reason)
    if witnesses:
        reason = f"failed with {witnesses[0]}, which passed with others; nobody could confirm it"
    elif failed:
        reason = f"failed with {_names(failed)}, of which none is known to be good"
    else:
        reason = "no test with another node came to an end"
    return NodeVerdict(node=node, verdict="undetermined", reason=reason)


def _names(nodes: list[NodeId]) -> str:
    named = list[str](nodes[:MAX_NAMED])
    if len(nodes) > MAX_NAMED:
        named.append(f"{len(nodes) - MAX_NAMED} more")
    return " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
