"""Who keeps whose copies: what is promised for any number of nodes, hosts and domains."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.commits.replica_placement import peers_of, placement

counts = st.integers(0, 40)
factors = st.integers(1, 6)
jumps = st.integers(1, 12)
labels = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=40)


def kept_by(peers: list[list[int]]) -> Counter[int]:
    return Counter(peer for chosen in peers for peer in chosen)


@pytest.mark.parametrize(
    ("jump", "factor", "expected"),
    [
        (1, 2, [{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}]),
        (2, 2, [{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}]),
        (2, 3, [{0, 2, 4}, {1, 3, 5}, {6, 8, 10}, {7, 9, 11}]),
        (6, 2, [{0, 6}, {1, 7}, {2, 8}, {3, 9}, {4, 10}, {5, 11}]),
    ],
)
def test_where_the_numbers_divide_the_cliques_are_those_of_the_jump(
    jump: int, factor: int, expected: list[set[int]]
) -> None:
    peers = placement(12, factor, jump)
    assert sorted(map(sorted, {frozenset({n, *peers[n]}) for n in range(12)})) == sorted(
        map(sorted, expected)
    )


@given(counts, factors, jumps)
def test_everybody_sends_and_keeps_as_many_copies_as_anybody_else(
    nodes: int, factor: int, jump: int
) -> None:
    peers = placement(nodes, factor, jump)
    copies = max(0, min(factor, nodes) - 1)
    assert [len(set(chosen)) for chosen in peers] == [copies] * nodes
    assert all(kept_by(peers)[node] == copies for node in range(nodes))
    assert all(node not in chosen for node, chosen in enumerate(peers))


@given(counts, factors, jumps)
def test_a_clique_has_fewer_than_twice_as_many_members_as_copies(
    nodes: int, factor: int, jump: int
) -> None:
    peers = placement(nodes, factor, jump)
    for node in range(nodes):
        clique, size = {node}, 0
        while len(clique) > size:
            size = len(clique)
            clique |= {peer for member in clique for peer in peers[member]}
        assert size < 2 * factor


@given(labels, factors.filter(lambda f: f > 1), jumps)
def test_everybody_has_a_copy_on_another_host_if_there_is_one(
    hosts: list[str], factor: int, jump: int
) -> None:
    for node, chosen in enumerate(placement(len(hosts), factor, jump, None, hosts)):
        assert len(chosen) == len(set(chosen)) == min(factor, len(hosts)) - 1
        assert node not in chosen
        if len(set(hosts)) > 1:
            assert hosts[chosen[0]] != hosts[node]


@given(labels, factors.filter(lambda f: f > 1), jumps)
def test_if_no_host_has_most_of_the_nodes_all_keep_equally_many(
    hosts: list[str], factor: int, jump: int
) -> None:
    if max(Counter(hosts).values()) <= len(hosts) // 2:
        peers = placement(len(hosts), factor, jump, None, hosts)
        assert set(kept_by(peers).values()) == {min(factor, len(hosts)) - 1}


@given(labels, factors.filter(lambda f: f > 1), jumps)
def test_a_copy_is_in_another_domain_if_no_domain_is_too_large(
    domains: list[str], factor: int, jump: int
) -> None:
    nodes = len(domains)
    copies = min(factor, nodes)
    peers = placement(nodes, factor, jump, domains)
    assert all(kept_by(peers)[node] == copies - 1 for node in range(nodes))
    if max(Counter(domains).values()) <= nodes // copies:
        for node, chosen in enumerate(peers):
            assert len({domains[n] for n in (node, *chosen)}) == copies


def test_the_block_counts_and_then_the_switch() -> None:
    switches = ["b0/s0", "b0/s0", "b0/s1", "b0/s1", "b1/s2", "b1/s2", "b1/s3", "b1/s3"]
    for node, [peer] in enumerate(placement(8, 2, 1, switches)):
        assert switches[node][:2] != switches[peer][:2]
    one_block = [label.replace("b1", "b0") for label in switches]
    for node, [peer] in enumerate(placement(8, 2, 1, one_block)):
        assert one_block[node] != one_block[peer]


def test_two_nodes_on_one_host_do_not_rely_on_each_other() -> None:
    assert placement(4, 2, 1, None, ["a", "a", "b", "b"]) == [[2], [3], [0], [1]]
    assert placement(3, 2, 1, None, ["a", "a", "b"]) == [[2], [2], [0]]


def test_with_one_host_only_the_copies_stay_on_it() -> None:
    assert placement(3, 2, 1, None, ["a"] * 3) == placement(3, 2, 1)


def test_the_most_independent_peer_comes_first() -> None:
    hosts = ["a", "a", "a", "b"]
    assert all(placement(4, 3, 1, None, hosts)[node][0] == 3 for node in range(3))


def test_unknown_domains_are_no_reason_to_move_anybody() -> None:
    assert placement(8, 2, 2, [""] * 8, [f"h{n}" for n in range(8)]) == placement(8, 2, 2)


@pytest.mark.parametrize(("factor", "jump"), [(0, 1), (2, 0), (-1, 1)])
def test_a_factor_or_jump_below_one_makes_no_sense(factor: int, jump: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        placement(4, factor, jump)


def test_a_lone_node_has_no_peer() -> None:
    assert peers_of(0, 1, 2, 1) == []
    assert peers_of(0, 2, 2, 8) == [1]
