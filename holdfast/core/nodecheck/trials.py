"""Decides which nodes to test with each other, in as few rounds as the evidence needs.

In each round the participating nodes run a solo test, then a collective with one partner. The first
round pairs neighbours. If all pass, the check is over, but for the node that was left over from an odd
number, which has its turn in a second round. There are no groups of three: if one failed, three nodes
would be suspected instead of two, and its times would compare with those of no other group.

After that, each node that is neither proven good nor found faulty (`nodecheck.evidence` says what
proves what) is tested with good nodes that it has not met: if it passes it is good, and if it fails
with two of them it is faulty. When good nodes are scarce, the remaining nodes are tested with each
other, because two that pass are good nodes from then on. Good nodes that took long are measured again
in the same rounds (`nodecheck.speed`). No pair is tested twice.

One faulty node among three or more is found in at most three rounds. Every check ends: after eight
rounds at the latest, and after four if no pair has passed, since that is a common fault of the network
or the test, which more pairs would not locate. Nodes without a verdict are then undetermined.

The caller asks for a round with `plan`, passes answers to `take`, reports `lost` nodes, calls
`time_out` when it waits no longer, and asks again until there is no round.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from holdfast.core.nodecheck import evidence as proofs
from holdfast.core.nodecheck import speed
from holdfast.core.nodecheck import verdicts as words
from holdfast.core.nodecheck.evidence import Evidence, Trial
from holdfast.messages.nodecheck import NodeVerdict, TestResult
from holdfast.messages.units import NodeId

MOST_ROUNDS = 8
SEARCH_ROUNDS = 4
"""Rounds after which a check without any passing pair ends."""

Group = tuple[NodeId, ...]
"""Two nodes, or one that only runs its solo test."""


class Round(Struct, frozen=True):
    """Groups that are tested at the same time; a node in no group does nothing."""

    number: int
    groups: tuple[Group, ...]


class NodeCheck(Struct):
    """State of one check."""

    nodes: tuple[NodeId, ...]
    gone: dict[NodeId, bool] = field(default_factory=dict)
    """Lost nodes, in order (the values have no meaning)."""
    trials: list[Trial] = field(default_factory=list)
    round: int = 0
    first: int = 0
    """Index of this round's first trial."""
    owed: dict[NodeId, bool] = field(default_factory=dict)
    """Nodes that have not answered yet; the round runs while there are any (likewise)."""


def begin(nodes: Iterable[NodeId]) -> NodeCheck:
    """Begin a check of these nodes, given in the order of the network's topology."""
    return NodeCheck(tuple(dict.fromkeys(nodes)))


def plan(check: NodeCheck) -> Round | None:
    """Return the running round, else the next one; None if nothing is left to test."""
    if not check.owed:
        groups = _groups(check)
        if not groups:
            return None
        check.round += 1
        check.first = len(check.trials)
        check.trials += [Trial(check.round, group) for group in groups]
        check.owed = {node: True for group in groups for node in group}
    return Round(check.round, tuple(trial.nodes for trial in check.trials[check.first :]))


def take(check: NodeCheck, result: TestResult) -> bool:
    """Note a result; return False if the running round does not wait for it."""
    index = check.first + result.group
    if result.node not in check.owed or result.round != check.round:
        return False
    if not check.first <= index < len(check.trials):
        return False
    if result.node not in check.trials[index].nodes:
        return False
    check.trials[index].answers[result.node] = result
    del check.owed[result.node]
    return True


def lost(check: NodeCheck, node: NodeId) -> None:
    """Expect nothing more of a node that is gone."""
    if node in check.nodes:
        check.gone[node] = True
        check.owed.pop(node, None)


def time_out(check: NodeCheck) -> list[NodeId]:
    """End the running round; return the nodes that have not answered."""
    silent = list(check.owed)
    check.owed.clear()
    return silent


def verdicts(check: NodeCheck) -> list[NodeVerdict]:
    """Return the present verdict on each node."""
    evidence = _evidence(check)
    fit = {node for node in check.nodes if _is_fit(evidence, node)}
    slow = speed.slow(speed.read(check.trials, check.gone, set(check.nodes) - fit))
    return [words.verdict(evidence, node, fit, slow) for node in check.nodes]


def suspect_links(check: NodeCheck) -> list[tuple[NodeId, NodeId]]:
    """Return the pairs that failed although both nodes passed with others."""
    evidence = _evidence(check)
    good = [node for node in check.nodes if _is_fit(evidence, node) and evidence.passed[node]]
    place = {node: i for i, node in enumerate(good)}
    found = ((a, b) for a in good for b in evidence.failed[a] if b in place)
    return [(a, b) for a, b in found if place[a] < place[b]]


# ---- rounds ------------------------------------------------------------------------------------


def _evidence(check: NodeCheck) -> Evidence:
    over = (trial for trial in check.trials if _is_over(check, trial))
    return proofs.read(check.nodes, over, check.gone)


def _is_over(check: NodeCheck, trial: Trial) -> bool:
    return trial.round < check.round or not any(node in check.owed for node in trial.nodes)


def _is_fit(evidence: Evidence, node: NodeId) -> bool:
    return node not in evidence.gone and not proofs.is_faulty(evidence, node)


def _groups(check: NodeCheck) -> list[Group]:
    if check.round >= MOST_ROUNDS:
        return []
    if check.round == 0:
        present = [node for node in check.nodes if node not in check.gone]
        return [tuple(present[i : i + 2]) for i in range(0, len(present), 2)]
    evidence = _evidence(check)
    if check.round >= SEARCH_ROUNDS and not any(evidence.passed.values()):
        return []
    return _next_groups(check, evidence)


def _next_groups(check: NodeCheck, evidence: Evidence) -> list[Group]:
    fit = [node for node in check.nodes if _is_fit(evidence, node)]
    proven = [node for node in fit if evidence.passed[node]]
    # The node that has met most has the fewest partners left, and chooses first.
    unsettled = sorted(
        (node for node in fit if not evidence.passed[node]),
        key=lambda node: -len(evidence.met[node]),
    )
    speeds = speed.read(check.trials, check.gone, set(check.nodes) - set(fit))
    must_solo = speed.must_solo(speeds)
    again = must_solo | speed.must_pair(speeds)
    late = [node for node in proven if node in again]
    clean = [node for node in proven if not proofs.contradictions(evidence, node)]
    quick = [node for node in clean if node not in again]
    slower = [node for node in clean if node in again]
    wishes = (
        (unsettled, quick + slower),
        (unsettled, unsettled),
        (unsettled, proven),
        (late, quick),
    )
    taken: set[NodeId] = set()
    pairs = [p for wish in wishes for p in _pair_up(*wish, evidence, taken)]
    return pairs + [(node,) for node in late if node in must_solo and node not in taken]


def _pair_up(
    seekers: list[NodeId], partners: list[NodeId], evidence: Evidence, taken: set[NodeId]
) -> list[Group]:
    """Pair each seeker with the first free partner that it has not met; update `taken`."""
    pairs: list[Group] = []
    for seeker in seekers:
        if seeker in taken:
            continue
        barred = {seeker, *evidence.met[seeker]}
        free = (node for node in partners if node not in taken and node not in barred)
        partner = next(free, None)
        if partner is not None:
            taken |= {seeker, partner}
            pairs.append((seeker, partner))
    return pairs


def validate(check: NodeCheck) -> None:
    """Check every invariant."""
    assert check.gone.keys() <= set(check.nodes), "an unknown node is gone"
    assert 0 <= check.round <= MOST_ROUNDS, "too many rounds"
    current = check.trials[check.first :]
    assert all(trial.round == check.round for trial in current), "trials of two rounds"
    silent = {node for trial in current for node in trial.nodes if node not in trial.answers}
    assert check.owed.keys() <= silent - check.gone.keys(), "an answer is owed that cannot come"
    pairs = [frozenset(trial.nodes) for trial in check.trials if len(trial.nodes) == 2]
    assert len(pairs) == len(set(pairs)), "a pair was tested twice"
    for number in range(1, check.round + 1):
        busy = [node for trial in check.trials if trial.round == number for node in trial.nodes]
        assert busy, "an empty round"
        assert len(busy) == len(set(busy)), "a node is in two groups of a round"
    for trial in check.trials:
        assert 1 <= len(trial.nodes) <= 2, "a group of more than two"
        assert set(trial.answers) <= set(trial.nodes) <= set(check.nodes), (
            "an unknown node's answer"
        )
