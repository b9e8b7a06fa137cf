"""The simulator is worth something only if it notices when the core is wrong."""

import pytest
from msgspec.structs import replace

from holdfast.core import job as jobs
from holdfast.core.membership.events import MembershipMachine, _fence
from holdfast.core.ranks import events as ranks
from holdfast.core.ranks.state import Ranks
from holdfast.core.states import Running
from holdfast.sim.cluster import Cluster
from holdfast.sim.invariants import Violated
from holdfast.sim.shapes import chaos


def sweep(seeds: int) -> None:
    for seed in range(seeds):
        Cluster(chaos(seed, liveness=True)).run()


def noticed(what: str, seeds: int = 60) -> None:
    with pytest.raises(Violated, match=what):
        sweep(seeds)


@pytest.fixture
def handler(monkeypatch):
    """Replace a handler of a machine."""

    def patch(machine, name, function):
        function.rule = getattr(machine, name).rule
        monkeypatch.setattr(machine, name, function)

    return patch


def test_a_node_that_is_not_told_that_it_is_fenced_is_noticed(handler):
    resumed = MembershipMachine.on_resumed

    def forgetful(self, job, event, now):
        known = self.has(event.node) or job.result is not None
        return resumed(self, job, event, now) if known else []

    handler(MembershipMachine, "on_resumed", forgetful)
    noticed("is fenced and was not told")


def test_a_lost_order_that_is_not_repeated_is_noticed(handler):
    def deaf(self, job, event, now):
        self.absent.pop(event.node, None)
        if job.result is not None:
            return [self.goodbye(event.node, job.result.code, job.result.reason)]
        return [] if self.has(event.node) else [_fence(event.node)]

    handler(MembershipMachine, "on_resumed", deaf)
    noticed("no step beyond")


def test_word_from_an_older_round_that_is_believed_is_noticed(monkeypatch):
    monkeypatch.setattr(ranks, "rank_in_force", lambda job, node, round, rank: job.ranks.get(rank))
    noticed("stepped before|more ranks started|nobody took|back before|productive|twice")


def test_an_edited_world_is_noticed(handler):
    warm = MembershipMachine.on_warm

    def meddling(self, job, event, now):
        if isinstance(job.state, Running):
            job.state = Running(replace(job.state.world, store_port=1))
        return warm(self, job, event, now)

    handler(MembershipMachine, "on_warm", meddling)
    noticed("changed the frozen round|another world|not of round", seeds=200)


def test_a_state_that_is_not_in_the_journal_is_noticed(monkeypatch):
    handle, calls = jobs.handle, [0]

    def drifting(job, event, now):
        calls[0] += 1
        job.of(Ranks).saves += calls[0] % 3
        return handle(job, event, now)

    monkeypatch.setattr(jobs, "handle", drifting)
    noticed("the journal leads to another state")
