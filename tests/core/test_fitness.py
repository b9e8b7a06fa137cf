"""What a node's own checks found, and what comes of it."""

from __future__ import annotations

import msgspec
from driver import Driver, encoded, kinds
from lab import Lab, ordered, sent_away, started

from holdfast.core.nodecheck.schedule import Checking
from holdfast.messages.actions import AnyAction, Finish
from holdfast.messages.events import HealthFound
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.health import HealthResult, Verdict
from holdfast.messages.units import NodeId

ECC = HealthResult("gpu-ecc", "fail", "GPU 3 has uncorrectable errors", 0.1)


def found(
    driver: Driver, node: str, *results: HealthResult, verdict: Verdict | None = None
) -> list[AnyAction]:
    told = results or (ECC,)
    if verdict is not None:
        told = (HealthResult("gpu-ecc", verdict, "GPU 3 has had errors", 0.1),)
    return driver.take(HealthFound(at=driver.at, node=NodeId(node), results=told))


def training(low: int, high: int, *nodes: str, **terms: object) -> Driver:
    """Each node on a host of its own; rounds are not checked."""
    driver = Driver(min_nodes=low, max_nodes=high, **terms)
    for node in nodes:
        driver.join(node, host=f"host-{node}")
    if driver.job.world is None:
        driver.after(60).tick()
    driver.after(1).start_all()
    driver.after(1).step_all(10)
    return driver


def kinds_of(driver: Driver) -> list[str]:
    return [incident.kind for incident in driver.job.incidents]


def test_a_sick_node_is_replaced_by_a_spare() -> None:
    driver = training(2, 2, "a", "b")
    driver.join("spare", host="host-spare")
    actions = found(driver, "a")
    assert sent_away(actions) == {"a": EXIT_DO_NOT_REQUEUE}
    assert kinds(actions) == ["Finish", "StopWorkers"]
    assert set(started(driver.all_ready())) == {"spare", "b"}
    assert "GPU 3" in driver.job.membership.excluded["host-a"]
    assert driver.job.recovery.history.restarts == 0


def test_without_a_sick_node_the_job_goes_on_smaller_if_it_may() -> None:
    driver = training(1, 2, "a", "b")
    found(driver, "b")
    assert started(driver.all_ready()) == ["a"]
    unfit, exclude = driver.job.incidents
    assert (unfit.kind, unfit.node, unfit.closed_at) == ("unfit", "b", unfit.opened_at)
    assert "gpu-ecc: GPU 3 has uncorrectable errors" in unfit.signature
    assert (exclude.kind, exclude.node) == ("exclude", "b")


def test_its_host_does_not_come_back() -> None:
    driver = training(1, 2, "a", "b")
    found(driver, "b")
    driver.all_ready()
    (finish,) = driver.join("b2", host="host-b")
    assert isinstance(finish, Finish)
    assert "uncorrectable" in finish.reason


def test_a_sick_node_that_is_needed_stays_and_is_noted_once() -> None:
    driver = training(2, 2, "a", "b")
    assert found(driver, "a") == []
    assert driver.job.state.name == "running"
    (incident,) = driver.job.incidents
    assert incident.action == "it stays until the job can do without it"
    before = encoded(driver.job)
    assert found(driver, "a") == []
    assert encoded(driver.job) == before
    assert driver.job.membership.excluded == {}


def test_a_sick_node_that_was_needed_goes_with_the_next_round_that_can_do_without_it() -> None:
    driver = training(2, 2, "a", "b")
    found(driver, "a")
    driver.join("c", host="host-c")
    driver.exit(2, step=10, signal=9)
    actions = driver.all_ready()
    assert sent_away(actions) == {"a": EXIT_DO_NOT_REQUEUE}
    assert set(started(actions)) == {"b", "c"}


def test_a_sick_node_that_joined_first_does_not_train_once_others_are_there() -> None:
    driver = Driver(min_nodes=2, max_nodes=3)
    driver.join("a", host="host-a")
    assert found(driver, "a") == []
    driver.join("b", host="host-b")
    actions = driver.join("c", host="host-c")
    assert sent_away(actions) == {"a": EXIT_DO_NOT_REQUEUE}
    assert started(driver.after(60).tick()) == ["b", "c"]


def test_a_node_found_sick_while_it_waits_is_sent_away_and_breaks_no_round() -> None:
    driver = training(1, 1, "a")
    driver.join("spare", host="host-spare")
    assert kinds(found(driver, "spare")) == ["Finish"]
    assert driver.job.state.name == "running"
    assert kinds_of(driver) == ["unfit"]


def test_a_node_found_sick_in_the_middle_of_a_check_holds_up_nobody() -> None:
    driver = Lab(min_nodes=2, max_nodes=3).gather("a", "b", "c")
    actions = found(driver, "b")
    assert sent_away(actions) == {"b": EXIT_DO_NOT_REQUEUE}
    assert ordered(actions) == [("a", 1)]
    assert started(driver.answer_all()) == ["a", "c"]


def test_a_sick_node_is_not_the_jobs_fault_and_asks_for_no_new_check_of_the_others() -> None:
    driver = Lab(min_nodes=1, max_nodes=3).gather("a", "b", "c")
    driver.answer_all()
    driver.start_all()
    driver.after(1).step_all(5)
    found(driver, "c")
    assert started(driver.all_ready()) == ["a", "b"]


def test_only_what_fails_counts() -> None:
    for verdict in ("pass", "warn", "unknown"):
        driver = training(1, 2, "a", "b")
        before = msgspec.json.encode(driver.job.of(Checking))
        assert found(driver, "b", verdict=verdict) == []
        assert msgspec.json.encode(driver.job.of(Checking)) == before
        assert driver.job.incidents == []


def test_word_of_a_node_that_is_gone_or_of_a_job_that_is_over_changes_nothing() -> None:
    driver = training(1, 2, "a", "b")
    assert found(driver, "stranger") == []
    found(driver, "b")
    before = encoded(driver.job)
    assert found(driver, "b") == [], "it was sent away already"
    assert encoded(driver.job) == before
    driver.leaving("a")
    assert found(driver, "a") == []


def test_one_of_several_nodes_of_an_excluded_host_that_is_sick_too_goes_as_well() -> None:
    driver = Driver(min_nodes=1, max_nodes=3).running("a", "b", "c", step=5)
    found(driver, "b")
    driver.all_ready()
    driver.start_all()
    driver.after(1).step_all(6, 1)
    assert sent_away(found(driver, "c")) == {"c": EXIT_DO_NOT_REQUEUE}
