"""Records are used once in the committed history, in worlds of any size, whatever dies."""

import pytest

from holdfast.agent.shards import HeldShards
from holdfast.messages.data import Span
from holdfast.sim import look
from holdfast.sim.cluster import Cluster
from holdfast.sim.invariants import Violated
from holdfast.sim.shapes import sharing

BLOCK = 5


def run_all(seeds):
    for seed in seeds:
        Cluster(sharing(seed)).run()


@pytest.mark.parametrize("first", range(0, 20, BLOCK))
def test_no_seed_uses_a_record_twice_or_never(first):
    run_all(range(first, first + BLOCK))


def test_the_sweep_resizes_worlds_restarts_coordinators_and_uses_data_up():
    sizes, restarts, finished, rounds = set(), 0, 0, 0
    for seed in range(40, 50):
        cluster = Cluster(sharing(seed)).run()
        sizes |= {len(world.places) for world in cluster.invariants.frozen.values()}
        restarts += cluster.coordinator.restarts
        finished += bool(cluster.data.finished)
        accounts = look.accounts(cluster.coordinator.job)
        assert set(accounts) == {"leased", "lockstep"}
        rounds += len(accounts["leased"].rounds)
    assert sizes == {2, 3, 4}
    assert restarts > 10
    assert finished > 1
    assert rounds > 50


def test_an_agent_that_forgets_what_it_has_reported_is_found_out(monkeypatch):
    """What was lent is said again to an agent that comes back, before its last report is heard."""
    add = HeldShards.add

    def forgetful(self, spans, heard):
        self.unheard.clear()
        add(self, spans, heard)

    monkeypatch.setattr(HeldShards, "add", forgetful)
    with pytest.raises(Violated, match="was used twice in round"):
        run_all(range(10))


def test_a_script_that_restores_its_model_and_not_its_data_is_found_out():
    cluster = Cluster(sharing(1))
    data = cluster.data
    before_save = data.before_save

    def saves_no_data(round, step):
        before_save(round, step)
        if (round.number, step) in data._saved:
            data._saved[round.number, step].remove(Span(0, 0, 1_000_000))

    data.before_save = saves_no_data
    with pytest.raises(Violated, match=r"not used exactly once|was not used"):
        cluster.run()
