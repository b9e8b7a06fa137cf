"""Rounds whose processes stay: who leaves, who is replaced, who enters again, and who may go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from driver import WAKE, Driver, encoded, raised, replayed, revived

from holdfast.core.patience import LEAVE_FLOOR_S, LEAVE_UNKNOWN_S, STOP_FACTOR
from holdfast.core.recovery.rules import REENTER_LIMIT, SAME_LIMIT
from holdfast.messages.actions import AnyAction, ReleaseRanks, StartWorkers, StopWorkers
from holdfast.messages.events import CoordinatorRestarted, NodeWarm, RanksStalled, VerdictReached
from holdfast.messages.hangs import Proof, Stall
from holdfast.messages.records import Incident
from holdfast.messages.units import NodeId, Rank

BUG = raised("ValueError", "loss is nan", "train.py:120")


def two_nodes(**terms: Any) -> Driver:
    """Ranks 0 and 1 on node a, 2 and 3 on node b, at step 5."""
    return Driver(**{"min_nodes": 2, "max_nodes": 2, **terms}).running("a", "b", step=5)


def last(driver: Driver) -> Incident:
    return driver.job.incidents[-1]


def stops(actions: list[AnyAction]) -> dict[str, StopWorkers]:
    return {action.node: action for action in actions if isinstance(action, StopWorkers)}


def released(actions: list[AnyAction]) -> list[str]:
    return [action.node for action in actions if isinstance(action, ReleaseRanks)]


def starts(actions: list[AnyAction]) -> list[str]:
    return [action.node for action in actions if isinstance(action, StartWorkers)]


def go_on(driver: Driver, step: int) -> None:
    """All ranks begin, and come to that step."""
    driver.after(0.1).start_all()
    driver.after(1).step_all(step)


# ---- one fault -----------------------------------------------------------------------------------


def test_an_exception_makes_all_ranks_leave_and_enter_again_in_their_processes() -> None:
    driver = two_nodes()
    told = stops(driver.function_raised(1, BUG, step=5))
    assert set(told) == {"a", "b"}
    assert all(order.leave_s > 0 and order.replace == () for order in told.values())
    assert starts(driver.all_parked()) == ["a", "b"]
    assert (last(driver).rung, last(driver).kind, last(driver).rank) == (
        "re-enter the function",
        "exception",
        1,
    )
    assert last(driver).action == "left the function on all ranks and entered it again"


def test_a_dead_rank_is_replaced_and_the_others_enter_again() -> None:
    driver = two_nodes()
    told = stops(driver.exit(2, step=5, signal=9))
    assert told["a"].leave_s > 0
    driver.all_parked(b=1)
    assert last(driver).rung == "standby"
    assert last(driver).action == (
        "gave the ranks to standbys; 3 ranks entered their function again"
    )


def test_of_a_single_rank_that_stays_the_incident_speaks_in_the_singular() -> None:
    driver = two_nodes()
    driver.exit(2, step=5, signal=9)
    driver.all_parked(a=2, b=1)
    assert last(driver).action.endswith("; 1 rank entered its function again")


def test_processes_that_a_spare_keeps_are_not_taken_for_those_of_the_broken_world() -> None:
    driver = two_nodes()
    driver.join("c")
    driver.function_raised(0, BUG, step=5)
    driver.ready("b", parked=2)
    driver.cut_off("b")
    driver.ready("a", parked=2)
    assert {place.node for place in driver.world.places} == {"a", "c"}
    driver.resume("b", 1)
    go_on(driver, 6)
    driver.exit(0, step=6, signal=9)
    driver.all_parked(a=1)
    assert last(driver).rung == "standby"
    assert last(driver).action.endswith("; 3 ranks entered their function again")


def test_a_lost_node_is_replaced_by_a_spare_and_the_others_enter_again() -> None:
    driver = two_nodes()
    driver.join("spare")
    driver.lose("b")
    driver.all_parked()
    assert last(driver).rung == "spare"
    assert last(driver).action.endswith("; 2 ranks entered their function again")


def test_all_processes_are_counted_anew_in_the_next_round() -> None:
    driver = two_nodes()
    driver.function_raised(1, BUG, step=5)
    driver.all_parked()
    assert driver.job.membership.stayed == 4
    assert all(one.parked == 0 for one in driver.job.membership.placed.values())
    go_on(driver, 6)
    driver.exit(0, step=6, signal=11)
    driver.all_ready()
    assert driver.job.membership.stayed == 0


# ---- who is to blame -----------------------------------------------------------------------------


def test_a_broken_collective_of_a_survivor_gives_way_to_the_true_culprit() -> None:
    driver = two_nodes()
    told = stops(driver.function_raised(3, WAKE, step=5))
    assert told["a"].look, "what the others were in may explain it"
    driver.after(0.01).function_raised(0, BUG, step=5)
    driver.all_parked()
    assert (last(driver).rank, last(driver).signature) == (0, "ValueError at train.py:120")
    assert last(driver).also == ["rank 3 RuntimeError at train.py:3"]
    assert last(driver).rung == "re-enter the function"


def test_a_broken_collective_of_a_survivor_gives_way_to_a_dead_process() -> None:
    driver = two_nodes()
    driver.function_raised(3, WAKE, step=5)
    driver.after(0.01).exit(0, step=5, signal=11)
    driver.all_parked(a=1)
    assert (last(driver).rank, last(driver).signature) == (0, "killed by SIGSEGV")


def test_a_process_that_is_unfit_to_enter_again_is_not_to_blame_for_what_made_it_leave() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b")
    driver.function_raised(3, WAKE)
    unfit = raised("UnfitProcess", "the device does not answer", "hooks.py:9")
    driver.after(0.01).exit(0, code=1, raised=unfit)
    driver.all_parked(a=1)
    assert (last(driver).rank, last(driver).rung) == (3, "standby")
    assert last(driver).also == ["rank 0 UnfitProcess at hooks.py:9"]


def test_a_process_that_is_unfit_when_it_enters_is_a_fault_of_its_own() -> None:
    driver = two_nodes()
    unfit = raised("UnfitProcess", "the device does not answer", "hooks.py:9")
    assert set(stops(driver.exit(0, step=5, code=1, raised=unfit))) == {"a", "b"}
    driver.all_parked(a=1)
    assert (last(driver).rank, last(driver).rung) == (0, "standby")


def test_an_exception_before_the_first_step_is_the_users_bug() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b")
    driver.function_raised(0, BUG)
    driver.all_parked()
    assert last(driver).rung == "stop"
    assert "before the first step" in last(driver).action


# ---- the same failure again and again ------------------------------------------------------------


def storm(driver: Driver, times: int, at_step: Callable[[int], int]) -> list[StopWorkers]:
    """Rank 1 raises the same each time; what node b is told each time, as long as the job lives."""
    told = []
    for number in range(times):
        told.append(stops(driver.function_raised(1, BUG, step=at_step(number)))["b"])
        driver.all_parked(a=len(told[-1].replace)) if told[-1].leave_s else driver.all_ready()
        if driver.job.world is None:
            break
        go_on(driver, at_step(number + 1))
    return told


def test_a_storm_climbs_from_entering_again_to_one_process_to_all() -> None:
    told = storm(two_nodes(), 2 * REENTER_LIMIT + 2, lambda number: 5 + number)
    kept, one, none = (
        told[:REENTER_LIMIT],
        told[REENTER_LIMIT : 2 * REENTER_LIMIT],
        told[2 * REENTER_LIMIT :],
    )
    assert [(order.leave_s > 0, order.replace) for order in kept] == [(True, ())] * REENTER_LIMIT
    assert [(order.leave_s > 0, order.replace) for order in one] == [(True, (1,))] * REENTER_LIMIT
    assert [(order.leave_s, order.replace) for order in none] == [(0.0, ())] * 2


def test_a_storm_at_one_step_ends_the_job_only_after_fresh_processes_failed_too() -> None:
    driver = two_nodes()
    told = storm(driver, 20, lambda number: 5)
    assert len(told) == 2 * REENTER_LIMIT + SAME_LIMIT
    assert last(driver).rung == "stop"
    assert f"{SAME_LIMIT} times in a row" in last(driver).action
    assert driver.job.state.name == "ending"


def test_another_failure_in_between_ends_a_storm() -> None:
    driver = two_nodes()
    storm(driver, REENTER_LIMIT, lambda number: 5 + number)
    driver.function_raised(2, raised("OSError", "no data", "data.py:3"), step=9)
    driver.all_parked()
    go_on(driver, 10)
    assert stops(driver.function_raised(1, BUG, step=10))["a"].replace == ()


def test_a_rank_that_is_killed_from_outside_costs_no_other_its_process() -> None:
    driver = two_nodes()
    for number in range(3 * REENTER_LIMIT):
        told = stops(driver.exit(1, step=5 + number, signal=9))
        assert all(order.leave_s > 0 and order.replace == () for order in told.values())
        driver.all_parked(a=1)
        go_on(driver, 6 + number)


def test_in_a_storm_the_rank_is_replaced_though_a_survivor_was_heard_of_first() -> None:
    driver = two_nodes()
    storm(driver, REENTER_LIMIT, lambda number: 5 + number)
    told = stops(driver.function_raised(3, WAKE, step=9))
    assert told["a"].replace == (1,)
    driver.after(0.01).function_raised(1, BUG, step=9)
    driver.all_parked(a=1)
    assert (last(driver).rank, last(driver).rung) == (1, "standby")


def test_a_broken_collective_alone_replaces_no_process() -> None:
    driver = two_nodes()
    assert stops(driver.function_raised(3, WAKE, step=5))["b"].replace == ()


def test_a_change_that_is_wanted_does_not_count() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", step=5)
    for number in range(REENTER_LIMIT):
        driver.function_raised(1, BUG, step=5 + number)
        driver.all_parked()
        go_on(driver, 6 + number)
    history = driver.job.recovery.history
    before = (history.storm, history.restarts, history.same)
    driver.join("b")
    told = stops(driver.take(warm(driver, "b")))
    assert told["a"].leave_s > 0
    assert told["a"].replace == ()
    driver.all_parked()
    assert len(driver.world.places) == 2
    assert (history.storm, history.restarts, history.same) == before


def warm(driver: Driver, node: str) -> NodeWarm:
    return NodeWarm(at=driver.at, node=NodeId(node))


# ---- hangs ---------------------------------------------------------------------------------------


def hung(proof: Proof) -> dict[str, StopWorkers]:
    """Rank 2 is proven to hang: what both nodes are told."""
    driver = two_nodes()
    kind: Any = {"stopped": "stopped", "gil": "gil"}.get(proof, "elsewhere")
    stall = Stall(Rank(2), kind, for_s=5.0, still_s=5.0, where="between", place="x.py:1 (f)")
    for _ in range(100):
        driver.after(0.5)
        actions = driver.take(
            RanksStalled(at=driver.at, node=driver.node_of(2), round=driver.round, stalls=(stall,))
        )
        actions += driver.tick()
        found = [a.examination for a in actions if type(a).__name__ == "Diagnose"]  # type: ignore[union-attr]
        for examination in found:
            actions += driver.take(
                VerdictReached(
                    at=driver.at,
                    examination=examination,
                    round=driver.round,
                    guilty=(Rank(2),),
                    sentence="rank 2 does not move",
                    proof=proof,
                    waiting=(Rank(0), Rank(1), Rank(3)),
                )
            )
        if stops(actions):
            return stops(actions)
    raise AssertionError("the hang was never acted upon")


@pytest.mark.parametrize("proof", ["stopped", "gil"])
def test_a_rank_that_cannot_leave_is_replaced_at_once_and_the_others_leave(proof: Proof) -> None:
    told = hung(proof)
    assert {node: order.replace for node, order in told.items()} == {"a": (2,), "b": (2,)}
    assert all(order.leave_s > 0 for order in told.values())


# ---- how long leaving may take -------------------------------------------------------------------


def test_the_limit_for_leaving_is_learnt_from_the_slowest() -> None:
    driver = two_nodes()
    assert stops(driver.function_raised(1, BUG, step=5))["a"].leave_s == LEAVE_UNKNOWN_S
    driver.ready("a", parked=2, slowest_leave_s=0.01)
    driver.ready("b", parked=2, slowest_leave_s=0.02)
    go_on(driver, 6)
    assert stops(driver.exit(1, step=6, signal=11))["a"].leave_s == LEAVE_FLOOR_S
    driver.ready("a", parked=1, slowest_leave_s=None)
    driver.ready("b", parked=2, slowest_leave_s=2.0)
    go_on(driver, 7)
    assert stops(driver.exit(1, step=7, signal=6))["b"].leave_s == STOP_FACTOR * 2.0


def test_a_node_that_takes_too_long_is_told_to_kill_all() -> None:
    driver = two_nodes()
    driver.function_raised(1, BUG, step=5)
    driver.ready("a", parked=2)
    told = stops(driver.after(600).tick())
    assert set(told) == {"b"}
    assert (told["b"].grace_s, told["b"].leave_s) == (0.0, 0.0)


def test_a_node_that_comes_back_is_told_again_to_leave() -> None:
    driver = two_nodes()
    first = stops(driver.function_raised(1, BUG, step=5))["b"]
    driver.cut_off("b")
    assert stops(driver.resume("b", driver.round, busy=True))["b"] == first


# ---- the end: functions return -------------------------------------------------------------------


def test_ranks_are_released_once_the_function_has_returned_on_all_nodes() -> None:
    driver = two_nodes()
    assert driver.functions_returned("a") == []
    actions = driver.functions_returned("b")
    assert sorted(released(actions)) == ["a", "b"]
    assert {action.round for action in actions if isinstance(action, ReleaseRanks)} == {1}


def test_a_node_that_was_away_when_ranks_were_released_is_told_again() -> None:
    driver = two_nodes()
    driver.functions_returned("a")
    driver.functions_returned("b")
    driver.cut_off("a")
    assert released(driver.resume("a", driver.round, busy=True)) == ["a"]


def test_a_node_that_comes_back_with_events_that_were_lost_is_stopped_and_not_released() -> None:
    driver = two_nodes()
    driver.functions_returned("a")
    driver.functions_returned("b")
    driver.cut_off("a")
    told = driver.resume("a", driver.round, busy=True, missing=2)
    assert set(stops(told)) == {"a", "b"}
    assert released(told) == []


def test_a_node_that_comes_back_before_all_have_returned_is_told_nothing() -> None:
    driver = two_nodes()
    driver.functions_returned("a")
    driver.cut_off("a")
    assert released(driver.resume("a", driver.round, busy=True)) == []


def test_a_fault_after_some_have_returned_makes_all_enter_again_and_return_again() -> None:
    driver = two_nodes()
    driver.functions_returned("a")
    driver.exit(3, step=5, signal=9)
    driver.all_parked(b=1)
    go_on(driver, 6)
    assert released(driver.functions_returned("b")) == [], (
        "the other has not returned in this round"
    )
    assert sorted(released(driver.functions_returned("a"))) == ["a", "b"]


def test_the_return_of_an_older_round_counts_for_nothing() -> None:
    driver = two_nodes()
    driver.exit(3, step=5, signal=9)
    driver.all_parked(b=1)
    driver.functions_returned("a", round=1)
    assert released(driver.functions_returned("b")) == []


def test_nobody_is_released_from_a_round_that_is_broken() -> None:
    driver = two_nodes()
    driver.functions_returned("a")
    driver.exit(3, step=5, signal=9)
    assert released(driver.functions_returned("b")) == []
    driver.cut_off("a")
    assert released(driver.resume("a", driver.round, busy=True)) == []


def test_a_round_whose_functions_return_is_not_broken_to_grow() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", step=5)
    driver.functions_returned("a")
    driver.join("b")
    assert stops(driver.take(warm(driver, "b"))) == {}


def test_scripts_that_end_after_their_release_end_the_job() -> None:
    driver = two_nodes()
    driver.functions_returned("a")
    driver.functions_returned("b")
    for rank in range(4):
        driver.exit(rank, step=5, code=0)
    assert driver.job.result is not None
    assert driver.job.result.reason == "finished"


# ---- word that is late ---------------------------------------------------------------------------


def gathering() -> Driver:
    driver = two_nodes()
    driver.lose("b")
    driver.ready("a", parked=2)
    assert driver.job.state.name == "gathering"
    return driver


def test_an_exception_of_an_older_round_is_refused() -> None:
    driver = two_nodes()
    driver.exit(3, step=5, signal=9)
    driver.all_parked(b=1)
    before = encoded(driver.job)
    assert driver.function_raised(1, BUG, step=5, round=1) == []
    assert encoded(driver.job) == before


def test_an_exception_that_is_heard_of_after_its_round_was_judged_changes_nothing() -> None:
    driver = gathering()
    count = len(driver.job.incidents)
    assert driver.function_raised(0, BUG, node="a") == []
    assert (driver.job.state.name, len(driver.job.incidents)) == ("gathering", count)


def test_an_exception_while_the_job_ends_is_refused() -> None:
    driver = two_nodes()
    driver.leaving("a")
    assert driver.job.state.name == "ending"
    before = encoded(driver.job)
    assert driver.function_raised(1, BUG, step=5, node="a") == []
    assert encoded(driver.job) == before


def test_an_exception_in_a_rank_of_another_node_is_refused() -> None:
    driver = two_nodes()
    assert driver.function_raised(3, BUG, step=5, node="a") == []
    assert driver.job.state.name == "running"


# ---- the coordinator dies ------------------------------------------------------------------------


def raised_once(driver: Driver) -> None:
    driver.function_raised(1, BUG, step=5)


def half_parked(driver: Driver) -> None:
    raised_once(driver)
    driver.ready("a", parked=2, slowest_leave_s=0.3)


def entered_again(driver: Driver) -> None:
    raised_once(driver)
    driver.all_parked()
    driver.start(0, again=True)


def in_a_storm(driver: Driver) -> None:
    storm(driver, REENTER_LIMIT + 1, lambda number: 5 + number)


def half_returned(driver: Driver) -> None:
    driver.functions_returned("b")


def all_returned(driver: Driver) -> None:
    driver.functions_returned("b")
    driver.functions_returned("a")


def blamed_twice(driver: Driver) -> None:
    driver.function_raised(3, WAKE, step=5)
    driver.after(0.01).function_raised(0, BUG, step=5)


MOMENTS = [
    raised_once,
    half_parked,
    entered_again,
    in_a_storm,
    half_returned,
    all_returned,
    blamed_twice,
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_journal_leads_back_to_the_same_state(moment: Callable[[Driver], None]) -> None:
    driver = two_nodes()
    moment(driver)
    state = encoded(driver.job)
    assert encoded(revived(driver.job)) == state
    for revive_at in range(len(driver.history)):
        assert encoded(replayed(driver.history, revive_at)) == state


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_coordinator_that_dies_goes_on_where_it_was(moment: Callable[[Driver], None]) -> None:
    """All nodes come back, and are told what they were told before."""
    driver = two_nodes()
    moment(driver)
    orders = {"a": repeated(driver, "a"), "b": repeated(driver, "b")}
    driver.job = revived(driver.job)
    driver.take(CoordinatorRestarted(at=driver.at))
    busy = driver.job.world is not None or len(driver.job.membership.busy) == 2
    for node, before in orders.items():
        told = driver.resume(node, driver.round, busy=busy)
        assert [a for a in told if isinstance(a, StopWorkers | ReleaseRanks)] == before
    if driver.job.world is None:
        assert starts(driver.all_parked()) == ["a", "b"]


def repeated(driver: Driver, node: str) -> list[AnyAction]:
    """What a node is told again that comes back now."""
    twin = Driver(min_nodes=2, max_nodes=2)
    twin.job, twin.now = revived(driver.job), driver.now
    twin.cut_off(node)
    told = twin.resume(node, twin.round, busy=True)
    return [action for action in told if isinstance(action, StopWorkers | ReleaseRanks)]


def test_ranks_are_released_though_the_coordinator_died_before_it_said_so() -> None:
    driver = two_nodes()
    all_returned(driver)
    driver.job = revived(driver.job)
    driver.take(CoordinatorRestarted(at=driver.at))
    assert released(driver.resume("a", driver.round, busy=True)) == ["a"]
    assert released(driver.resume("b", driver.round, busy=True)) == ["b"]
