"""The simulator is worth something only if it notices when the core is wrong."""

import dataclasses

import pytest
from msgspec.structs import replace

from holdfast.core import job as jobs
from holdfast.core.ledger import books
from holdfast.core.membership.events import MembershipMachine, _fence
from holdfast.core.ranks import events as ranks
from holdfast.core.ranks.state import Ranks
from holdfast.core.states import Running
from holdfast.messages.actions import CommitCheckpoint
from holdfast.messages.checkpoints import SnapshotId, StoredFile, Tried
from holdfast.messages.events import Asked, CheckpointWritten
from holdfast.messages.requests import FindState
from holdfast.sim.cluster import Cluster
from holdfast.sim.invariants import Violated
from holdfast.sim.shapes import chaos
from holdfast.sim.training import Segment


def sweep(seeds: range, light: bool) -> None:
    for seed in seeds:
        Cluster(dataclasses.replace(chaos(seed, liveness=True), light=light)).run()


def noticed(what: str, seeds: int = 60, light: bool = False, first: int = 0) -> None:
    """One of the seeds shows it; light agents have no stall detection that would repair it."""
    with pytest.raises(Violated, match=what):
        sweep(range(first, first + seeds), light)


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
    noticed("no step beyond|should have ended", seeds=200, light=True)


def test_word_from_an_older_round_that_is_believed_is_noticed(monkeypatch):
    monkeypatch.setattr(ranks, "rank_in_force", lambda job, node, round, rank: job.ranks.get(rank))
    noticed(
        "stepped before|more ranks started|nobody took|back before|productive|twice|went on from"
    )


def test_a_pause_that_is_booked_as_training_is_noticed(monkeypatch):
    aside = books._book_aside

    def generous(ledger, rank, cause, took_s, until):
        aside(ledger, rank, "productive" if cause == "other" else cause, took_s, until)

    monkeypatch.setattr(books, "_book_aside", generous)
    noticed("productive", first=60)


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


# ---- checkpoints and the history of steps ----


def test_a_checkpoint_that_is_committed_without_a_shard_is_noticed(monkeypatch):
    handle = jobs.handle

    def without_the_last(shards):
        return (*shards[:-1], replace(shards[-1], rank=shards[-1].rank + 1))

    def careless(job, event, now):
        return [
            replace(action, shards=without_the_last(action.shards))
            if isinstance(action, CommitCheckpoint)
            else action
            for action in handle(job, event, now)
        ]

    monkeypatch.setattr(jobs, "handle", careless)
    noticed("committed of")


def test_a_rank_that_goes_on_although_it_could_not_load_is_noticed(monkeypatch):
    handle = jobs.handle

    def trusting(job, event, now):
        restores = isinstance(event, Asked) and isinstance(event.request, FindState)
        if restores and event.request.tried is not None:
            event = replace(event, request=replace(event.request, tried=Tried()))
        return handle(job, event, now)

    monkeypatch.setattr(jobs, "handle", trusting)
    noticed("goes on without its state", first=50)  # About one in eighty shows it.


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(chaos(0))


SNAPSHOT = SnapshotId("sim", 10, 1)


def test_a_shard_that_is_not_durable_is_noticed_when_its_checkpoint_is_committed(cluster):
    shards = [cluster.storage.write(SNAPSHOT, 0), StoredFile(1, "rank_1.round_1", 1, "", "10 1 1")]
    with pytest.raises(Violated, match="committed without rank_1"):
        cluster.storage.commit(SNAPSHOT, 2, tuple(shards))


def test_the_previous_checkpoint_loads_after_every_prefix_of_a_save(cluster):
    storage = cluster.storage
    for step in (10, 20, 30, 40):
        snapshot = SnapshotId("sim", step, 1)
        shards = []
        for rank in range(2):
            shards.append(storage.write(snapshot, rank))
            assert [one.step for one in storage.complete()] == [10, 20, 30][: step // 10 - 1][-2:]
        assert storage.commit(snapshot, 2, tuple(shards)) == ""
    storage._files.popitem()
    with pytest.raises(Violated, match="does not load any more"):
        storage.write(SnapshotId("sim", 50, 1), 0)


def test_two_rounds_that_commit_one_step_are_noticed(cluster):
    cluster.storage.commit(SNAPSHOT, 1, (cluster.storage.write(SNAPSHOT, 0),))
    again = SnapshotId("sim", 10, 2)
    error = cluster.storage.commit(again, 1, (cluster.storage.write(again, 0),))
    assert "committed by round 1" in error
    check = cluster.invariants
    for snapshot, wrote in ((SNAPSHOT, ""), (again, error)):
        check.check_written(CheckpointWritten(at=1.0, node="h0:1", snapshot=snapshot, error=wrote))
    with pytest.raises(Violated, match="two rounds committed step 10"):
        check.check_written(CheckpointWritten(at=1.0, node="h0:1", snapshot=again))


def test_a_history_with_a_step_that_nobody_trained_is_noticed(cluster):
    history = cluster.training.history
    history.segments = {1: Segment(0, 0, 50), 2: Segment(40, 1, 70), 3: Segment(60, 2, 90)}
    assert history.untrained(3) == ""
    history.segments[2] = Segment(40, 1, 55)
    with pytest.raises(Violated, match="round 2 had not trained step 60"):
        cluster.invariants.check_history(3)
    history.segments[2] = Segment(65, 1, 70)
    with pytest.raises(Violated, match="round 2 had not trained step 60"):
        cluster.invariants.check_history(3)
