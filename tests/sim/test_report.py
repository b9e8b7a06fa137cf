"""What `holdfast sim` says adds up."""

import json

import pytest

from holdfast.cli.main import main
from holdfast.messages.reports import CAUSES
from holdfast.sim import report
from holdfast.sim.cluster import Cluster, SimSettings


@pytest.fixture(scope="module")
def hour() -> dict:
    """A thousand nodes for an hour under heavy faults."""
    settings = SimSettings(
        seed=1, nodes=1000, spares=5, min_nodes=900, hours=1.0, slots=2, faults="heavy"
    )
    return report.numbers(Cluster(settings).run())


def test_a_thousand_nodes_train_for_an_hour_of_heavy_faults(hour):
    assert hour["state"] == "running"
    assert hour["simulated_s"] == 3600
    assert hour["goodput"] > 0.5
    assert hour["rounds"] > 2
    assert hour["steps"] > 300


def test_the_seconds_by_cause_add_up_to_the_wall_clock_of_all_ranks(hour):
    assert set(hour["seconds"]) == set(CAUSES)
    whole = sum(hour["seconds"].values())
    assert whole == pytest.approx(hour["simulated_s"] * hour["ranks"], rel=1e-3)
    assert hour["goodput"] == pytest.approx(hour["seconds"]["productive"] / whole, abs=1e-5)


def test_each_round_after_the_first_answers_an_incident(hour):
    assert sum(hour["incidents"].values()) >= hour["rounds"] - 1


def test_every_crash_of_the_coordinator_is_followed_by_a_verified_replay(hour):
    assert hour["coordinator_restarts"] == hour["replays_verified"]


def test_every_phase_has_a_median_below_its_p99(hour):
    for took in hour["phases"].values():
        assert 0 <= took["median"] <= took["p99"]


def test_without_faults_there_is_one_round_and_no_incident(capsys):
    assert main(["sim", "--nodes", "4", "--hours", "0.1", "--faults", "none", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rounds"] == 1
    assert shown["incidents"] == {}
    assert shown["goodput"] > 0.9


def test_people_get_lines(capsys):
    assert main(["sim", "--nodes", "4", "--hours", "0.02", "--faults", "chaos"]) == 0
    text = capsys.readouterr().out
    for word in ("goodput", "incidents", "invariants", "replays verified", "event log"):
        assert word in text


def test_a_sweep_says_how_many_seeds_there_were(capsys):
    assert main(["sim", "--seeds", "3..5", "--liveness"]) == 0
    assert "3 seeds, 0 of them violated" in capsys.readouterr().out


@pytest.mark.parametrize(("rate", "fails"), [("0", False), ("50000", True)])
def test_nodes_fail_as_often_as_the_fault_rate_says(rate: str, fails: bool, capsys) -> None:
    assert main(["sim", "--nodes", "2", "--hours", "0.1", "--fault-rate", rate, "--json"]) == 0
    assert bool(json.loads(capsys.readouterr().out)["incidents"]) is fails


@pytest.mark.parametrize(
    "flags", [["--seeds", "x"], ["--nodes", "0"], ["--nodes", "2", "--min-nodes", "3"]]
)
def test_nonsense_is_refused_in_one_line(flags, capsys):
    assert main(["sim", *flags]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
