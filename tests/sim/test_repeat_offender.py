"""A host that ends its ranks again and again, among others that fail now and then."""

import pytest

from holdfast.sim import look
from holdfast.sim.cluster import Cluster, SimSettings

BAD = "h0"


def run(seed, nodes, spares, **more):
    settings = SimSettings(
        seed=seed,
        nodes=nodes,
        spares=spares,
        min_nodes=nodes - 1,
        hours=0.5,
        slots=2,
        faults="faulty-node",
        liveness=True,
        **more,
    )
    cluster = Cluster(settings).run()
    assert look.ended(cluster.coordinator.job).reason == "finished"
    return cluster


def died_on(cluster, host):
    """Count the ranks that a signal ended there, as a bad host ends them."""
    incidents = look.breaking_incidents(cluster.coordinator.job)
    return sum(
        one.node.startswith(f"{host}:") and one.signature == "killed by SIGBUS" for one in incidents
    )


@pytest.mark.parametrize(("nodes", "most"), [(2, 10), (4, 7), (8, 5)])
def test_with_a_spare_the_job_leaves_a_faulty_host_and_no_other(nodes, most):
    """It would have failed thirty times in that half hour."""
    left = 0
    for seed in range(3):
        cluster = run(seed, nodes, spares=2)
        job = cluster.coordinator.job
        named = {one.node.partition(":")[0] for one in look.incidents(job) if one.kind == "suspect"}
        died = died_on(cluster, BAD)
        assert named == ({BAD} if died else set()), f"seed {seed}: it was a spare, or it was found"
        assert died <= most, f"seed {seed}"
        assert set(look.excluded(job)) <= {BAD}
        left += bool(named)
    assert left


@pytest.mark.parametrize("seed", [0, 2])
def test_without_a_spare_it_stays_and_is_named(seed):
    cluster = run(seed, nodes=4, spares=0, checkpoints=True)
    job = cluster.coordinator.job
    assert look.excluded(job) == {}
    assert BAD in look.suspects(job)
    assert died_on(cluster, BAD) > 10
