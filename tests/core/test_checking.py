"""Nodes test each other before they get a place."""

from __future__ import annotations

import pytest
from driver import Driver, encoded, kinds, replayed, revived
from lab import TOOK_S, Lab, ordered, sent_away, started

from holdfast.core import job as jobs
from holdfast.core import report
from holdfast.core.nodecheck import schedule as checking
from holdfast.core.nodecheck.schedule import Checking
from holdfast.messages.actions import Finish
from holdfast.messages.events import CoordinatorRestarted, NodeWarm
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_TRY_AGAIN
from holdfast.messages.units import NodeId


def lab(low: int = 4, high: int = 4, **terms: object) -> Lab:
    return Lab(min_nodes=low, max_nodes=high, **terms)


def unfit(driver: Driver) -> dict[str, str]:
    return {i.node: i.signature for i in driver.job.incidents if i.kind == "unfit"}


# ---- when there is a check ----


def test_without_being_asked_for_there_is_no_check() -> None:
    driver = lab(2, 2, node_check=False)
    driver.join("a")
    assert started(driver.join("b")) == ["a", "b"]


def test_nodes_are_paired_and_told_where_to_meet() -> None:
    driver = lab().gather("a", "b", "c", "d")
    assert driver.pairs() == [("a", "b"), ("c", "d")]
    assert driver.job.world is None
    first, second = driver.orders["a"], driver.orders["b"]
    assert (first.rank, second.rank, first.size, second.size) == (0, 1, 2, 2)
    assert (second.address, second.port) == ("10.0.0.1", 7000)


def test_when_all_pass_one_round_of_tests_is_all_there_is() -> None:
    driver = lab().gather("a", "b", "c", "d")
    assert started(driver.answer_round()) == ["a", "b", "c", "d"]
    assert driver.job.incidents == []
    assert {node: len(told) for node, told in driver.told.items()} == dict.fromkeys("abcd", 1)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_healthy_nodes_gets_its_places(count: int) -> None:
    names = [f"n{i}" for i in range(count)]
    driver = lab(count, count).gather(*names)
    assert started(driver.answer_all()) == names
    assert driver.job.incidents == []


def test_a_check_begins_only_when_the_round_could_be_frozen() -> None:
    driver = lab(2, 4)
    driver.join("a")
    driver.join("b")
    assert driver.orders == {}, "the grace for newcomers was not waited for"
    driver.after(60).tick()
    assert driver.pairs() == [("a", "b")]


def test_while_a_check_runs_the_job_asks_only_to_be_woken_for_that() -> None:
    driver = lab(2, 4)
    driver.join("a")
    driver.after(5)
    driver.join("b")
    driver.after(60).tick()
    deadline = jobs.deadline(driver.job)
    assert deadline is not None
    assert deadline > driver.now


def test_after_a_fault_nodes_are_checked_again() -> None:
    driver = lab(2, 2).gather("a", "b")
    driver.answer_all()
    driver.after(1).start_all()
    driver.after(1).step_all(10)
    driver.exit(0, step=10, signal=9)
    assert kinds(driver.all_ready()) == ["TestNode", "TestNode"]
    assert started(driver.answer_all()) == ["a", "b"]
    assert driver.round == 2


def test_a_change_that_was_wanted_is_no_reason_to_check_again() -> None:
    driver = lab(1, 3).gather("a", "b", "c")
    driver.answer_all()
    driver.start_all()
    driver.after(1).step_all(10)
    driver.leaving("c")
    assert started(driver.all_ready()) == ["a", "b"]


def test_a_newcomer_is_checked_before_it_gets_a_place() -> None:
    driver = lab(1, 2).gather("a")
    driver.answer_all()
    driver.start_all()
    driver.after(1).step_all(3)
    driver.join("b")
    assert kinds(driver.all_ready()) == ["TestNode", "TestNode"]
    assert started(driver.answer_all(dead=["b"])) == ["a"]
    assert "failed its solo test" in driver.job.membership.excluded["host-b"]


# ---- faulty nodes ----


def test_a_node_that_fails_alone_is_sent_away_and_its_host_remembered() -> None:
    driver = lab(2, 4).gather("a", "b", "c", "d")
    actions = driver.answer_all(dead=["b"])
    assert sent_away(actions) == {"b": EXIT_DO_NOT_REQUEUE}
    assert started(actions) == ["a", "c", "d"]
    assert unfit(driver) == {"b": "is unfit: failed its solo test: no GPU"}
    (finish,) = driver.join("b2", host="host-b")
    assert isinstance(finish, Finish)
    assert finish.code == EXIT_DO_NOT_REQUEUE
    assert "no GPU" in finish.reason


def test_a_node_that_fails_with_everybody_is_found_in_three_rounds() -> None:
    for faulty in "abcd":
        driver = lab(2, 4).gather("a", "b", "c", "d")
        actions = driver.answer_all(broken=[faulty])
        assert sent_away(actions) == {faulty: EXIT_DO_NOT_REQUEUE}
        assert sorted(started(actions)) == sorted({*"abcd"} - {faulty})
        assert len(driver.told[faulty]) <= 3
        assert "passed with others" in unfit(driver)[faulty]


def test_a_spare_takes_the_place_of_a_node_that_failed() -> None:
    driver = lab(2, 2)
    driver.running("a", "b", step=0)
    driver.answer_all()
    driver.start_all()
    driver.after(1).step_all(5)
    driver.join("spare")
    driver.exit(0, step=5, signal=9)
    driver.all_ready()
    actions = driver.answer_all(dead=["a"])
    assert started(actions) == ["spare", "b"], "the spare sits where the faulty node sat"
    assert sent_away(actions) == {"a": EXIT_DO_NOT_REQUEUE}


def test_two_nodes_that_fail_only_with_each_other_are_both_kept_and_noted() -> None:
    driver = lab(2, 2).gather("a", "b")
    assert started(driver.answer_all(broken=["b"])) == ["a", "b"]
    assert all("undetermined" in told for told in unfit(driver).values())
    assert set(unfit(driver)) == {"a", "b"}
    assert driver.job.membership.excluded == {}


def test_of_two_nodes_one_that_fails_alone_is_sent_away_and_the_other_is_healthy() -> None:
    driver = lab(1, 2).gather("a", "b")
    actions = driver.answer_all(dead=["a"])
    assert started(actions) == ["b"]
    assert set(unfit(driver)) == {"a"}


def test_too_few_healthy_nodes_wait_for_others_and_say_why_when_none_come() -> None:
    driver = lab(2, 2, join_limit_s=30.0).gather("a", "b")
    actions = driver.answer_all(dead=["b"])
    assert sent_away(actions) == {"b": EXIT_DO_NOT_REQUEUE}
    assert driver.job.state.name == "gathering"
    assert jobs.deadline(driver.job) == driver.now + 30
    (finish,) = driver.after(30).tick()
    assert isinstance(finish, Finish)
    assert finish.code == EXIT_TRY_AGAIN
    assert "1 of at least 2 nodes" in finish.reason
    assert "host host-b is excluded (failed its solo test: no GPU)" in finish.reason


def test_a_replacement_for_a_faulty_node_is_checked_and_the_job_begins() -> None:
    driver = lab(2, 2).gather("a", "b")
    driver.answer_all(dead=["b"])
    assert kinds(driver.join("c")) == ["TestNode", "TestNode"]
    assert started(driver.answer_all()) == ["a", "c"]


def test_when_no_node_is_fit_the_job_ends_at_once_and_says_why() -> None:
    driver = lab(1, 2).gather("a", "b")
    actions = driver.answer_all(dead=["a", "b"])
    assert sent_away(actions) == dict.fromkeys("ab", EXIT_DO_NOT_REQUEUE)
    assert driver.job.result is not None
    assert (
        "no node is fit to train: node a failed its solo test: no GPU" in driver.job.result.reason
    )
    driver.left("a")
    assert kinds(driver.left("b")) == ["CloseJob"]


def slow_pairs(driver: Lab, slow: str) -> list[str]:
    """Answer everything; whoever is tested with the slow one takes long."""
    places: list[str] = []
    for _ in range(10):
        if not driver.orders:
            break
        groups = {o.group: [] for o in driver.orders.values()}
        for order in driver.orders.values():
            groups[order.group].append(order.node)
        driver.after(TOOK_S)
        for node, order in list(driver.orders.items()):
            took_s = 1.0 if slow in groups[order.group] else 0.01
            how = {"seconds": took_s} if order.size > 1 else {}
            places += started(driver.answer(node, **how))
    return places


def test_a_slow_node_is_noted_and_stays() -> None:
    driver = lab().gather("a", "b", "c", "d")
    assert slow_pairs(driver, "c") == ["a", "b", "c", "d"]
    assert list(unfit(driver)) == ["c"]
    assert "slow" in unfit(driver)["c"]


def test_a_slow_node_goes_if_stragglers_are_unwanted_and_enough_are_left() -> None:
    driver = lab(3, 4, exclude_stragglers=True).gather("a", "b", "c", "d")
    assert slow_pairs(driver, "c") == ["a", "b", "d"]
    assert "host-c" in driver.job.membership.excluded
    driver = lab(4, 4, exclude_stragglers=True).gather("a", "b", "c", "d")
    assert slow_pairs(driver, "c") == ["a", "b", "c", "d"]
    assert driver.job.membership.excluded == {}


# ---- whoever waits in vain is told so ----


def test_the_partner_of_a_node_that_failed_alone_need_not_wait_for_it() -> None:
    driver = lab(1, 2).gather("a", "b")
    actions = driver.answer("a", solo_passed=False, passed=None, detail="no GPU")
    assert ordered(actions) == [("b", 1)]
    order = driver.orders["b"]
    assert (order.check, order.round, order.group) == (1, 1, 0), "not the same order again"
    assert started(driver.after(TOOK_S).answer("b")) == ["b"]


def test_who_was_told_to_do_without_the_other_is_not_told_twice() -> None:
    driver = lab(1, 2).gather("a", "b")
    driver.answer("a", passed=False)
    assert len(driver.told["b"]) == 2
    assert driver.tick() == []


def test_a_partner_that_passed_is_no_reason_to_do_without_it() -> None:
    driver = lab(2, 2).gather("a", "b")
    assert driver.answer("a") == []
    assert started(driver.answer("b")) == ["a", "b"]


def test_a_node_lost_in_the_middle_of_a_check_proves_nothing_about_its_partner() -> None:
    driver = lab(2, 4).gather("a", "b", "c", "d")
    driver.answer("c")
    driver.answer("d")
    actions = driver.lose("a")
    assert ordered(actions) == [("b", 1)]
    driver.answer("b")
    assert driver.pairs() == [("b", "c")], "the one that was left over has its turn"
    assert started(driver.answer_all()) == ["b", "c", "d"]
    assert driver.job.incidents == []


def test_a_lost_node_that_was_the_last_to_be_waited_for_ends_the_round_of_tests() -> None:
    driver = lab(1, 2).gather("a", "b")
    driver.after(TOOK_S).answer("a", solo_passed=True, passed=False)
    actions = driver.lose("b")
    assert started(actions) == ["a"]


def test_a_node_told_to_leave_in_the_middle_of_a_check_holds_up_nobody() -> None:
    driver = lab(1, 2).gather("a", "b")
    actions = driver.after(TOOK_S).leaving("b")
    assert ordered(actions) == [("a", 1)]
    assert started(driver.answer("a")) == ["a"]
    assert driver.left("b") == []


def test_all_nodes_lost_in_a_check_leave_a_job_that_waits() -> None:
    driver = lab(2, 2).gather("a", "b")
    driver.lose("a")
    driver.lose("b")
    assert driver.job.state.name == "gathering"
    assert started(driver.gather("c", "d").answer_all()) == ["c", "d"]


# ---- time ----


def test_tests_that_take_too_long_are_ended_with_what_is_known() -> None:
    driver = lab(2, 2).gather("a", "b")
    assert jobs.deadline(driver.job) == driver.now + checking.UNKNOWN_S
    assert ordered(driver.after(checking.UNKNOWN_S).tick()) == [("a", 1), ("b", 1)]
    driver.answer("a")
    assert started(driver.answer("b")) == ["a", "b"]
    assert "failed with b" in unfit(driver)["a"]


def test_a_node_that_never_answers_is_not_waited_for() -> None:
    driver = lab(1, 2).gather("a", "b")
    driver.after(checking.UNKNOWN_S).tick()
    driver.answer("a")
    assert started(driver.after(checking.ANSWER_S).tick()) == ["a", "b"]
    assert "undetermined" in unfit(driver)["b"]


def test_a_pair_that_hangs_is_given_up_soon_when_other_pairs_have_passed() -> None:
    driver = lab(2, 4).gather("a", "b", "c", "d")
    began = driver.now
    driver.after(0.1).answer("a")
    driver.answer("b")
    deadline = jobs.deadline(driver.job)
    assert deadline == pytest.approx(began + checking.FLOOR_S)
    assert deadline is not None
    driver.now = deadline
    assert ordered(driver.tick()) == [("c", 1), ("d", 1)]
    driver.answer("c")
    driver.answer("d")
    assert len(driver.pairs()) == 2, "they were not tested with those who passed"
    assert started(driver.answer_all()) == ["a", "b", "c", "d"]
    assert driver.job.incidents == [], "a link that failed is nobody's fault"


def test_a_node_that_is_not_warm_gets_its_time_whatever_others_take() -> None:
    driver = lab(2, 2).gather("a", "b")
    driver.answer_all()
    driver.start_all()
    driver.after(1).step_all(5)
    Driver.join(driver, "c", host="host-c")
    driver.lose("b")
    driver.all_ready()
    assert driver.pairs() == [("c", "a")]
    assert jobs.deadline(driver.job) == driver.now + checking.UNKNOWN_S


def test_the_time_to_import_torch_is_no_part_of_a_tests_time() -> None:
    driver = lab(2, 4)
    for node in "abcd":
        Driver.join(driver, node, host=f"host-{node}")
    for node in "abcd":
        driver.after(10).take(NodeWarm(at=driver.at, node=NodeId(node)))
    assert jobs.deadline(driver.job) == driver.now + checking.UNKNOWN_S
    driver.take(NodeWarm(at=driver.after(0.2).at, node=NodeId("a")))
    driver.answer("a")
    driver.answer("b")
    assert driver.job.of(Checking).longest_s == pytest.approx(0.2)
    assert jobs.deadline(driver.job) == pytest.approx(driver.now - 0.2 + checking.FLOOR_S)


def test_how_long_a_test_may_take_is_learnt_from_those_that_passed() -> None:
    driver = lab(2, 2).gather("a", "b")
    driver.after(2.0).answer("a")
    driver.answer("b")
    driver.start_all()
    driver.after(1).step_all(5)
    driver.exit(0, step=5, signal=9)
    driver.all_ready()
    assert driver.orders["a"].limit_s == checking.FACTOR * 2.0
    driver.after(1).answer("a", passed=False)
    driver.after(15).answer("b", passed=False)
    assert driver.job.of(Checking).longest_s == 2.0, "learnt from a test that failed"


# ---- what comes late, or again ----


def test_an_answer_to_an_older_check_or_round_changes_nothing() -> None:
    driver = lab(2, 2).gather("a", "b")
    old = driver.orders["a"]
    driver.answer_all()
    driver.start_all()
    driver.after(1).step_all(5)
    driver.exit(0, step=5, signal=9)
    driver.all_ready()
    before = encoded(driver.job)
    assert driver.take(driver.tested(old, passed=False)) == []
    new = driver.orders["a"]
    assert driver.take(driver.tested(new, round=new.round + 1)) == []
    assert driver.take(driver.tested(new, check=new.check + 1)) == []
    assert driver.take(driver.tested(new, group=new.group + 1)) == []
    assert encoded(driver.job) == before


def test_a_node_cannot_answer_for_another_nor_twice() -> None:
    driver = lab().gather("a", "b", "c", "d")
    order = driver.orders["a"]
    driver.answer("a")
    before = encoded(driver.job)
    assert driver.take(driver.tested(order, passed=False)) == []
    assert driver.take(driver.tested(order, node=NodeId("b"))) == []
    assert encoded(driver.job) == before


def test_an_answer_after_the_round_was_frozen_changes_nothing() -> None:
    driver = lab(2, 2).gather("a", "b")
    order = driver.orders["b"]
    driver.after(checking.UNKNOWN_S).tick()
    driver.after(checking.ANSWER_S).tick()
    assert driver.job.state.name == "running"
    before = encoded(driver.job)
    assert driver.take(driver.tested(order)) == []
    assert encoded(driver.job) == before


def test_a_node_that_joins_while_a_check_runs_is_checked_if_it_is_needed() -> None:
    driver = lab(2, 3).gather("a", "b")
    assert driver.join("c") == []
    driver.answer_round()
    assert driver.job.world is None
    driver.after(60).tick()
    assert len(driver.orders) == 3
    assert started(driver.answer_all()) == ["a", "b", "c"]


def test_the_others_do_not_wait_for_a_newcomer_they_do_not_need() -> None:
    driver = lab(2, 2).gather("a", "b")
    driver.join("c", node_rank=0)
    actions = driver.answer_round()
    assert started(actions) == ["a", "b"], "a node has a place that was not checked"
    assert kinds(actions)[-1] == "Prepare"


def test_a_node_that_comes_and_goes_does_not_keep_the_others_from_training() -> None:
    driver = lab(2, 3).gather("a", "b")
    driver.answer_all()
    driver.start_all()
    driver.after(1).step_all(5)
    driver.exit(0, step=5, signal=9)
    driver.all_ready()
    for i in range(10):
        if driver.job.world is not None:
            break
        driver.join(f"flapper-{i}")
        driver.answer_round()
        if f"flapper-{i}" in driver.job.membership.waiting:
            driver.orders.pop(f"flapper-{i}", None)
            driver.lose(f"flapper-{i}")
            driver.answer_round()
    assert driver.job.state.name == "running"
    assert driver.round == 2


# ---- broken streams and a coordinator that dies ----


def test_a_node_back_on_a_new_stream_is_told_its_test_again() -> None:
    driver = lab(2, 2).gather("a", "b")
    order = driver.orders["a"]
    driver.cut_off("a")
    assert driver.after(0.1).resume("a", 0) == [order]
    driver.answer("a")
    assert driver.resume("a", 0) == [], "it has answered"


def test_a_node_that_missed_that_its_partner_failed_is_told_to_do_without_it() -> None:
    driver = lab(1, 2).gather("a", "b")
    driver.cut_off("b")
    driver.answer("a", passed=False)
    assert ordered(driver.after(0.1).resume("b", 0)) == [("b", 1)]


def test_a_node_that_is_back_when_its_partner_has_passed_and_left_does_without_it() -> None:
    driver = lab(1, 2).gather("a", "b")
    driver.cut_off("b")
    driver.answer("a")
    driver.left("a")
    assert ordered(driver.after(0.1).resume("b", 0)) == [("b", 1)]
    driver.answer("b")
    assert started(driver.after(60).tick()) == ["b"]


def test_a_coordinator_that_dies_in_the_middle_of_a_check_goes_on_with_it() -> None:
    driver = lab().gather("a", "b", "c", "d")
    driver.answer("a")
    driver.job = revived(driver.job)
    driver.take(CoordinatorRestarted(at=driver.after(100).at))
    assert driver.tick() == [], "a test timed out while the coordinator was away"
    for node, owed in {"a": [], "b": [("b", 2)], "c": [("c", 2)], "d": [("d", 2)]}.items():
        assert ordered(driver.after(0.5).resume(node, 0)) == owed
    assert started(driver.answer_all()) == ["a", "b", "c", "d"]
    assert driver.job.incidents == []


def test_nodes_that_do_not_come_back_after_a_restart_are_lost_to_the_check() -> None:
    driver = lab(2, 4).gather("a", "b", "c", "d")
    driver.job = revived(driver.job)
    driver.take(CoordinatorRestarted(at=driver.at))
    for node in "abc":
        driver.resume(node, 0)
    del driver.orders["d"]
    driver.after(10).end_lease("d")
    assert started(driver.answer_all()) == ["a", "b", "c"]
    assert driver.job.incidents == []


def test_the_same_answers_lead_to_the_same_job() -> None:
    driver = lab(2, 4).gather("a", "b", "c", "d")
    driver.answer_all(broken=["c"])
    for cut in range(len(driver.history)):
        assert encoded(replayed(driver.history, revive_at=cut)) == encoded(driver.job)


# ---- the end ----


def test_a_job_that_ends_in_the_middle_of_a_check_asks_for_nothing_more() -> None:
    driver = lab(2, 2).gather("a", "b")
    driver.leaving("a")
    assert driver.job.result is not None
    assert jobs.deadline(driver.job) is None
    driver.left("a")
    assert kinds(driver.left("b")) == ["CloseJob"]


def test_status_says_which_hosts_are_excluded_and_why() -> None:
    driver = lab(1, 2).gather("a", "b")
    driver.answer_all(dead=["b"])
    told = report.status(driver.job, driver.at, alive=True)
    assert told.excluded == {"host-b": "failed its solo test: no GPU"}


def test_a_waiting_node_gets_warm_in_the_middle_of_a_check() -> None:
    driver = lab(2, 2).gather("a", "b")
    assert driver.take(NodeWarm(at=driver.at, node=NodeId("a"))) == []
