"""Hundreds of small jobs in chaos; every invariant after every event."""

from collections import Counter
from typing import get_args

import pytest

from holdfast.messages.actions import AnyAction
from holdfast.messages.events import AnyEvent
from holdfast.messages.requests import AnyRequest
from holdfast.sim import look
from holdfast.sim.cluster import Cluster, SimSettings
from holdfast.sim.rates import SCHEDULES
from holdfast.sim.shapes import chaos, supplied

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
    "stopped the job",
    "no node is fit to train",
    "can be had",
    "is critical",
    "not filled after",
)


def run(seed: int, liveness: bool = False) -> Cluster:
    return Cluster(chaos(seed, liveness)).run()


@pytest.mark.parametrize("first", range(0, 200, BLOCK))
def test_no_seed_breaks_an_invariant(first):
    for seed in range(first, first + BLOCK):
        run(seed)


@pytest.mark.parametrize("first", range(1000, 1150, BLOCK))
def test_after_healing_every_job_advances_or_has_ended_for_a_reason(first):
    for seed in range(first, first + BLOCK):
        job = run(seed, liveness=True).coordinator.job
        ended = look.ended(job)
        assert look.is_closed(job), f"seed {seed}"
        assert ended is not None
        assert any(reason in ended.reason for reason in LEGITIMATE), ended.reason


@pytest.mark.parametrize("first", range(2000, 2100, BLOCK))
def test_what_a_platform_provides_comes_back_and_nothing_of_it_is_left(first):
    for seed in range(first, first + BLOCK):
        job = Cluster(supplied(seed, liveness=True)).run().coordinator.job
        ended = look.ended(job)
        assert look.is_closed(job), f"seed {seed}"
        assert any(reason in ended.reason for reason in LEGITIMATE), ended.reason


@pytest.mark.parametrize("fault", sorted(SCHEDULES["chaos"].rates))
def test_no_single_fault_ends_a_job_while_enough_nodes_live(fault):
    settings = SimSettings(
        seed=1,
        nodes=3,
        spares=1,
        min_nodes=2,
        hours=40 / 3600,
        slots=2,
        faults="none",
        check="every",
        liveness=True,
        step_s=0.3,
        save_every=5,
        checkpoints=True,
    )
    cluster = Cluster(settings)
    cluster.clock.after(25.0, cluster.faults.strike, fault, cluster.hosts[1])
    cluster.run()
    assert cluster.faults.counts == {fault: 1}
    assert look.ended(cluster.coordinator.job).reason == "finished"


def test_chaos_reaches_every_fault_every_end_and_the_whole_vocabulary():
    injected, codes, replays, duplicates = set(), set(), 0, 0
    events, actions, requests = Counter(), Counter(), Counter()
    runs = [*(chaos(seed, True) for seed in range(90, 175)), *map(supplied, range(40))]
    for settings in runs:
        cluster = Cluster(settings).run()
        injected |= set(cluster.faults.counts)
        ended = look.ended(cluster.coordinator.job)
        codes |= {ended.code} if ended is not None else set()
        replays += cluster.invariants.replays
        duplicates += cluster.invariants.duplicates
        events.update(cluster.coordinator.handled)
        actions.update(cluster.coordinator.ordered)
        requests.update(cluster.coordinator.asked)
    schedule = cluster.schedule
    assert injected == {*schedule.rates, *schedule.supply_rates, "coordinator", "parked"}
    assert codes == {0, 1, 75, 93}
    assert replays > 20
    assert duplicates > 0
    assert never(AnyEvent, events) == ["EventLost"], "it stands for what a damaged file lost"
    assert never(AnyAction, actions) == []
    assert never(AnyRequest, requests) == []


def never(vocabulary: object, occurred: Counter[str]) -> list[str]:
    """The messages of a vocabulary that did not occur."""
    return [message.__name__ for message in get_args(vocabulary) if not occurred[message.__name__]]


@pytest.mark.parametrize("seed", [1, 2])
def test_fifty_nodes_come_through_minutes_of_chaos_and_finish(seed):
    settings = SimSettings(
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
    cluster = Cluster(settings).run()
    assert look.ended(cluster.coordinator.job).code == 0
    assert cluster.invariants.replays > 0
