"""Hundreds of small jobs in chaos; every invariant after every event."""

import pytest

from holdfast.core.states import Ended
from holdfast.sim.cluster import Cluster, Outcome, Settings
from holdfast.sim.shapes import chaos

BLOCK = 10
LEGITIMATE = (
    "restarts allowed and used",
    "before the first step",
    "times in a row",
    "without a step beyond",
    "no more came in time",
    "form complete segments or units",
    "preempted",
    "finished",
)


def run(seed: int, liveness: bool = False) -> Outcome:
    return Cluster(chaos(seed, liveness)).run()


@pytest.mark.parametrize("first", range(0, 200, BLOCK))
def test_no_seed_breaks_an_invariant(first):
    for seed in range(first, first + BLOCK):
        run(seed)


@pytest.mark.parametrize("first", range(1000, 1150, BLOCK))
def test_after_healing_every_job_advances_or_has_ended_for_a_reason(first):
    for seed in range(first, first + BLOCK):
        outcome = run(seed, liveness=True)
        job = outcome.cluster.coordinator.job
        assert isinstance(job.state, Ended), f"seed {seed}"
        assert outcome.alive_after_s is not None or job.result is not None
        assert any(reason in job.result.reason for reason in LEGITIMATE), job.result.reason


def test_chaos_reaches_every_kind_of_fault_and_of_end():
    injected, codes, replays, duplicates = set(), set(), 0, 0
    for seed in range(40):
        cluster = run(seed, liveness=True).cluster
        injected |= set(cluster.mishaps.counts)
        codes.add(cluster.coordinator.job.result.code)
        replays += cluster.watch.replays
        duplicates += cluster.watch.duplicates
    assert injected == {*cluster.schedule.rates, "coordinator"}
    assert codes == {0, 1, 75, 93}
    assert replays > 20
    assert duplicates > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_fifty_nodes_come_through_minutes_of_chaos_and_finish(seed):
    settings = Settings(
        seed=seed,
        nodes=48,
        spares=2,
        min_nodes=8,
        hours=0.05,
        slots=2,
        faults="chaos",
        check="every",
        liveness=True,
        step_s=0.1,
    )
    outcome = Cluster(settings).run()
    assert outcome.cluster.coordinator.job.result.code == 0
    assert outcome.cluster.watch.replays > 0
