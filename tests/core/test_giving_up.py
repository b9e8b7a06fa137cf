"""When a node is given up, and what waits until its workers are certainly gone.

The core has no timer for that: the coordinator says when a lease is over (`core.leases`).
"""

from __future__ import annotations

import pytest
from driver import Driver, kinds
from lab import sent_away, started

from holdfast.core import job as jobs
from holdfast.core.patience import STOP_UNKNOWN_S
from holdfast.messages.actions import AnyAction, Finish, StopWorkers
from holdfast.messages.events import (
    CoordinatorRestarted,
    EventLost,
    ExcludeAsked,
    SilenceRaised,
)
from holdfast.messages.units import NodeId, Rank


def stopped(actions: list[AnyAction]) -> dict[str, float]:
    """Who is told to stop, and with which grace."""
    return {stop.node: stop.grace_s for stop in actions if isinstance(stop, StopWorkers)}


def hurried(driver: Driver) -> dict[str, float]:
    """Who is told to stop when patience is over."""
    return stopped(driver.after(STOP_UNKNOWN_S).tick())


def excluding_b() -> Driver:
    """Two nodes on two hosts, of which the second is told to go."""
    driver = Driver(min_nodes=1, max_nodes=2)
    driver.join("a", host="good")
    driver.join("b", host="bad")
    driver.start_all()
    about = {"node": NodeId("b"), "round": driver.round, "rank": Rank(2), "reason": "ECC"}
    driver.take(ExcludeAsked(at=driver.at, **about))
    return driver


# ---- a node without a stream ----


def test_a_node_without_a_stream_is_absent_and_not_lost() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    assert driver.cut_off("b") == []
    assert driver.after(3600).tick() == []
    assert driver.job.state.name == "running"
    assert stopped(driver.end_lease("b")) == {"a": pytest.approx(STOP_UNKNOWN_S)}
    (incident,) = driver.job.incidents
    assert (incident.kind, incident.node) == ("node", "b")
    assert "not heard of for 4.0 s" in incident.signature
    assert incident.fault_at == driver.now - 3600, "when its stream ended"


def test_a_node_that_is_not_a_member_cannot_lose_its_lease() -> None:
    driver = Driver().running("a", step=3)
    assert driver.end_lease("stranger") == []
    assert driver.job.refused == {"LeaseEnded: the node is not a member": 1}


def test_a_node_without_a_stream_gets_no_place_and_the_round_waits_for_it() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    driver.exit(0, step=3, signal=9)
    driver.ready("b")
    driver.cut_off("b")
    assert driver.ready("a") == [], "b may be back in a moment"
    assert driver.job.state.name == "gathering"
    assert started(driver.resume("b", 1)) == ["a", "b"]


def test_when_it_is_given_up_the_round_begins_without_it() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    driver.exit(0, step=3, signal=9)
    driver.ready("b")
    driver.cut_off("b")
    assert driver.ready("a") == []
    assert started(driver.end_lease("b")) == ["a"]


def test_a_round_that_is_complete_without_it_does_not_wait() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.join("spare")
    driver.exit(0, step=3, signal=9)
    driver.ready("b")
    driver.cut_off("b")
    assert started(driver.ready("a")) == ["a", "spare"]
    assert list(driver.job.membership.waiting) == ["b"]


def test_a_node_that_says_that_it_has_workers_is_never_taken_for_one_without() -> None:
    """Whatever round it names: the next world begins when it has said that they are gone."""
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    driver.cut_off("a")
    driver.exit(1, step=3, signal=9)
    assert driver.ready("b") == []
    assert started(driver.resume("a", 0, busy=True)) == []
    assert started(driver.ready("a")) == ["a", "b"]


def test_nobody_joins_a_first_round_without_a_stream() -> None:
    driver = Driver(min_nodes=2, max_nodes=2)
    driver.join("a")
    driver.cut_off("a")
    assert driver.join("b") == []
    assert started(driver.resume("a", 0)) == ["a", "b"]


def test_after_a_restart_no_round_begins_before_the_nodes_are_heard_of() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    driver.exit(0, step=3, signal=9)
    driver.ready("a")
    driver.take(CoordinatorRestarted(at=driver.at))
    assert hurried(driver) == {"b": 0.0}
    assert driver.job.world is None
    assert driver.resume("a", 1) == []
    assert started(driver.end_lease("b")) == ["a"]


# ---- whose workers may still run ----


def test_the_workers_of_a_node_that_leaves_hold_up_the_next_round() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    driver.join("spare")
    assert sent_away(driver.leaving("b")) == {"b": 75}
    assert driver.ready("a") == []
    assert started(driver.left("b")) == ["a", "spare"]


def test_so_do_those_of_an_excluded_node() -> None:
    driver = excluding_b()
    assert driver.ready("a") == []
    assert started(driver.end_lease("b")) == ["a"], "its agent died before it had gone"


def test_when_patience_is_over_a_node_that_leaves_is_told_to_kill_its_workers() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    driver.leaving("b")
    driver.ready("a")
    assert hurried(driver) == {"b": 0.0}
    assert started(driver.killed("b")) == ["a"]
    assert driver.left("b") == []


def test_killed_workers_let_spares_go_on_and_the_node_waits_for_the_next_round() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.join("spare")
    driver.exit(0, step=3, signal=9)
    driver.ready("a")
    assert driver.killed("b") == [], "there is time, and it has a seat"
    assert hurried(driver) == {"b": 0.0}
    assert driver.job.world is not None
    assert [place.node for place in driver.world.places] == ["a", "spare"]
    assert driver.ready("b", round=1) == []
    assert list(driver.job.membership.waiting) == ["b"]


def test_without_spares_a_node_whose_workers_were_killed_is_waited_for() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.exit(0, step=3, signal=9)
    driver.ready("a")
    assert hurried(driver) == {"b": 0.0}
    assert driver.killed("b") == []
    assert started(driver.ready("b")) == ["a", "b"]


def test_nobody_is_hurried_before_the_grace_that_the_user_gave_is_over() -> None:
    driver = Driver(grace_s=120.0).running("a", step=3)
    driver.exit(0, step=3, signal=9)
    assert jobs.deadline(driver.job) == driver.now + 120
    assert hurried(driver) == {}
    assert stopped(driver.after(120).tick()) == {"a": 0.0}


def test_killed_workers_of_another_round_prove_nothing() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    driver.leaving("b")
    driver.ready("a")
    hurried(driver)
    assert driver.killed("b", round=0) == []
    assert driver.killed("a") == []
    assert driver.job.world is None
    assert driver.job.refused == {"WorkersKilled: the node was not asked to stop that round": 2}


def test_a_node_that_missed_the_order_to_kill_gets_it_when_it_is_back() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.exit(0, step=3, signal=9)
    driver.cut_off("b")
    hurried(driver)
    assert stopped(driver.resume("b", 1, busy=True)) == {"b": 0.0}


def test_an_absent_node_whose_workers_may_run_holds_up_spares_until_its_lease_is_over() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.join("spare")
    driver.exit(0, step=3, signal=9)
    driver.ready("a")
    driver.cut_off("b")
    hurried(driver)
    assert driver.job.world is None
    assert jobs.deadline(driver.job) is None
    assert started(driver.end_lease("b")) == ["a", "spare"]


# ---- an agent that takes another's place ----


def test_a_node_whose_agent_was_replaced_is_lost_at_once() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    assert list(stopped(driver.join("b2", replaces="b"))) == ["a"]
    assert driver.job.incidents[-1].signature == "lost: its agent died"
    assert started(driver.ready("a")) == ["a", "b2"]


def test_one_that_was_told_to_go_is_gone_as_well() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    driver.leaving("b")
    driver.ready("a")
    assert started(driver.join("b2", replaces="b")) == ["a", "b2"]


def test_one_of_an_excluded_host_is_gone_although_its_follower_is_not_let_in() -> None:
    driver = excluding_b()
    driver.ready("a")
    actions = driver.join("b2", host="bad", replaces="b")
    assert list(sent_away(actions)) == ["b2"]
    assert started(actions) == ["a"]


def test_one_that_dies_while_the_job_ends_does_not_hold_up_its_close() -> None:
    driver = Driver().running("a", step=3)
    driver.leaving("a")
    assert kinds(driver.join("a2", replaces="a")) == ["Finish", "CloseJob"]


# ---- what the journal lost ----


def test_a_node_whose_events_the_journal_lost_breaks_the_round() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    driver.take(CoordinatorRestarted(at=driver.at))
    assert list(stopped(driver.resume("b", 1, busy=True, missing=2))) == ["a", "b"]
    assert "2 events that the journal lost" in driver.job.incidents[-1].signature
    driver.resume("a", 1, busy=True)
    driver.ready("a")
    assert started(driver.ready("b")) == ["a", "b"]
    assert driver.round == 2


def test_a_node_that_lost_events_of_an_older_round_breaks_nothing() -> None:
    driver = Driver(min_nodes=1, max_nodes=1).running("a", step=3)
    driver.join("spare")
    driver.resume("spare", 0, missing=2)
    assert driver.job.state.name == "running"


def test_events_that_the_journal_lost_break_the_round_after_a_restart() -> None:
    driver = Driver(min_nodes=2, max_nodes=2, max_restarts=0).running("a", "b", step=3)
    stops = driver.take(CoordinatorRestarted(at=driver.at, lost=3))
    assert list(stopped(stops)) == ["a", "b"]
    (incident,) = driver.job.incidents
    assert incident.kind == "resize", "no fault of the script's"
    assert "the journal lost 3 events" in incident.signature
    for node in "ab":
        assert list(stopped(driver.resume(node, 1, busy=True))) == [node], "nobody heard the first"
    driver.ready("a")
    assert started(driver.ready("b")) == ["a", "b"]


def test_without_a_round_in_force_there_is_nothing_to_break() -> None:
    driver = Driver(min_nodes=2, max_nodes=2)
    driver.join("a")
    assert driver.take(CoordinatorRestarted(at=driver.at, lost=3)) == []
    assert driver.job.incidents == []


def test_an_event_that_the_journal_lost_is_an_internal_incident() -> None:
    driver = Driver().running("a", step=3)
    assert driver.take(EventLost(at=driver.at, error="event 7 is missing")) == []
    (incident,) = driver.job.incidents
    assert incident.kind == "internal"
    assert incident.signature == "the journal lost an event: event 7 is missing"
    assert driver.job.state.name == "running"


# ---- how long a node may be silent ----


def test_the_silence_of_a_node_is_never_shortened() -> None:
    driver = Driver().running("a", step=3)
    least_s = driver.job.membership.silence_s
    for silence_s, found_s in ((16.0, 16.0), (8.0, 16.0), (least_s, 16.0), (32.0, 32.0)):
        assert driver.take(SilenceRaised(at=driver.at, silence_s=silence_s)) == []
        assert driver.job.membership.silence_s == found_s


def test_a_node_that_was_given_up_is_fenced_and_joins_as_another() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=3)
    driver.lose("b")
    (finish,) = driver.resume("b", 1, busy=True)
    assert isinstance(finish, Finish)
    assert finish.rejoin


def test_a_spare_that_claims_a_round_that_was_never_issued_is_fenced_and_the_round_goes_on() -> (
    None
):
    driver = Driver(min_nodes=1, max_nodes=1).running("a", step=3)
    driver.join("spare")
    (fence,) = [one for one in driver.resume("spare", 9, busy=True) if isinstance(one, Finish)]
    assert (fence.node, fence.rejoin) == ("spare", True)
    assert driver.job.state.name == "running"
    assert driver.job.membership.round == 1
