"""Leasing is cheap enough for the goals that its bench reports."""

from leasing import cluster_share, core_rate


def test_half_a_million_leases_a_second_go_through_the_core_in_batches() -> None:
    assert max(core_rate(seconds=0.3) for _ in range(3)) > 500_000


def test_a_thousand_nodes_take_a_fiftieth_of_a_core() -> None:
    """Ten thousand take ten times as much, and may have a fifth."""
    assert min(cluster_share(nodes=1000, minutes=1) for _ in range(2)) < 0.02
