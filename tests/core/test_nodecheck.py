"""Which nodes are sick: who is found, who is never blamed, and how many rounds that takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, field

from holdfast.core.nodecheck import trials as checks
from holdfast.core.nodecheck.evidence import Trial
from holdfast.core.nodecheck.trials import MOST_ROUNDS, SEARCH_ROUNDS, NodeCheck, Round
from holdfast.messages import nodecheck as records
from holdfast.messages.units import NodeId


class Cluster(Struct):
    """Nodes 0 to n-1 and what is wrong with them."""

    n: int
    faulty: Collection[int] = ()
    """Pass their solo test, fail every collective."""
    silent: Collection[int] = ()
    """Never answer."""
    solo: Collection[int] = ()
    """Fail their solo test."""
    flaky: Collection[int] = ()
    """Fail a collective, or do not answer, when the dice say so."""
    cut: Collection[frozenset[int]] = ()
    """Links that carry nothing."""
    slow_solo: dict[int, float] = field(default_factory=dict)
    """By which factor."""
    slow_pair: dict[int, float] = field(default_factory=dict)
    second: float = 1.0
    """How long a test takes."""
    noise: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def fails(self, i: int) -> bool:
        bad = i in self.faulty or i in self.silent or i in self.solo
        return bad or (i in self.flaky and self.dice.random() < 0.5)

    def time(self, factor: float) -> float:
        return self.second * factor * self.dice.uniform(1 - self.noise, 1 + self.noise)


def name(i: int) -> NodeId:
    return NodeId(f"n{i}")


def number(node: NodeId) -> int:
    return int(node[1:])


def begin(n: int) -> NodeCheck:
    return checks.begin(name(i) for i in range(n))


def answer(check: NodeCheck, group: int, i: int, **said: Any) -> bool:
    result = records.TestResult(node=name(i), round=check.round, group=group, **said)
    return checks.take(check, result)


def run_group(check: NodeCheck, cluster: Cluster, group: int, nodes: tuple[int, ...]) -> None:
    passed = sum(map(cluster.fails, nodes)) == 0 and frozenset(nodes) not in cluster.cut
    pair_s = cluster.time(max(cluster.slow_pair.get(i, 1.0) for i in nodes))
    for i in nodes:
        if i in cluster.silent or (i in cluster.flaky and cluster.dice.random() < 0.2):
            continue
        solo_s = cluster.time(cluster.slow_solo.get(i, 1.0))
        paired = {"passed": passed, "seconds": pair_s} if len(nodes) == 2 else {}
        answer(check, group, i, solo_passed=i not in cluster.solo, solo_s=solo_s, **paired)


def run_round(check: NodeCheck, cluster: Cluster, planned: Round) -> None:
    assert planned.number == check.round
    for group, nodes in enumerate(planned.groups):
        run_group(check, cluster, group, tuple(map(number, nodes)))
    checks.time_out(check)
    checks.validate(check)


def run(cluster: Cluster) -> NodeCheck:
    check = begin(cluster.n)
    while (planned := checks.plan(check)) is not None:
        run_round(check, cluster, planned)
    checks.validate(check)
    return check


def found(check: NodeCheck, verdict: str) -> set[int]:
    return {number(v.node) for v in checks.verdicts(check) if v.verdict == verdict}


def reason(check: NodeCheck, i: int) -> str:
    return checks.verdicts(check)[i].reason


# ---- no fault, one fault ----


@pytest.mark.parametrize("n", [*range(1, 18), 63, 64, 1000, 1001])
def test_when_all_pass_one_round_does_and_one_more_for_the_odd_node_out(n: int) -> None:
    check = run(Cluster(n))
    assert found(check, "healthy") == set(range(n))
    assert check.round == (1 if n == 1 or n % 2 == 0 else 2)


@pytest.mark.parametrize(("kind", "most"), [("faulty", 64), ("silent", 24), ("solo", 24)])
def test_any_single_fault_is_found_exactly_within_three_rounds(kind: str, most: int) -> None:
    for n in range(3, most + 1):
        for bad in range(n):
            check = run(Cluster(n, **{kind: {bad}}))
            assert found(check, "faulty") == {bad}
            assert len(found(check, "healthy")) == n - 1
            assert check.round <= 3


def test_with_an_even_number_of_nodes_a_single_fault_takes_two_rounds() -> None:
    assert {run(Cluster(n, faulty={0})).round for n in range(4, 65, 2)} == {2}


def test_the_reason_names_the_evidence() -> None:
    check = run(Cluster(4, faulty={1}))
    assert reason(check, 1) == "failed with n0 and n3, which both passed with others"
    assert reason(check, 0) == "passed with n2"


def test_a_node_that_corrupts_what_it_sends_is_found_though_it_believes_all_is_well() -> None:
    for n in range(3, 9):
        for bad in range(n):
            check = begin(n)
            while (planned := checks.plan(check)) is not None:
                for group, nodes in enumerate(planned.groups):
                    for node in nodes:
                        passed = node == name(bad) or name(bad) not in nodes
                        answer(check, group, number(node), solo_passed=True, passed=passed)
            assert found(check, "faulty") == {bad}


# ---- what earlier systems get wrong (reference/health.md, section 2) ----


def test_peer_bug_three_nodes_every_single_fault_is_localised() -> None:
    assert [found(run(Cluster(3, faulty={i})), "faulty") for i in range(3)] == [{0}, {1}, {2}]


def test_peer_bug_five_nodes_every_single_fault_is_localised() -> None:
    for i in range(5):
        assert found(run(Cluster(5, faulty={i})), "faulty") == {i}


def test_peer_bug_no_group_of_three_ever_blames_the_healthy() -> None:
    for n in (3, 5, 7, 9):
        for bad in combinations(range(n), 2):
            check = run(Cluster(n, faulty=bad))
            assert found(check, "faulty") <= set(bad)
            assert all(len(trial.nodes) <= 2 for trial in check.trials)


@pytest.mark.parametrize("n", [4, 6, 9])
def test_peer_bug_double_faults_are_all_localised(n: int) -> None:
    for bad in combinations(range(n), 2):
        assert found(run(Cluster(n, faulty=bad)), "faulty") == set(bad)


def test_peer_bug_more_failures_than_passes_still_localise() -> None:
    for n in (5, 6, 7, 8):
        for bad in combinations(range(n), n - 3):
            check = run(Cluster(n, faulty=bad))
            assert found(check, "faulty") == set(bad)
            assert len(found(check, "healthy")) == 3


def test_peer_bug_a_result_of_another_round_never_passes_for_one_of_this() -> None:
    check = begin(4)
    first = checks.plan(check)
    assert first is not None
    run_round(check, Cluster(4, faulty={0}), first)
    assert checks.plan(check) is not None
    stale = records.TestResult(node=name(0), round=1, group=0, solo_passed=True, passed=True)
    assert not checks.take(check, stale)
    assert checks.verdicts(check)[0].verdict != "healthy"


# ---- several faults ----


def test_every_double_fault_among_four_to_sixteen_is_found_exactly() -> None:
    for n in range(4, 17):
        for bad in combinations(range(n), 2):
            check = run(Cluster(n, faulty=bad))
            assert found(check, "faulty") == set(bad)
            assert len(found(check, "healthy")) == n - 2
            assert check.round <= 5


def test_sampled_double_faults_among_more_nodes_are_found_exactly() -> None:
    dice = random.Random(7)
    for n in range(17, 65):
        for _ in range(6):
            bad = set(dice.sample(range(n), 2))
            check = run(Cluster(n, faulty={min(bad)}, silent={max(bad)}))
            assert found(check, "faulty") == bad
            assert check.round <= 4


@settings(max_examples=150)
@given(st.data())
def test_nodes_that_always_fail_are_found_or_undetermined_and_nobody_else_is_blamed(
    data: st.DataObject,
) -> None:
    n = data.draw(st.integers(1, 40))
    some = st.sets(st.integers(0, n - 1), max_size=n)
    cluster = Cluster(n, faulty=data.draw(some), silent=data.draw(some), solo=data.draw(some))
    bad = {*cluster.faulty, *cluster.silent, *cluster.solo}
    check = run(cluster)
    assert set(cluster.solo) - set(cluster.silent) <= found(check, "faulty") <= bad
    alone = len(found(check, "faulty")) == n - 1  # Then there is only its solo test to go by.
    assert alone or found(check, "healthy").isdisjoint(bad)
    assert check.round <= MOST_ROUNDS
    if len(bad) <= n // 3 and n >= 6:
        assert not found(check, "undetermined")


def test_when_nothing_passes_everybody_is_undetermined_and_the_check_soon_given_up() -> None:
    for n in range(2, 65):
        check = run(Cluster(n, faulty=range(n)))
        assert found(check, "undetermined") == set(range(n))
        assert check.round <= min(n, SEARCH_ROUNDS)
        check = run(Cluster(n, silent=range(n)))
        assert found(check, "undetermined") == set(range(n))


# ---- one node, two nodes ----


def test_a_node_alone_is_judged_by_its_solo_test() -> None:
    assert found(run(Cluster(1)), "healthy") == {0}
    assert found(run(Cluster(1, solo={0})), "faulty") == {0}
    assert found(run(Cluster(1, silent={0})), "undetermined") == {0}
    assert checks.plan(begin(0)) is None


def test_two_nodes_that_only_fail_together_are_undetermined() -> None:
    check = run(Cluster(2, faulty={1}))
    assert found(check, "undetermined") == {0, 1}
    assert check.round == 1
    assert reason(check, 0) == "failed with n1, none of which is known to be good"


def test_of_two_nodes_the_solo_test_can_decide() -> None:
    check = run(Cluster(2, solo={1}))
    assert found(check, "faulty") == {1}
    assert found(check, "healthy") == {0}


# ---- links ----


@pytest.mark.parametrize("n", range(4, 12))
def test_a_bad_link_blames_nobody_and_is_reported(n: int) -> None:
    for a, b in combinations(range(n), 2):
        check = run(Cluster(n, cut=[frozenset((a, b))]))
        assert found(check, "healthy") == set(range(n))
        assert checks.suspect_links(check) in ([], [(name(a), name(b))])
    check = run(Cluster(n, cut=[frozenset((0, 1))]))
    assert checks.suspect_links(check) == [(name(0), name(1))]
    assert "failed with n1, which passed with others: a suspect link" in reason(check, 0)


def test_racks_that_do_not_reach_each_other_blame_nobody() -> None:
    cut = [frozenset((a, b)) for a in range(4) for b in range(4, 8)]
    assert found(run(Cluster(8, cut=cut)), "healthy") == set(range(8))


# ---- flaky nodes, missing answers, lost nodes ----


@settings(max_examples=300)
@given(st.data())
def test_no_healthy_node_is_blamed_for_a_flaky_one_or_a_bad_link(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 24))
    node = st.integers(0, n - 1)
    some = st.sets(node, max_size=n // 2)
    flaky = data.draw(st.sets(node, max_size=1))
    link = st.frozensets(node, min_size=2, max_size=2)
    cut = set() if flaky else data.draw(st.sets(link, max_size=n))
    cluster = Cluster(n, data.draw(some), data.draw(some), data.draw(some), flaky)
    cluster.dice = random.Random(data.draw(st.integers(0, 999)))
    for each in cut:  # At most one bad link at a node.
        if not any(each & other for other in cluster.cut):
            cluster.cut = [*cluster.cut, each]
    check = begin(n)
    while (planned := checks.plan(check)) is not None:
        for i in data.draw(st.sets(node, max_size=2)):
            checks.lost(check, name(i))
        run_round(check, cluster, planned)
    bad = {*cluster.faulty, *cluster.silent, *cluster.solo, *flaky}
    assert found(check, "faulty") <= bad
    assert check.round <= MOST_ROUNDS


@settings(max_examples=150)
@given(st.integers(3, 20), st.integers(0, 9999), st.data())
def test_whatever_is_answered_the_blamed_failed_alone_or_with_two_good_nodes(
    n: int, seed: int, data: st.DataObject
) -> None:
    check, dice = begin(n), random.Random(seed)
    say = data.draw(st.sampled_from([[True, False], [True, True, False], [None, False, True]]))
    while (planned := checks.plan(check)) is not None:
        for group, nodes in enumerate(planned.groups):
            for node in nodes:
                solo = dice.choice([True, True, True, None, False]) if seed % 2 else True
                answer(check, group, number(node), solo_passed=solo, passed=dice.choice(say))
                if dice.random() < 0.05:
                    checks.lost(check, dice.choice(check.nodes))
        checks.time_out(check)
        checks.validate(check)
    for blamed in found(check, "faulty"):
        assert failed_alone(check, blamed) or len(good_partners_that_failed(check, blamed)) >= 2
        assert failed_alone(check, blamed) or not passes(check, blamed)


def failed_alone(check: NodeCheck, i: int) -> bool:
    said = [trial.answers.get(name(i)) for trial in check.trials]
    return any(result is not None and result.solo_passed is False for result in said)


def passes(check: NodeCheck, i: int) -> list[set[NodeId]]:
    pairs = [t for t in check.trials if name(i) in t.nodes and len(t.nodes) == len(t.answers) == 2]
    return [set(t.nodes) for t in pairs if all(a.passed for a in t.answers.values())]


def good_partners_that_failed(check: NodeCheck, i: int) -> set[NodeId]:
    partners = {p for t in check.trials if name(i) in t.nodes for p in t.nodes} - {name(i)}
    return {p for p in partners - check.gone.keys() if passes(check, number(p))}


def after(*trials: tuple[int, int, bool]) -> NodeCheck:
    """A check of four nodes in which these pairs were tested, one a round."""
    check = begin(4)
    for a, b, passed in trials:
        check.round, check.first = check.round + 1, len(check.trials)
        check.trials.append(Trial(check.round, (name(a), name(b))))
        check.owed = {name(a): True, name(b): True}
        assert answer(check, 0, a, solo_passed=True, passed=passed)
        assert answer(check, 0, b, solo_passed=True, passed=passed)
        checks.validate(check)
    return check


def test_a_node_that_passed_with_some_and_failed_with_others_is_undetermined() -> None:
    check = after((0, 1, True), (0, 2, False), (0, 3, False), (2, 3, True))
    assert found(check, "undetermined") == {0}
    assert found(check, "healthy") == {1, 2, 3}
    assert reason(check, 0) == "passed with n1, but failed with n2 and n3, which passed with others"


def test_a_node_that_failed_with_a_good_one_confirms_nothing() -> None:
    quarrel = (0, 1, True), (1, 3, True), (0, 3, False)
    check = after(*quarrel, (2, 0, False), (2, 3, False), (2, 1, False))
    assert found(check, "undetermined") == {2}
    assert "failed with n1, which passed with others; no second node confirms it" in reason(
        check, 2
    )
    check = after(*quarrel[:2], (2, 0, False), (2, 3, False))
    assert found(check, "faulty") == {2}


def test_an_answer_that_is_missing_though_the_partner_passed_blames_nobody() -> None:
    for n in (4, 5, 8):
        check = begin(n)
        while (planned := checks.plan(check)) is not None:
            for group, nodes in enumerate(planned.groups):
                for node in nodes:
                    if node != name(1):
                        answer(check, group, number(node), solo_passed=True, passed=True)
            assert checks.time_out(check) in ([], [name(1)])
        assert found(check, "undetermined") == {1}
        assert not found(check, "faulty")


def test_the_partner_of_a_lost_node_is_tested_again_and_not_blamed() -> None:
    check = begin(4)
    assert checks.plan(check) is not None
    checks.lost(check, name(1))
    for i, passed in ((0, False), (2, True), (3, True)):
        answer(check, i // 2, i, solo_passed=True, passed=passed)
    second = checks.plan(check)
    assert second is not None
    assert second.groups == ((name(0), name(2)),)
    run_round(check, Cluster(4), second)
    assert checks.plan(check) is None
    assert found(check, "healthy") == {0, 2, 3}
    assert reason(check, 1) == "was lost before the check was over"


def test_a_lost_node_confirms_nothing() -> None:
    check = begin(3)
    for _ in range(2):
        planned = checks.plan(check)
        assert planned is not None
        run_round(check, Cluster(3, faulty={2}), planned)
    third = checks.plan(check)
    assert third is not None
    checks.lost(check, name(0))
    run_round(check, Cluster(3, faulty={2}), third)
    assert found(check, "undetermined") == {0, 2}


def test_a_round_ends_when_all_who_owe_an_answer_are_lost() -> None:
    check = begin(4)
    assert checks.plan(check) == checks.plan(check)
    for i in range(4):
        checks.lost(check, name(i))
        checks.validate(check)
    assert checks.plan(check) is None
    assert found(check, "undetermined") == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("who", "group", "round"), [(0, 1, 1), (0, 0, 2), (0, -1, 1), (0, 9, 1), (7, 0, 1)]
)
def test_a_result_that_nobody_asked_for_is_refused(who: int, group: int, round: int) -> None:
    check = begin(4)
    checks.plan(check)
    result = records.TestResult(node=name(who), round=round, group=group, passed=True)
    assert not checks.take(check, result)
    checks.lost(check, NodeId("stranger"))
    checks.validate(check)


def test_only_the_first_answer_of_a_node_counts() -> None:
    check = begin(2)
    checks.plan(check)
    assert answer(check, 0, 0, passed=False)
    assert not answer(check, 0, 0, passed=True)


@given(st.integers(1, 9), st.sets(st.integers(0, 8)))
def test_a_check_survives_the_journal(n: int, bad: set[int]) -> None:
    check, cluster = begin(n), Cluster(n, faulty=bad)
    while (planned := checks.plan(check)) is not None:
        check = msgspec.json.decode(msgspec.json.encode(check), type=NodeCheck)
        run_round(check, cluster, planned)
    assert checks.verdicts(check) == checks.verdicts(run(cluster))


# ---- slow nodes ----

Slow = Callable[[int, dict[int, float]], Cluster]


def slow_alone(n: int, factors: dict[int, float]) -> Cluster:
    return Cluster(n, slow_solo=factors, noise=0.1)


def slow_in_pairs(n: int, factors: dict[int, float]) -> Cluster:
    return Cluster(n, slow_pair=factors, noise=0.1)


def slow_in_both(n: int, factors: dict[int, float]) -> Cluster:
    return Cluster(n, slow_solo=factors, slow_pair=factors, noise=0.1)


@pytest.mark.parametrize("kind", [slow_alone, slow_in_pairs, slow_in_both])
def test_a_slow_node_is_slow_and_not_faulty_and_its_partner_is_neither(kind: Slow) -> None:
    for n in range(4, 33):
        for who in range(n):
            check = run(kind(n, {who: 3.0}))
            assert found(check, "slow") == {who}
            assert len(found(check, "healthy")) == n - 1
            assert check.round <= 3


def test_the_reason_of_a_slow_node_names_the_times() -> None:
    check = run(Cluster(4, slow_solo={1: 3.0}))
    assert "its solo test took 3 s, where 1 s is typical" in reason(check, 1)
    check = run(Cluster(4, slow_pair={1: 3.0}))
    assert "its best pair test took 3 s, where 1 s is typical" in reason(check, 1)


@pytest.mark.parametrize("n", range(2, 33))
def test_half_of_the_nodes_may_be_slow_at_computing(n: int) -> None:
    for slow in (set(range(n // 2)), set(range(1, 2 * (n // 2), 2))):
        check = run(slow_alone(n, dict.fromkeys(slow, 2.8)))
        assert found(check, "slow") == slow
        assert check.round <= 3


@pytest.mark.parametrize("n", range(4, 33, 4))
def test_half_of_the_nodes_may_have_a_slow_network(n: int) -> None:
    slow = set(range(n // 2))
    assert found(run(slow_in_pairs(n, dict.fromkeys(slow, 3.0))), "slow") == slow
    mixed = {i for i in range(n) if i % 4 == 0}
    assert found(run(slow_in_pairs(n, dict.fromkeys(mixed, 3.0))), "slow") <= mixed
    if n >= 8:
        mixed.discard(0)
        assert found(run(slow_in_pairs(n, dict.fromkeys(mixed, 3.0))), "slow") == mixed


def test_uniformly_slow_nodes_are_healthy() -> None:
    for n in (1, 2, 5, 16):
        check = run(slow_in_both(n, dict.fromkeys(range(n), 50.0)))
        assert found(check, "healthy") == set(range(n))


def test_one_node_that_is_faster_than_all_others_makes_nobody_slow() -> None:
    for n in (3, 4, 8, 9):
        check = run(slow_in_both(n, dict.fromkeys(range(1, n), 5.0)))
        assert found(check, "healthy") == set(range(n))


@given(st.integers(2, 40), st.integers(0, 999), st.floats(1e-6, 1e4))
def test_noise_makes_nobody_slow(n: int, seed: int, second: float) -> None:
    cluster = Cluster(n, second=second, noise=0.3, dice=random.Random(seed))
    check = run(cluster)
    assert found(check, "healthy") == set(range(n))
    assert check.round <= 2


@given(st.integers(2, 20), st.integers(0, 999))
def test_however_noisy_short_tests_are_nobody_is_slow(n: int, seed: int) -> None:
    check = run(Cluster(n, second=0.05, noise=0.99, dice=random.Random(seed)))
    assert found(check, "healthy") == set(range(n))
    assert check.round <= 2


def test_one_slow_measurement_is_not_enough() -> None:
    check = begin(4)
    while (planned := checks.plan(check)) is not None:
        for group, nodes in enumerate(planned.groups):
            for node in nodes:
                hiccup = 9.0 if node == name(2) and planned.number == 1 else 1.0
                said = {"solo_passed": True, "solo_s": hiccup, "passed": True, "seconds": 1.0}
                answer(check, group, number(node), **said)
    assert found(check, "healthy") == {0, 1, 2, 3}
    assert check.round == 2


def test_slow_and_faulty_nodes_are_told_apart() -> None:
    for n in range(6, 20):
        cluster = Cluster(n, faulty={0}, slow_pair={2: 3.0}, slow_solo={n - 1: 3.0})
        check = run(cluster)
        assert found(check, "faulty") == {0}
        assert found(check, "slow") == {2, n - 1}
        assert check.round <= 4
