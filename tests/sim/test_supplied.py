"""Nodes of a platform, thousands of them: one plan for one mass failure, and no work for nothing."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.messages.actions import CarryOutPlan
from holdfast.messages.events import (
    JobOpened,
    NodeJoined,
    NodesSighted,
    SupplierJoined,
    Tick,
)
from holdfast.messages.records import NodeSpec, Terms
from holdfast.messages.supply import Sighting, SupplyPlan, SupplyTerms
from holdfast.messages.units import NodeId, Time
from holdfast.sim.cluster import Cluster, SimSettings

AT = Time(1000.0)
LATER = Time(1100.0)


def plans_of(job: Job, event: object, now: Time = AT) -> list[SupplyPlan]:
    actions = jobs.handle(job, event, now)  # type: ignore[arg-type]
    return [action.plan for action in actions if isinstance(action, CarryOutPlan)]


def joined(request: str) -> NodeJoined:
    spec = NodeSpec(host=f"h{request}", address="10.0.0.1", slots=1, pid=1, request=request)
    return NodeJoined(at=AT, node=NodeId(f"n{request}"), spec=spec, store_port=1)


def a_job(nodes: int) -> Job:
    """A job all of whose nodes came from a platform."""
    job = jobs.opened(JobOpened(at=AT, job="j", terms=Terms(min_nodes=1, max_nodes=nodes)))
    plans_of(job, SupplierJoined(at=AT, platform="test"))
    (plan,) = plans_of(job, Tick(at=AT))
    running = tuple(Sighting(request=wish.id, status="running") for wish in plan.ask)
    assert len(running) == nodes
    plans_of(job, NodesSighted(at=AT, sightings=running))
    return job


def lose(job: Job, count: int) -> list[SupplyPlan]:
    """All these nodes are evicted at the same moment."""
    evicted = tuple(
        Sighting(request=f"{number}-1", status="failed", reason="evicted")
        for number in range(count)
    )
    seen = plans_of(job, NodesSighted(at=LATER, sightings=evicted), LATER)
    return [*seen, *plans_of(job, Tick(at=LATER), LATER), *plans_of(job, Tick(at=LATER), LATER)]


def test_two_thousand_of_ten_thousand_nodes_are_asked_for_again_in_one_plan() -> None:
    job = a_job(10_000)
    (plan,) = lose(job, 2_000)
    assert [wish.id for wish in plan.ask] == [f"{number}-2" for number in range(2_000)]
    assert not plan.release
    jobs.validate(job)


def test_a_lost_node_costs_no_more_among_ten_thousand_than_among_one_thousand() -> None:
    """Ten times the nodes cost about ten times as much, and not a hundred times."""

    def cost_s(nodes: int) -> float:
        tries = []
        for _ in range(3):
            job = a_job(nodes)
            begun = time.process_time()
            lose(job, nodes // 5)
            tries.append(time.process_time() - begun)
        return min(tries) / nodes

    cost_s(100)  # Everything is imported and warm.
    assert cost_s(10_000) < 8 * cost_s(1_000)


def test_a_node_that_comes_for_its_request_asks_for_no_tick() -> None:
    """Ten thousand that come would else be ten thousand plans for nothing."""
    job = a_job(100)
    plans_of(job, Tick(at=AT))
    for number in range(100):
        plans_of(job, joined(f"{number}-1"))
        assert job.supply.due is None


@pytest.mark.parametrize("nodes", [300])
def test_a_mass_failure_of_simulated_nodes_is_one_plan_and_all_come_back(nodes: int) -> None:
    settings = SimSettings(
        seed=1,
        nodes=nodes,
        spares=0,
        min_nodes=nodes // 2,
        hours=0.05,
        slots=1,
        faults="none",
        check="round",
        supply=SupplyTerms(),
    )
    cluster = Cluster(settings)
    platform, asked = cluster.platform, Counter[int]()
    assert platform is not None
    hear = platform.supplier.hear
    platform.supplier.hear = lambda plan: (  # type: ignore[method-assign]
        asked.update({len(plan.ask): 1} if not plan.whole else {}),
        hear(plan),
    )

    def fail() -> None:
        for node in platform.alive()[: nodes // 5]:
            platform.end(node, "evicted")

    cluster.clock.after(100.0, fail)
    cluster.run()
    assert asked == {nodes: 1, nodes // 5: 1}
    assert len(platform.alive()) == nodes
    assert not platform.absent()
