"""Processes that stay between rounds: none is forgotten, none is in two places, whatever happens."""

import dataclasses
from collections import Counter

import pytest
from msgspec.structs import replace

from holdfast.agent.supervisor import Supervisor
from holdfast.agent.worker import Workers
from holdfast.core.ranks.events import RanksMachine
from holdfast.messages.actions import Finish, StopWorkers
from holdfast.sim import look
from holdfast.sim.clock import START
from holdfast.sim.cluster import Cluster, SimSettings
from holdfast.sim.faults import raised
from holdfast.sim.invariants import Violated
from holdfast.sim.rank import SimRank
from holdfast.sim.shapes import restarting
from holdfast.sim.supervised import SimStarter

BLOCK = 10
BUG = raised("ValueError", "loss is nan", "train.py:120")


@pytest.mark.parametrize("first", range(0, 100, BLOCK))
def test_no_seed_breaks_an_invariant(first):
    for seed in range(first, first + BLOCK):
        Cluster(restarting(seed)).run()


def a_job(light=False, **more) -> Cluster:
    """Two nodes with two ranks each, which train."""
    settings = {"nodes": 2, "spares": 0, "min_nodes": 2, "hours": 1.0, "slots": 2, **more}
    settings |= {"faults": "none", "check": "every", "step_s": 0.1, "inprocess": True}
    cluster = Cluster(SimSettings(seed=1, light=light, **settings))
    for host in cluster.hosts:
        cluster.boot(host)
    cluster._run_until(START + 30)
    assert look.unstepped(cluster.coordinator.job) == 0
    return cluster


def pass_s(cluster: Cluster, seconds: float) -> None:
    cluster._run_until(cluster.clock.now + seconds)


def rank(cluster: Cluster, number: int) -> SimRank:
    return cluster.training.rounds[cluster.training.newest].ranks[number]


def pids(cluster: Cluster) -> dict[int, int]:
    agents = [host.agent for host in cluster.hosts]
    return {r: one.pid for agent in agents for r, one in agent.ranks.items()}


def changed(before: dict[int, int], after: dict[int, int]) -> list[int]:
    """Ranks that have another process."""
    assert before.keys() == after.keys()
    return sorted(rank for rank in after if after[rank] != before[rank])


@pytest.fixture(params=[True, False], ids=["light", "supervised"])
def job(request):
    return a_job(request.param)


def test_after_an_exception_all_train_on_in_their_processes_from_the_step_they_were_at(job):
    before, step = pids(job), job.training.highest_now()
    rank(job, 1).die(1, raised=BUG)
    pass_s(job, 5)
    assert pids(job) == before
    incident = look.last_fault(job.coordinator.job)
    assert (incident.rung, incident.lost_steps) == ("re-enter the function", 0)
    assert job.training.rounds[2].base >= step


def test_after_a_death_only_the_dead_process_is_replaced(job):
    before = pids(job)
    rank(job, 2).die(signal=9)
    pass_s(job, 5)
    after = pids(job)
    assert changed(before, after) == [2]
    assert look.last_fault(job.coordinator.job).rung == "standby"


def test_a_process_that_does_not_leave_is_killed_and_replaced(job):
    before = pids(job)
    rank(job, 3).stuck = "gil"
    rank(job, 0).die(signal=9)
    pass_s(job, 8)
    after = pids(job)
    assert changed(before, after) == [0, 3]
    assert look.last_fault(job.coordinator.job).rank == 0


def test_a_process_that_is_to_be_replaced_is_ended_though_it_is_parked_already(job):
    one = rank(job, 1)
    agent = one.agent
    job.cut(agent.host, 1.0, whole=False)
    one.die(1, raised=BUG)
    pass_s(job, 0.5)
    assert one.pid in agent.parked
    agent.ordered(stop(agent, leave_s=2.0, replace=(1,)))
    pass_s(job, 0.3)
    assert one.exit is not None
    assert len(agent.parked) == 1


def test_a_process_that_leaves_while_it_is_told_to_end_is_not_parked(job):
    agent = rank(job, 1).agent
    takes_s = iter((0.5, 5.0))
    agent.chance.stop_s = lambda *_: (next(takes_s), True)  # Both ranks handle SIGTERM.
    agent.ranks[1].die(1, raised=BUG)
    agent.ordered(Finish(node=agent.node, code=75, reason="x", grace_s=30.0))
    pass_s(job, 20)
    assert agent.dead, "and `Invariants.node_leaves` has seen no process"


def test_an_order_to_stop_that_is_repeated_ends_no_parked_process(job):
    """Its answer was on its way when the coordinator lost its patience."""
    agent = job.hosts[0].agent
    job.cut(agent.host, 2.0, whole=False)
    agent.ordered(stop(agent, leave_s=2.0))
    pass_s(job, 0.5)
    assert len(agent.parked) == 2
    agent.ordered(stop(agent, leave_s=0.0, grace_s=0.0))
    pass_s(job, 0.5)
    assert not agent.busy
    assert len(agent.parked) == 2


def test_a_process_that_its_agent_kills_for_being_slow_is_not_told_as_a_death():
    job = a_job()
    agent = rank(job, 1).agent
    agent.ranks[1].stuck = "gil"
    job.cut(agent.host, 2.0, whole=False)
    agent.ordered(stop(agent, leave_s=2.0))
    pass_s(job, 0.5)
    agent.ordered(stop(agent, leave_s=0.0, grace_s=0.0))
    pass_s(job, 0.5)
    said = [type(sent.event).__name__ for sent in agent.unacked]
    assert "WorkersKilled" in said
    assert "WorkerExited" not in said


def test_a_start_that_fails_forgets_no_parked_process(monkeypatch):
    job = a_job()
    before, start, failed = pids(job), SimStarter._start_rank, []

    def fails_once(self, part, local_rank, monitor, parked=None):
        if not failed:
            failed.append(local_rank)
            raise OSError("no space left on device")
        start(self, part, local_rank, monitor, parked)

    monkeypatch.setattr(SimStarter, "_start_rank", fails_once)
    rank(job, 1).die(1, raised=BUG)
    pass_s(job, 8)
    assert failed
    assert pids(job) == before
    assert [incident.signature for incident in look.incidents(job.coordinator.job)] == [
        "ValueError at train.py:120",
        "OSError at its start",
    ]


def stop(agent, leave_s: float, grace_s: float = 30.0, replace=()) -> StopWorkers:
    about = {"node": agent.node, "round": agent.round, "why": "x", "replace": replace}
    return StopWorkers(leave_s=leave_s, grace_s=grace_s, **about)


# ---- what the simulator would notice ----


def noticed(what: str, seeds: int = 40) -> None:
    """One of the seeds shows it."""
    with pytest.raises(Violated, match=what):
        sweep(seeds)


def sweep(seeds: int) -> None:
    for seed in range(seeds):
        Cluster(dataclasses.replace(restarting(seed), light=False)).run()


def test_ranks_that_are_released_before_all_have_returned_are_noticed(monkeypatch):
    monkeypatch.setattr(RanksMachine, "_all_returned", lambda self, job: job.world is not None)
    noticed("is released when")


def test_a_round_that_begins_while_another_is_being_left_is_noticed(monkeypatch):
    def hasty(self, order):
        self._workers.leave(order) if isinstance(order, StopWorkers) else self.kill_all()
        self._stopped(order)

    monkeypatch.setattr(Supervisor, "_stop_workers", hasty)
    noticed("while round|on top of another")


def test_a_parked_process_that_is_forgotten_is_noticed(monkeypatch):
    monkeypatch.setattr(SimStarter, "_start_rank", forget_parked(SimStarter._start_rank))
    noticed("has forgotten process|leaves, and processes")


def forget_parked(start):
    def started(self, part, local_rank, monitor, parked=None):
        monitor.workers.parked.pop(local_rank, None)
        start(self, part, local_rank, monitor)

    return started


def test_a_process_that_stays_though_it_was_to_be_replaced_is_noticed(monkeypatch):
    leave = Workers.leave

    def lenient(self, order):
        return leave(self, replace(order, replace=()))

    monkeypatch.setattr(Workers, "leave", lenient)
    noticed("was to be replaced, and stays", seeds=150)


def test_scripts_that_are_never_released_are_noticed(monkeypatch):
    monkeypatch.setattr(Workers, "release", lambda self: None)
    noticed("should have ended and did not")


def test_the_sweep_sees_every_way_to_leave_a_function_and_what_follows():
    counts = Counter()
    for seed in range(200, 220):
        counts.update(Cluster(restarting(seed)).run().functions.counts)
    ways = ("at once", "slowly", "late", "dies", "unfit", "never")
    seen = {f"left: {how}" for how in ways}
    seen |= {"raised", "entered again", "returned", "released", "dismissed"}
    assert set(counts) == {*seen, "went on from living state"}
