"""The ladder: the cheapest repair that can be done with what is there."""

from __future__ import annotations

from typing import Any

import pytest
from driver import Driver, raised
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.core import ladder
from holdfast.core.faults import Fault
from holdfast.core.ladder import Resources, RungName, cheapest
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time


def fault(rank: int | None = 0) -> Fault:
    return Fault(
        kind="signal" if rank is not None else "node",
        node=NodeId("n"),
        rank=None if rank is None else Rank(rank),
        round=RoundNumber(1),
        step=StepNumber(5),
        signature="killed by SIGKILL",
        at=Time(1.0),
    )


CASES: list[tuple[dict[str, int], RungName]] = [
    ({"seats": 2, "survivors": 2, "formable": 2, "needed": 2}, "standby"),
    ({"seats": 2, "survivors": 1, "formable": 2, "needed": 1}, "spare"),
    ({"seats": 2, "survivors": 1, "formable": 1, "needed": 1}, "fewer nodes"),
    ({"seats": 2, "survivors": 1, "formable": 1, "needed": 2}, "await nodes"),
    ({"seats": 4, "survivors": 3, "formable": 2, "needed": 2}, "fewer nodes"),
    ({"seats": 2, "survivors": 1, "formable": 1, "needed": 2, "platform": 1}, "ask the platform"),
    ({"seats": 2, "survivors": 1, "formable": 1, "needed": 1, "platform": 1}, "fewer nodes"),
]


@pytest.mark.parametrize(("there", "rung"), CASES)
def test_the_cheapest_rung_that_can_repair_it_is_taken(there: Any, rung: RungName) -> None:
    assert cheapest(fault(), Resources(**there)).rung == rung


counts = st.integers(0, 6)


@given(st.none() | counts, counts, counts, counts, counts)
def test_an_incident_can_say_what_was_done_whatever_rung_is_taken(
    rank: int | None, seats: int, survivors: int, formable: int, needed: int
) -> None:
    there = Resources(seats=seats, survivors=survivors, formable=formable, needed=needed)
    again = cheapest(fault(rank), there)
    assert ladder.done(again.rung, there)


def test_the_function_is_re_entered_if_every_process_waits_to_do_so() -> None:
    there = Resources(seats=2, survivors=2, formable=2, needed=2, ranks=4, parked=4)
    assert cheapest(fault(), there).rung == "re-enter the function"
    assert cheapest(fault(), replace(there, parked=3)).rung == "standby"
    assert cheapest(fault(), replace(there, survivors=1)).rung == "spare"


# ---- what a job does ---------------------------------------------------------------------------


def rung(driver: Driver) -> str:
    return driver.job.incidents[-1].rung


def test_a_dead_rank_is_given_to_a_standby() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=5)
    driver.exit(0, signal=9)
    driver.all_ready()
    assert rung(driver) == "standby"


def test_a_lost_node_is_replaced_by_a_spare() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=5)
    driver.join("spare")
    driver.lose("b")
    driver.all_ready()
    assert rung(driver) == "spare"


def test_without_a_spare_the_world_shrinks_and_below_the_minimum_it_waits() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=5)
    driver.lose("b")
    driver.all_ready()
    assert rung(driver) == "fewer nodes"
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=5)
    driver.lose("b")
    driver.all_ready()
    assert rung(driver) == "await nodes"


def test_the_same_failure_climbs_to_the_last_rung() -> None:
    driver = Driver().running("a", step=5)
    for _ in range(3):
        driver.exit(0, step=5, code=1, raised=raised())
        driver.all_ready()
    assert rung(driver) == "stop"
    assert driver.job.state.name == "ending"
