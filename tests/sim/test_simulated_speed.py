"""The speed of simulated jobs is that at which their ranks really train."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core import report
from holdfast.messages.reports import StatusReport
from holdfast.sim.cluster import Cluster, SimSettings
from holdfast.sim.training import BATCH


def ran(faults: str, light: bool = True, seed: int = 1, **more: Any) -> Cluster:
    shape = {"nodes": 6, "spares": 2, "min_nodes": 2, "hours": 0.2, "slots": 2, **more}
    return Cluster(SimSettings(seed=seed, faults=faults, light=light, **shape)).run()


def status(cluster: Cluster) -> StatusReport:
    return report.status(cluster.coordinator.job, cluster.clock.now, alive=True)


@pytest.mark.parametrize("light", [True, False], ids=["light", "supervised"])
def test_the_speed_is_that_of_the_ranks(light: bool) -> None:
    cluster = ran("none", light)
    shown, round = (
        status(cluster),
        cluster.training.rounds[cluster.coordinator.job.membership.round],
    )
    assert shown.speed_stable
    assert shown.steps_per_s == pytest.approx(1 / round.pace_s, rel=0.01)
    assert shown.samples_per_s == pytest.approx(shown.steps_per_s * BATCH * round.size, rel=0.01)


def test_all_samples_of_a_job_without_faults_are_used_once() -> None:
    cluster = ran("none")
    job = cluster.coordinator.job
    goodput = report.goodput(job, cluster.clock.now)
    assert goodput.samples == BATCH * sum(rank.steps for rank in job.ranks.values())
    assert goodput.redone_samples == 0
    assert goodput.samples_per_s == pytest.approx(status(cluster).samples_per_s, rel=0.1)


@pytest.mark.parametrize("seed", [1, 3, 5, 7])  # In others the job is preempted.
def test_after_many_faults_samples_were_redone_and_the_speed_is_what_it_was(seed: int) -> None:
    cluster = ran("chaos", seed=seed, step_s=1.0, save_every=10, liveness=True)
    job = cluster.coordinator.job
    goodput = report.goodput(job, cluster.clock.now)
    assert job.membership.round > 20
    assert goodput.samples is not None
    assert goodput.redone_samples
    assert goodput.samples >= BATCH * job.highest, "at least one rank took each step"
    # Pauses that are shorter than a worker takes notice of remain.
    assert job.speed.steps_per_s == pytest.approx(1.0, rel=0.2)
