"""Traps: set by an agent, sprung by a worker in exactly their step."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InjectedFault
from holdfast.messages.chaos import Sprung, Trap
from holdfast.messages.units import NodeId, Rank, StepNumber
from holdfast.shm.rank_page import RankPage, create_page
from holdfast.shm.traps import TrapLog
from holdfast.worker.injected_faults import Drag, Traps


def trap(step: int, injection: int = 1, kind: str = "netcut") -> Trap:
    return Trap(
        injection=injection,
        occurrence=1,
        kind=kind,
        node=NodeId("a"),
        rank=Rank(0),
        step=StepNumber(step),
    )


class Laid:
    """Traps of a process, and the log in which it says which of them spring."""

    def __init__(self, *traps: Trap) -> None:
        self._view = memoryview(bytearray(1 << 12))
        self._log = TrapLog(self._view)
        self.woken: list[list[Sprung]] = []
        self.traps = Traps(TrapLog(self._view).append, lambda: self.woken.append(self.sprung()))
        self.add(*traps)

    def add(self, *traps: Trap) -> None:
        self.traps.add([msgspec.msgpack.encode(one) for one in traps])

    def sprung(self) -> list[Sprung]:
        return [msgspec.msgpack.decode(entry, type=Sprung) for entry in self._log.read()]

    def passed(self, before: int, step: int) -> list[Sprung]:
        self.traps.passed(before, step)
        woken, self.woken = self.woken, []
        return [sprung for told in woken for sprung in told]


def sprung_at(steps: list[int], *traps: int) -> list[int]:
    """At which of these steps traps for those steps were sprung."""
    laid = Laid(*(trap(step, number) for number, step in enumerate(traps, 1)))
    before, found = steps[0] - 1, []
    for step in steps:
        found += [(one.injection, one.step) for one in laid.passed(before, step)]
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


def test_one_for_now_is_sprung_in_the_next_step() -> None:
    (sprung,) = Laid(trap(0, 7)).passed(4, 5)
    assert (sprung.injection, sprung.occurrence, sprung.step) == (7, 1, 5)


def test_one_that_is_set_later_is_sprung_as_well() -> None:
    laid = Laid(trap(3))
    assert len(laid.passed(2, 3)) == 1
    laid.add(trap(4, 2))
    assert [one.injection for one in laid.passed(3, 4)] == [2]


def test_the_agent_hears_of_it_before_it_happens() -> None:
    laid = Laid(trap(5, kind="exception"))
    with pytest.raises(InjectedFault, match="at step 5"):
        laid.passed(4, 5)
    assert [len(told) for told in laid.woken] == [1]
    assert issubclass(InjectedFault, RuntimeError)


def test_nothing_befalls_a_process_that_the_script_forked() -> None:
    laid = Laid(trap(5, kind="exception"))
    pid = os.fork()
    if pid == 0:
        try:
            laid.passed(4, 5)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@given(entries=st.lists(st.binary(max_size=40), max_size=20), cut=st.integers(0, 20))
def test_a_log_gives_each_entry_once_and_in_order(entries: list[bytes], cut: int) -> None:
    view = memoryview(bytearray(1 << 11))
    writer, reader = TrapLog(view), TrapLog(view)
    assert all(writer.append(entry) for entry in entries[:cut])
    read = reader.read()
    assert all(writer.append(entry) for entry in entries[cut:])
    assert read + reader.read() == entries
    assert reader.read() == []


def test_a_log_that_is_full_takes_no_more() -> None:
    view = memoryview(bytearray(64))
    writer, reader = TrapLog(view), TrapLog(view)
    taken = [writer.append(bytes([number]) * 8) for number in range(9)]
    assert taken == [True] * 4 + [False] * 5
    assert reader.read() == [bytes([number]) * 8 for number in range(4)]


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
    while page.traps.append(b"\xff" * 4096):
        pass
    while page.sprung.append(b"\xff" * 4096):
        pass
    assert page.read().step == 7
    assert page.vitals.read() == signs
    assert set(page.traps.read()) == {b"\xff" * 4096}


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
