"""Ranks that slow the others down, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driver import Driver, encoded, kinds, revived

from holdfast.core import report
from holdfast.core.stragglers import windows as stragglers
from holdfast.core.stragglers.events import KEPT_FINDINGS, StragglersMachine
from holdfast.messages.actions import Answered, AnyAction, Finish
from holdfast.messages.events import Asked, Progress
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.requests import AwaitStragglers, Denied, StragglersFound
from holdfast.messages.timings import CpuShortage, RankTimings, Timing
from holdfast.messages.units import NodeId, Rank

WINDOW = stragglers.WINDOW_SAMPLES


def timings(rank: int, forward_s: float, count: int = WINDOW, queued_s: float = 0.0) -> RankTimings:
    """Steps of 100 ms, in which the slowest rank does not wait for the others."""
    total = 0.1
    forward = Timing(section="forward", count=count, median_s=forward_s, total_s=forward_s * count)
    waits = total - forward_s
    backward = Timing(
        section="backward", count=count, median_s=waits, total_s=waits * count, waits=True
    )
    step = Timing(section="step", count=count, median_s=total, total_s=total * count, waits=True)
    return RankTimings(
        rank=Rank(rank),
        timings=(forward, backward, step),
        shortage=CpuShortage(queued_s=queued_s * count),
    )


def window(
    driver: Driver,
    slow: Mapping[int, float] = {},
    queued_s: Mapping[int, float] = {},
    **more: Any,
) -> list[AnyAction]:
    """Every rank reports eight steps in five seconds; those that are slow take the given times for
    forward, and some have no CPU for so long in each step."""
    actions: list[AnyAction] = []
    for _ in range(2):
        for rank in driver.job.ranks:
            about = {"node": driver.node_of(rank), "round": driver.round, "ranks": (), **more}
            times = slow.get(rank, 0.02), WINDOW // 2, queued_s.get(rank, 0.0)
            actions += driver.take(
                Progress(at=driver.at, timings=(timings(rank, *times),), **about)
            )
        driver.after(stragglers.WINDOW_S)
    return actions


def training(**terms: Any) -> Driver:
    """Four ranks on two nodes, each on a host of its own."""
    driver = Driver(**{"min_nodes": 2, "max_nodes": 2, **terms})
    driver.join("a", host="host-a")
    driver.join("b", host="host-b")
    driver.after(1).start_all()
    driver.after(1).step_all(10)
    return driver


def several(driver: Driver, slow: Mapping[int, float] = {}, **more: Any) -> list[AnyAction]:
    """As many windows as it takes; nothing comes of any but the last."""
    for _ in range(stragglers.WINDOWS - 1):
        assert window(driver, slow, **more) == []
    return window(driver, slow, **more)


def slowed(driver: Driver, rank: int = 3, by: float = 2.0) -> list[AnyAction]:
    return several(driver, {rank: 0.02 * by})


def ask(driver: Driver, rank: int, after: int = 0, number: int = 1) -> list[AnyAction]:
    return driver.take(
        Asked(
            at=driver.at,
            node=driver.node_of(rank),
            round=driver.round,
            rank=Rank(rank),
            channel=0,
            number=number,
            request=AwaitStragglers(after=after),
        )
    )


def answers(actions: list[AnyAction]) -> dict[int, Any]:
    return {a.rank: a.answer for a in actions if isinstance(a, Answered)}


# ---- incidents ----


def test_a_slow_rank_becomes_an_incident_that_breaks_no_round() -> None:
    driver = training()
    assert slowed(driver) == []
    assert driver.job.state.name == "running"
    (incident,) = driver.job.incidents
    assert (incident.kind, incident.rank, incident.node) == ("straggler", 3, "b")
    assert incident.closed_at == incident.opened_at
    assert incident.signature.startswith("is slow: 50 % of the speed of the best rank")
    assert incident.action == "training goes on"
    assert "rank 3 is slow: 50 %" in report.incident_line(driver.job, incident)


def test_it_is_said_once_however_long_it_lasts() -> None:
    driver = training()
    slowed(driver)
    for _ in range(5):
        assert window(driver, {3: 0.04}) == []
    assert len(driver.job.incidents) == 1


def test_a_rank_that_becomes_slow_is_one_incident_though_it_was_faster_before() -> None:
    driver = training()
    for _ in range(3):
        window(driver)
    slowed(driver)
    assert {finding.kind for finding in driver.job.of(StragglersMachine).findings.newest} == {
        "relative",
        "individual",
    }
    assert len(driver.job.incidents) == 1


def test_a_rank_that_recovers_is_no_incident_but_is_told() -> None:
    driver = training()
    ask(driver, 0)
    slowed(driver)
    several(driver)
    assert len(driver.job.incidents) == 1
    assert [finding.began for finding in driver.job.of(StragglersMachine).findings.newest] == [
        True,
        False,
    ]


def test_status_shows_every_ranks_score_and_who_is_slow() -> None:
    driver = training()
    slowed(driver)
    told = report.status(driver.job, driver.at, alive=True)
    ranks = {rank.rank: rank for node in told.nodes for rank in node.ranks}
    assert ranks[3].straggler == "relative"
    assert abs(ranks[3].score - 0.5) < 0.05
    assert [ranks[rank].straggler for rank in (0, 1, 2)] == [None] * 3
    assert all(ranks[rank].score > 0.95 for rank in (0, 1, 2))


def test_a_straggler_is_no_fault_and_repairs_take_no_notice_of_it() -> None:
    driver = training()
    driver.exit(0, step=10, signal=9)
    driver.all_ready()
    driver.start_all()
    slowed(driver)
    assert driver.job.recovery.open_incident is not None
    driver.after(1).step_all(11, 1)
    fault, straggler = driver.job.incidents
    assert (fault.kind, straggler.kind) == ("signal", "straggler")
    assert fault.closed_at == driver.now


def test_word_of_another_round_or_of_anothers_rank_changes_nothing() -> None:
    driver = training()
    slowed(driver)
    before = encoded(driver.job)
    assert window(driver, {2: 0.08}, round=7) == []
    told = (timings(3, 0.5),)
    about = {"node": NodeId("a"), "round": driver.round, "ranks": ()}
    assert driver.take(Progress(at=driver.at, timings=told, **about)) == []
    assert encoded(driver.job) == before


def test_timings_that_come_while_a_round_is_being_stopped_say_nothing() -> None:
    driver = training()
    window(driver, {3: 0.04})
    driver.exit(0, step=10, signal=9)
    assert window(driver, {3: 0.04}) == []
    assert [incident.kind for incident in driver.job.incidents] == ["signal"]


def test_what_was_seen_survives_a_restart_of_the_coordinator() -> None:
    driver = training()
    for _ in range(stragglers.WINDOWS):
        driver.job = revived(driver.job)
        window(driver, {3: 0.04})
    assert [incident.rank for incident in driver.job.incidents] == [3]


# ---- overloaded nodes ----


def test_a_rank_without_a_cpu_is_not_slow_its_node_is_overloaded() -> None:
    driver = training(exclude_stragglers=True)
    driver.join("spare", host="host-spare")
    assert several(driver, {3: 0.04}, queued_s={3: 0.02}) == []
    (incident,) = driver.job.incidents
    assert (incident.kind, incident.rank, incident.node) == ("overload", None, "b")
    assert incident.signature == (
        "is overloaded: its ranks had no CPU for 20 % of the time:"
        " run-queue delay 20 %, throttled 0 %, steal 0 %"
    )
    assert "node b is overloaded" in report.incident_line(driver.job, incident)
    assert driver.job.state.name == "running"
    assert driver.job.of(StragglersMachine).findings.newest == []


def test_status_shows_which_node_is_overloaded_until_it_is_no_more() -> None:
    driver = training()
    several(driver, {3: 0.04}, queued_s={3: 0.02})

    def overloads() -> dict[str, str | None]:
        told = report.status(driver.job, driver.at, alive=True)
        return {node.node: node.overload for node in told.nodes}

    assert overloads()["a"] is None
    assert "run-queue delay 20 %" in str(overloads()["b"])
    several(driver)
    assert overloads() == {"a": None, "b": None}
    assert len(driver.job.incidents) == 1


# ---- excluding ----


def test_a_straggler_is_replaced_only_if_a_spare_waits() -> None:
    driver = training(exclude_stragglers=True)
    assert slowed(driver) == []
    assert driver.job.incidents[0].action == "training goes on"
    assert driver.job.membership.excluded == {}


def test_the_node_of_a_straggler_makes_place_for_a_spare() -> None:
    driver = training(exclude_stragglers=True)
    driver.join("spare", host="host-spare")
    actions = slowed(driver)
    assert kinds(actions) == ["Finish", "StopWorkers"]
    (finish,) = [a for a in actions if isinstance(a, Finish)]
    assert (finish.node, finish.code) == ("b", EXIT_DO_NOT_REQUEUE)
    assert "rank 3 is slow" in finish.reason
    assert "host-b" in driver.job.membership.excluded
    assert driver.job.incidents[0].action == "its node makes place for a spare"
    driver.all_ready()
    assert [place.node for place in driver.world.places] == ["a", "spare"]
    assert driver.job.recovery.history.restarts == 0


def test_once_a_rank_has_finished_a_straggler_keeps_its_place() -> None:
    driver = training(exclude_stragglers=True)
    driver.join("spare", host="host-spare")
    driver.exit(0, 10, code=0)
    assert slowed(driver) == []
    assert driver.job.incidents[0].action == "training goes on"


def test_a_spare_is_not_used_where_nobody_asked_for_that() -> None:
    driver = training()
    driver.join("spare", host="host-spare")
    assert slowed(driver) == []
    assert driver.job.state.name == "running"


def test_two_slow_nodes_cost_one_spare_and_one_restart() -> None:
    driver = training(exclude_stragglers=True, min_nodes=4, max_nodes=4)
    driver.join("c", host="host-c")
    driver.join("d", host="host-d")
    driver.start_all()
    driver.step_all(10)
    driver.join("spare", host="host-spare")
    slow = {2: 0.06, 4: 0.06}
    actions = several(driver, slow)
    assert len([a for a in actions if isinstance(a, Finish)]) == 1
    kinds_seen = [incident.kind for incident in driver.job.incidents]
    assert sorted(kinds_seen) == ["exclude", "straggler", "straggler"]
    assert len(driver.job.membership.excluded) == 1


def test_a_rank_that_is_slower_than_it_was_is_noted_and_stays() -> None:
    """All ranks at once: nobody is slower than the others, so no spare would help."""
    driver = training(exclude_stragglers=True)
    driver.join("spare", host="host-spare")
    for _ in range(3):
        window(driver)
    everybody = dict.fromkeys(range(4), 0.06)
    assert several(driver, everybody) == []
    assert driver.job.state.name == "running"
    assert {incident.rank for incident in driver.job.incidents} == {0, 1, 2, 3}
    assert all("its own best" in incident.signature for incident in driver.job.incidents)


def test_in_steps_of_milliseconds_a_rank_that_is_slower_than_it_was_is_no_incident() -> None:
    driver = training()
    for _ in range(3):
        window(driver)
        driver.step(0, driver.job.highest + 1000)
    everybody = dict.fromkeys(range(4), 0.06)
    several(driver, everybody)
    assert driver.job.of(StragglersMachine).findings.newest
    assert driver.job.incidents == []


# ---- scripts that want to know ----


def test_whoever_waits_is_told_of_a_finding_once() -> None:
    driver = training()
    assert ask(driver, 0) == []
    assert ask(driver, 2) == []
    told = answers(slowed(driver))
    assert set(told) == {0, 2}
    answer = told[0]
    assert isinstance(answer, StragglersFound)
    assert answer.total == 1
    assert [(f.rank, f.kind, f.began) for f in answer.findings] == [(3, "relative", True)]
    assert answers(window(driver, {3: 0.04})) == {}


def test_who_asks_again_waits_for_what_is_new() -> None:
    driver = training()
    ask(driver, 0)
    slowed(driver)
    assert ask(driver, 0, after=1, number=2) == []
    answer = answers(several(driver))[0]
    assert answer.total == 2
    assert [finding.began for finding in answer.findings] == [False]


def test_who_asks_late_is_told_at_once_what_the_round_has_seen() -> None:
    driver = training()
    slowed(driver)
    answer = answers(ask(driver, 1))[1]
    assert [finding.rank for finding in answer.findings] == [3]


def test_an_answer_that_was_lost_is_given_again_and_is_the_same() -> None:
    driver = training()
    ask(driver, 0)
    first = answers(slowed(driver))[0]
    assert answers(ask(driver, 0)) == {0: first}


def test_with_the_round_the_wait_is_over() -> None:
    driver = training()
    ask(driver, 0)
    told = answers(driver.exit(3, step=10, signal=9))
    assert isinstance(told[0], Denied)
    assert told[0].reason == "fenced"
    assert driver.job.requests.open == {}


def test_whoever_is_replaced_for_being_slow_is_told_before_the_round_is_over() -> None:
    driver = training(exclude_stragglers=True)
    driver.join("spare", host="host-spare")
    ask(driver, 3)
    told = answers(slowed(driver))
    assert isinstance(told[3], StragglersFound)


def test_a_new_round_knows_nothing_of_the_stragglers_of_the_last() -> None:
    driver = training()
    slowed(driver)
    driver.exit(0, step=10, signal=9)
    driver.all_ready()
    driver.start_all()
    assert ask(driver, 0) == []
    told = report.status(driver.job, driver.at, alive=True)
    assert not any(rank.straggler for node in told.nodes for rank in node.ranks)


def test_a_script_that_missed_many_findings_gets_the_newest() -> None:
    driver = training()
    for _ in range(20):
        slowed(driver)
        several(driver)
    answer = answers(ask(driver, 0))[0]
    assert answer.total > 40
    assert answer.findings == tuple(driver.job.of(StragglersMachine).findings.newest)
    assert len(answer.findings) == KEPT_FINDINGS
