"""The simulator is worth something only if it notices when the core is wrong."""

import pytest
from msgspec.structs import replace

from holdfast.core import job as jobs
from holdfast.core import nodes, repair, workers
from holdfast.core.membership import rounds
from holdfast.messages.events import NodeResumed
from holdfast.sim.cluster import Cluster
from holdfast.sim.invariants import Violated
from holdfast.sim.shapes import chaos


def sweep(seeds: int) -> None:
    for seed in range(seeds):
        Cluster(chaos(seed, liveness=True)).run()


def noticed(what: str, seeds: int = 60) -> None:
    with pytest.raises(Violated, match=what):
        sweep(seeds)


def test_a_node_that_is_not_told_that_it_is_fenced_is_noticed(monkeypatch):
    resumed = jobs._HANDLERS[NodeResumed]

    def forgetful(job, event, now):
        known = job.membership.has(event.node) or job.ended is not None
        return resumed(job, event, now) if known else []

    monkeypatch.setitem(jobs._HANDLERS, NodeResumed, forgetful)
    noticed("is fenced and was not told")


def test_a_lost_order_that_is_not_repeated_is_noticed(monkeypatch):
    def deaf(job, event, now):
        job.absent.pop(event.node, None)
        if job.ended is not None:
            return [repair.finish_node(job, event.node)]
        return [] if job.membership.has(event.node) else [nodes._fence(event.node)]

    monkeypatch.setitem(jobs._HANDLERS, NodeResumed, deaf)
    noticed("no step beyond")


def test_word_from_an_older_round_that_is_believed_is_noticed(monkeypatch):
    monkeypatch.setattr(
        workers, "rank_in_force", lambda job, node, round, rank: job.ranks.get(rank)
    )
    noticed("stepped before|more ranks started|nobody took|back before|productive|twice")


def test_an_edited_world_is_noticed(monkeypatch):
    ready = rounds.ready

    def meddling(m, node, round, store_port):
        if m.world is not None:
            m.world = replace(m.world, store_port=store_port)
        return ready(m, node, round, store_port)

    monkeypatch.setattr(rounds, "ready", meddling)
    noticed("changed the frozen round|another world|not of round", seeds=200)


def test_a_state_that_is_not_in_the_journal_is_noticed(monkeypatch):
    handle, calls = jobs.handle, [0]

    def drifting(job, event, now):
        calls[0] += 1
        job.pace = None if calls[0] % 2 else job.pace
        job.saves += calls[0] % 3
        return handle(job, event, now)

    monkeypatch.setattr(jobs, "handle", drifting)
    noticed("the journal leads to another state")
