"""Traps: laid by an agent, sprung by a worker in exactly the step they are for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.chaos.plans import LOOKAHEAD
from holdfast.errors import InjectedFault
from holdfast.messages.chaos import Trap
from holdfast.messages.units import NodeId, Rank, StepNumber
from holdfast.shm.rank_page import RankPage, create_page
from holdfast.shm.traps import MAX_TRAPS_BYTES, TRAPS_BYTES, Sprung, TrapArea
from holdfast.worker.injected_faults import Drag, Traps


@pytest.fixture
def area() -> TrapArea:
    return TrapArea(memoryview(bytearray(TRAPS_BYTES)))


def trap(step: int, injection: int = 1, kind: str = "netcut") -> Trap:
    return Trap(
        injection=injection,
        occurrence=1,
        kind=kind,
        node=NodeId("a"),
        rank=Rank(0),
        step=StepNumber(step),
    )


def lay(area: TrapArea, *traps: Trap) -> None:
    area.write(msgspec.msgpack.encode(traps))


def sprung_at(steps: list[int], *traps: int) -> list[int]:
    """At which of these steps traps for those steps were sprung."""
    area = TrapArea(memoryview(bytearray(TRAPS_BYTES)))
    lay(area, *(trap(step, number) for number, step in enumerate(traps, 1)))
    laid = Traps(area, lambda: None)
    laid.look()
    before, found = steps[0] - 1, []
    for step in steps:
        laid.passed(before, step)
        found += [(one.injection, one.step) for one in area.take_sprung()]
        before = step
    return [step for _, step in sorted(found)]


def test_a_trap_is_sprung_in_its_step_and_once() -> None:
    assert sprung_at([1, 2, 3, 4, 3, 4, 5], 4) == [4]


def test_who_tells_of_every_tenth_step_springs_it_in_the_first_one_after() -> None:
    assert sprung_at([10, 20, 30], 15) == [20]


def test_who_begins_beyond_it_never_springs_it() -> None:
    assert sprung_at([100, 101], 50) == []


@given(
    first=st.integers(1, 20),
    strides=st.lists(st.integers(1, 4), min_size=1, max_size=30),
    traps=st.lists(st.integers(1, 60), min_size=1, max_size=8),
)
def test_each_trap_on_the_way_is_sprung_exactly_once(
    first: int, strides: list[int], traps: list[int]
) -> None:
    steps = [first]
    for stride in strides:
        steps.append(steps[-1] + stride)
    expected = [
        next(step for step in steps if step >= trap) for trap in traps if first <= trap <= steps[-1]
    ]
    assert sorted(sprung_at(steps, *traps)) == sorted(expected)


def test_one_for_now_is_sprung_in_the_next_step(area: TrapArea) -> None:
    traps = Traps(area, lambda: None)
    lay(area, trap(0, 7))
    traps.look()
    traps.passed(4, 5)
    (sprung,) = area.take_sprung()
    assert (sprung.injection, sprung.occurrence, sprung.step) == (7, 1, 5)


def test_the_agent_hears_of_it_before_it_happens(area: TrapArea) -> None:
    heard: list[int] = []
    lay(area, trap(5, kind="exception"))
    traps = Traps(area, lambda: heard.append(len(area.take_sprung())))
    traps.look()
    with pytest.raises(InjectedFault, match="at step 5"):
        traps.passed(4, 5)
    assert heard == [1]
    assert issubclass(InjectedFault, RuntimeError)


def test_nothing_befalls_a_process_that_the_script_forked(area: TrapArea) -> None:
    lay(area, trap(5, kind="exception"))
    traps = Traps(area, lambda: None)
    traps.look()
    pid = os.fork()
    if pid == 0:
        try:
            traps.passed(4, 5)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_traps_that_are_set_later_join_those_that_have_sprung(area: TrapArea) -> None:
    traps = Traps(area, lambda: None)
    for number in range(1, 500):
        before = area.version
        lay(area, trap(number, number), trap(number + 1, number + 1))
        assert area.version == before + 1
        traps.look()
        traps.passed(number - 1, number)
        assert [one.injection for one in area.take_sprung()] == [number]


def test_as_many_as_a_job_can_have_set_fit_into_the_area(area: TrapArea) -> None:
    many = [trap(1 << 40, number) for number in range(1, 16 * LOOKAHEAD + 1)]
    assert len(msgspec.msgpack.encode(many)) <= MAX_TRAPS_BYTES
    lay(area, *many)
    assert msgspec.msgpack.decode(area.read(), type=list[Trap]) == many


@pytest.fixture
def page() -> Iterator[RankPage]:
    fd = create_page()
    page = RankPage(fd)
    os.close(fd)
    yield page
    page.close()


def test_traps_lie_beside_the_page_and_nothing_else(page: RankPage) -> None:
    page.write(7, 7, 1.0, 2.0, 0.0, 0.0)
    signs = page.vitals.read()
    page.traps.write(b"\xff" * MAX_TRAPS_BYTES)
    page.traps.write(b"\xff" * MAX_TRAPS_BYTES)
    for number in range(200):
        page.traps.spring(Sprung(number, 1 << 60, 1e9, 1 << 60))
    assert page.read().step == 7
    assert page.vitals.read() == signs


def test_a_slow_rank_drags_by_what_steps_took_before(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("holdfast.worker.injected_faults.time.sleep", slept.append)
    drag = Drag(lambda: (0.1, 0.2, 0.1))
    drag.at_end_of_step()
    assert slept == [], "unless it was asked for"
    drag.set(3.0)
    drag.in_forward()
    drag.at_end_of_step()
    drag.at_end_of_step()
    assert slept == pytest.approx([0.2, 0.2]), "in each step once"
    drag.set(1.0)
    drag.in_forward()
    drag.at_end_of_step()
    assert len(slept) == 2
