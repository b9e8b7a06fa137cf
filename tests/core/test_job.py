"""The whole machine, by example: one promise each."""

from __future__ import annotations

from typing import Any

import pytest
from driver import OPENED_AT, WAKE, Driver, encoded, kinds, raised, replayed

from holdfast.core import job as jobs
from holdfast.core.ledger import books
from holdfast.core.ledger.books import Ledger
from holdfast.core.patience import STOP_UNKNOWN_S
from holdfast.core.states import Ended
from holdfast.messages.actions import CloseJob, Finish, StartWorkers, StopWorkers
from holdfast.messages.events import (
    CoordinatorRestarted,
    ExcludeAsked,
    NodeWarm,
    StopAsked,
)
from holdfast.messages.units import NodeId, Rank, Time


def seconds(driver: Driver) -> dict[str, float]:
    found = books.seconds_until(driver.job.of(Ledger), driver.at)
    return {cause: round(s, 6) for cause, s in found.items() if s}


# ---- the ordinary course ----


def test_a_job_without_faults_starts_steps_finishes_and_closes() -> None:
    driver = Driver().running("a", step=10)
    assert driver.job.state.name == "running"
    assert driver.exit(0, step=10, code=0) == []
    assert kinds(driver.exit(1, step=10, code=0)) == ["Finish"]
    assert driver.job.state.name == "ending"
    assert driver.left("a") == [CloseJob(code=0, reason="finished")]
    assert driver.job.state.name == "ended"


def test_every_node_gets_its_own_part_and_nobody_elses() -> None:
    driver = Driver(min_nodes=3, max_nodes=3)
    driver.join("a")
    driver.join("b")
    actions = driver.join("c")
    assert [(a.node, a.part.first_rank) for a in actions if isinstance(a, StartWorkers)] == [
        ("a", 0),
        ("b", 2),
        ("c", 4),
    ]


def test_a_rank_that_ends_early_with_0_is_no_failure() -> None:
    driver = Driver().running("a", step=10)
    driver.exit(0, step=10, code=0)
    driver.after(5).step(1, 20)
    assert driver.job.state.name == "running"
    assert driver.job.incidents == []
    assert seconds(driver)["idle"] == 5


# ---- a rank dies ----


def test_a_killed_rank_stops_the_others_then_the_next_round_starts() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=40)
    stops = driver.after(1).exit(3, step=40, signal=9)
    assert [(s.node, s.round) for s in stops if isinstance(s, StopWorkers)] == [("a", 1), ("b", 1)]
    assert driver.job.state.name == "stopping"
    assert driver.after(1).ready("a") == []
    starts = driver.ready("b")
    assert kinds(starts) == ["StartWorkers", "StartWorkers"]
    assert driver.round == 2


def test_an_incident_closes_with_the_last_ranks_first_step() -> None:
    driver = Driver().running("a", step=40)
    driver.after(1).exit(1, step=40, signal=9)
    driver.after(0.5).all_ready()
    driver.after(0.25).start_all()
    driver.after(1).step(0, 41, 1)
    assert driver.job.recovery.open_incident is not None
    driver.after(1).step(1, 41, 1)
    (incident,) = driver.job.incidents
    assert incident.closed_at == incident.back_at == driver.now
    assert incident.lost_steps == 0
    assert (incident.kind, incident.rank, incident.step) == ("signal", 1, 40)


def test_steps_that_have_to_be_redone_are_counted_from_the_lowest_rank() -> None:
    driver = Driver().running("a", step=40)
    driver.exit(1, step=40, signal=9)
    driver.all_ready()
    driver.start_all()
    driver.after(1).step(0, 31, 1)
    driver.step(1, 36, 1)
    assert driver.job.incidents[0].lost_steps == 10


def test_the_rank_that_died_by_itself_is_blamed_even_if_heard_of_last() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=5)
    driver.exit(0, step=5, code=1, raised=WAKE)
    driver.after(0.1).exit(3, step=5, signal=9)
    (incident,) = driver.job.incidents
    assert (incident.rank, incident.kind) == (3, "signal")
    assert incident.also == ["rank 0 RuntimeError at train.py:3"]


def test_a_failure_before_the_first_step_ends_the_job_with_1() -> None:
    driver = Driver().running("a")
    driver.exit(0, code=1, raised=raised())
    (finish,) = driver.all_ready()
    assert isinstance(finish, Finish)
    assert finish.code == 1
    assert "ValueError" in finish.reason


def test_the_same_failure_three_times_ends_the_job_with_93() -> None:
    driver = Driver().running("a", step=7)
    for _ in range(2):
        driver.exit(0, step=7, code=1, raised=raised())
        assert kinds(driver.all_ready()) == ["StartWorkers"]
        driver.start_all()
        driver.step_all(7, 1)
    driver.exit(0, step=7, code=1, raised=raised())
    (finish,) = driver.all_ready()
    assert isinstance(finish, Finish)
    assert finish.code == 93


def test_a_worker_that_dies_again_before_its_first_step_opens_a_second_incident() -> None:
    driver = Driver().running("a", step=7)
    for _ in range(3):
        driver.after(1).exit(0, signal=9)
        driver.all_ready()
        driver.start_all()
    assert [i.closed_at is None for i in driver.job.incidents] == [False, False, True]


def test_a_late_word_that_a_script_began_does_not_close_the_incident_of_its_round() -> None:
    driver = Driver(min_nodes=2, max_nodes=2)
    driver.join("a", 1)
    driver.join("b", 1)
    driver.start(0)
    driver.exit(0, signal=9)
    driver.after(0.1).start(1)
    assert driver.job.recovery.open_incident is not None
    assert driver.job.incidents[0].started_at is None


def test_a_clean_exit_in_a_broken_round_does_not_finish_the_job() -> None:
    driver = Driver().running("a", step=5)
    driver.exit(0, step=5, signal=9)
    driver.exit(1, step=5, code=0)
    assert driver.job.result is None
    assert kinds(driver.all_ready()) == ["StartWorkers"]


# ---- fencing ----


def two_rounds() -> Driver:
    """Round 2 of one node, running; round 1 is past."""
    driver = Driver().running("a", step=10)
    driver.exit(0, step=10, signal=9)
    driver.all_ready()
    driver.after(1).start_all()
    return driver


def stale_events(driver: Driver) -> list[Any]:
    return [
        lambda: driver.start(0, round=1),
        lambda: driver.step(0, 99, round=1),
        lambda: driver.exit(0, step=99, code=0, round=1),
        lambda: driver.exit(0, step=99, signal=9, round=1),
        lambda: driver.ready("a", [driver.progress(0, 99)], round=1),
        lambda: driver.start(0, round=3),
        lambda: driver.exit(0, signal=9, round=3),
    ]


@pytest.mark.parametrize("which", range(7))
def test_word_of_another_round_changes_nothing(which: int) -> None:
    driver = two_rounds()
    before = encoded(driver.job)
    assert stale_events(driver)[which]() == []
    assert encoded(driver.job) == before


def test_survivors_are_waited_for_although_spares_could_fill_the_world() -> None:
    driver = Driver(min_nodes=1, max_nodes=1).running("a", step=10)
    driver.join("spare")
    driver.exit(0, step=10, signal=9)
    assert driver.tick() == []
    started = driver.after(1).ready("a", round=1)
    assert [(kind, action.node) for kind, action in zip(kinds(started), started, strict=True)] == [
        ("StartWorkers", "a"),
        ("Prepare", "spare"),
    ]


def test_a_node_that_cannot_stop_is_killed_and_does_not_hold_up_spares_for_ever() -> None:
    driver = Driver(min_nodes=1, max_nodes=1).running("a", step=10)
    driver.join("spare")
    driver.exit(0, step=10, signal=9)
    assert driver.after(STOP_UNKNOWN_S - 1).tick() == []
    (stop,) = driver.after(2).tick()
    assert isinstance(stop, StopWorkers)
    assert (stop.node, stop.round, stop.grace_s) == ("a", 1, 0.0)
    assert kinds(driver.killed("a")) == ["StartWorkers"]
    assert driver.world.places[0].node == "spare"


def test_a_last_word_of_an_older_round_is_not_the_new_rounds() -> None:
    driver = two_rounds()
    driver.left("a", [driver.progress(0, 99)], round=1)
    assert driver.job.highest == 10


def test_a_node_cannot_speak_for_another_nodes_rank() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=5)
    before = encoded(driver.job)
    assert driver.exit(3, step=5, signal=9, node=NodeId("a")) == []
    assert driver.step(3, 50, node=NodeId("a")) == []
    assert encoded(driver.job) == before


def test_an_older_report_does_not_turn_a_rank_back() -> None:
    driver = Driver().running("a", step=10)
    driver.after(1).step(0, 20, 20)
    driver.step(0, 15, 15)
    assert driver.job.ranks[Rank(0)].step == 20


# ---- nodes come and go ----


def test_a_late_joiner_waits_and_the_frozen_world_stays_as_it_is() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    world = driver.world
    assert kinds(driver.join("c")) == ["Prepare"]
    assert driver.world is world
    assert driver.job.state.name == "running"


def test_a_full_world_is_not_restarted_for_extra_nodes() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    driver.join("c")
    assert driver.take(NodeWarm(at=driver.at, node=NodeId("c"))) == []
    assert driver.step_all(4) is None
    assert driver.round == 1


def test_the_world_grows_when_a_newcomer_is_warm_and_costs_no_restart() -> None:
    driver = Driver(min_nodes=1, max_nodes=2, max_restarts=0).running("a", step=3)
    assert kinds(driver.join("b")) == ["Prepare"]
    stops = driver.take(NodeWarm(at=driver.at, node=NodeId("b")))
    assert kinds(stops) == ["StopWorkers"]
    assert kinds(driver.ready("a")) == ["StartWorkers", "StartWorkers"]
    assert driver.world.size == 4
    assert driver.job.recovery.history.restarts == 0


def test_a_lost_node_is_replaced_by_a_spare_and_the_world_keeps_its_size() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.join("spare")
    driver.lose("a")
    starts = driver.all_ready()
    assert {s.node for s in starts if isinstance(s, StartWorkers)} == {"b", "spare"}
    assert driver.world.size == 4


def test_a_lost_node_is_not_waited_for_when_enough_are_left() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    assert kinds(driver.lose("b")) == ["StopWorkers"]
    assert kinds(driver.ready("a")) == ["StartWorkers"]
    assert driver.world.size == 2


def test_below_the_minimum_the_job_waits_and_goes_on_with_a_newcomer() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.lose("b")
    assert driver.ready("a") == []
    assert driver.job.state.name == "gathering"
    driver.after(50)
    assert kinds(driver.join("c")) == ["StartWorkers", "StartWorkers"]
    assert seconds(driver)["wait"] >= 100


def test_below_the_minimum_for_too_long_the_job_ends_with_75() -> None:
    driver = Driver(min_nodes=2, max_nodes=2, join_limit_s=30.0)
    driver.join("a")
    assert jobs.deadline(driver.job) == OPENED_AT + 30
    (finish,) = driver.after(30).tick()
    assert isinstance(finish, Finish)
    assert finish.code == 75


def test_the_death_of_a_node_is_not_blamed_on_who_noticed_it_first() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b")
    driver.exit(0, code=1, raised=WAKE)
    driver.exit(1, code=1, raised=WAKE)
    driver.ready("a")
    assert kinds(driver.lose("b")) == ["StartWorkers"], "the job ended for the wake of a lost node"
    assert driver.job.incidents[0].kind == "node"


def test_the_wake_of_a_fault_is_not_judged_before_its_cause_can_be_known() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b")
    driver.join("c")
    driver.join("d")
    driver.exit(0, code=1, raised=WAKE)
    driver.ready("a")
    assert driver.job.result is None
    driver.lose("b")
    assert driver.job.result is None
    assert driver.job.incidents[0].kind == "node"


def test_a_node_told_to_leave_goes_and_the_others_go_on() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    actions = driver.leaving("b")
    assert kinds(actions) == ["Finish", "StopWorkers"]
    assert driver.ready("a") == [], "its workers may still run"
    assert kinds(driver.left("b")) == ["StartWorkers"]
    assert driver.job.state.name == "running"


def test_the_last_node_that_is_needed_and_told_to_leave_ends_the_job() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    assert kinds(driver.leaving("b", code=75)) == ["Finish", "Finish"]
    assert driver.job.result is not None
    assert driver.job.result.code == 75


def test_a_node_that_is_no_member_cannot_end_the_job_by_leaving() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.leaving("stranger")
    assert driver.job.state.name == "running"


def test_a_member_that_joins_again_lost_its_workers_and_the_others_hear_of_it_at_once() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    stops = driver.join("a")
    assert [s.node for s in stops if isinstance(s, StopWorkers)] == ["b"]
    assert kinds(driver.ready("b")) == ["StartWorkers", "StartWorkers"]


def test_a_member_that_joins_again_as_the_job_gives_up_is_told_to_finish() -> None:
    driver = Driver(max_restarts=0).running("a", step=3)
    actions = driver.join("a")
    assert "Finish" in kinds(actions)
    assert driver.job.state.name == "ending"
    assert kinds(driver.left("a")) == ["CloseJob"]


def test_joining_a_job_that_is_over_is_answered_with_its_end() -> None:
    driver = Driver().running("a", step=3)
    driver.leaving("a")
    (finish,) = driver.join("late")
    assert isinstance(finish, Finish)
    driver.left("a")
    assert isinstance(driver.job.state, Ended)


def test_an_excluded_host_is_not_let_in_again() -> None:
    driver = Driver(min_nodes=1, max_nodes=2)
    driver.join("a", host="good")
    driver.join("b", host="bad")
    driver.start_all()
    event = ExcludeAsked(
        at=driver.at, node=NodeId("b"), round=driver.round, rank=Rank(2), reason="ECC errors"
    )
    assert kinds(driver.take(event)) == ["Finish", "StopWorkers"]
    driver.ready("a")
    (finish,) = driver.join("b2", host="bad")
    assert isinstance(finish, Finish)
    assert "ECC errors" in finish.reason


def test_a_script_may_end_the_whole_job() -> None:
    driver = Driver().running("a", step=3)
    event = StopAsked(
        at=driver.at, node=NodeId("a"), round=driver.round, rank=Rank(0), reason="loss", code=93
    )
    assert kinds(driver.take(event)) == ["Finish"]


# ---- broken streams ----


def test_a_stream_that_comes_back_before_its_lease_is_over_costs_nothing() -> None:
    driver = Driver().running("a", step=3)
    driver.cut_off("a")
    assert jobs.deadline(driver.job) is None, "only the end of its lease makes it lost"
    assert driver.after(0.1).resume("a", 1, busy=True) == []
    driver.after(10).tick()
    assert driver.job.state.name == "running"
    assert driver.job.incidents == []


def test_a_node_that_missed_its_start_is_told_again() -> None:
    driver = Driver(min_nodes=2, max_nodes=2)
    driver.join("a")
    driver.join("b")
    (start,) = driver.resume("b", 0)
    assert isinstance(start, StartWorkers)
    assert start.part.first_rank == 2


def test_a_node_that_missed_its_stop_is_told_again() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.exit(0, step=3, signal=9)
    (stop,) = driver.resume("b", 1, busy=True)
    assert isinstance(stop, StopWorkers)
    assert stop.round == 1


def test_a_node_that_was_given_up_is_sent_away_when_it_comes_back() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    driver.lose("b")
    (finish,) = driver.resume("b", 1, busy=True)
    assert isinstance(finish, Finish)
    assert finish.code == 75


def test_after_a_restart_of_the_coordinator_every_node_is_waited_for_until_its_lease_is_over() -> (
    None
):
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.take(CoordinatorRestarted(at=driver.at))
    assert list(driver.job.membership.absent) == ["a", "b"]
    assert jobs.deadline(driver.job) is None
    driver.after(1).resume("a", 1, busy=True)
    driver.resume("b", 1, busy=True)
    driver.after(100).tick()
    assert driver.job.incidents == []


def test_a_coordinator_that_died_at_the_very_end_ends_when_it_is_started_again() -> None:
    driver = Driver().running("a", step=3)
    driver.leaving("a")
    driver.left("a")
    assert kinds(driver.take(CoordinatorRestarted(at=driver.at))) == ["CloseJob"]


def test_a_node_that_was_absent_when_the_job_ended_holds_up_its_close_until_its_lease_is_over() -> (
    None
):
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.cut_off("b")
    driver.leaving("a")
    driver.left("a")
    assert driver.job.state.name == "ending"
    assert kinds(driver.end_lease("b")) == ["CloseJob"]


# ---- the end and the books ----


def test_a_job_that_ends_while_it_is_being_repaired_leaves_no_incident_open() -> None:
    driver = Driver().running("a", step=3)
    driver.exit(0, step=3, signal=9)
    driver.leaving("a")
    assert driver.job.recovery.open_incident is None
    assert driver.job.incidents[0].action


def test_the_time_to_stop_a_job_is_not_training() -> None:
    driver = Driver().running("a", step=3)
    driver.leaving("a")
    driver.after(20).left("a", [driver.progress(0, 4, first_at=driver.now - 30)])
    assert seconds(driver)["stop"] >= 20


def test_agents_clocks_that_differ_slightly_lose_no_time() -> None:
    for skew in (-0.2, 0.2):
        driver = Driver().running("a", step=10)
        driver.after(1)
        driver.exit(0, step=10, signal=9, at=Time(driver.now + skew))
        driver.after(0.1).all_ready()
        driver.start_all()
        driver.after(1).step_all(11, 1)
        total = books.rank_seconds(driver.job.of(Ledger), driver.at)
        assert total == pytest.approx(2 * (driver.now - OPENED_AT), abs=0.5)
        assert sum(seconds(driver).values()) == pytest.approx(total, abs=1e-4)


def test_the_same_events_lead_to_the_same_job() -> None:
    driver = two_rounds()
    for cut in range(len(driver.history)):
        assert encoded(replayed(driver.history, revive_at=cut)) == encoded(driver.job)
