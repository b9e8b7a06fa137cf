"""A worker's signs of life: what is written is read, and forked processes write none."""

from __future__ import annotations

import math
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yardstick import cost_in_calls

from holdfast.shm.rank_page import RankPage, create_page
from holdfast.shm.vital_signs import (
    BETWEEN,
    DATA,
    FORWARD,
    IN_BACKWARD,
    IN_COLLECTIVE,
    IN_LOADER,
    MOST_OPEN,
    NO,
    OPTIMIZER,
    PHASES,
    RING,
    STEP,
    VITALS_BYTES,
    WARM_UP,
    OpenSection,
    Times,
    Vitals,
    section_name,
)


def fresh() -> Vitals:
    return Vitals(memoryview(bytearray(VITALS_BYTES)))


def test_fresh_vitals_say_that_nothing_happened() -> None:
    signs = fresh().read()
    assert (signs.marks, signs.mark_at, signs.steps, signs.sections) == (0, 0.0, 0, ())
    assert (signs.phase, signs.waits, signs.warm) == ("start", False, False)
    assert fresh().times() == {}


def test_a_mark_books_the_time_to_the_phase_that_it_ends() -> None:
    vitals = fresh()
    vitals.mark(DATA, 10.0)
    vitals.mark(FORWARD, 10.5)
    vitals.mark(BETWEEN, 12.5)
    assert vitals.times() == {"data": Times(1, 0.5, (0.5,)), "forward": Times(1, 2.0, (2.0,))}
    signs = vitals.read()
    assert (signs.phase, signs.mark_at, signs.marks) == ("between", 12.5, 3)


def test_what_is_booked_as_a_section_is_not_booked_to_a_phase_as_well() -> None:
    vitals = fresh()
    vitals.mark(BETWEEN, 1.0)
    vitals.go_on(BETWEEN, 100.0)
    vitals.mark(DATA, 100.5)
    assert vitals.times()["between"].longest_s == 0.5


phases = st.integers(DATA, BETWEEN)
durations = st.integers(0, 1000).map(lambda ms: ms / 1024)


@given(st.lists(st.tuples(phases, durations), max_size=150))
def test_of_each_phase_the_count_the_longest_and_the_latest_are_kept(
    marks: list[tuple[int, float]],
) -> None:
    vitals, now = fresh(), 1.0
    expected: dict[str, list[float]] = {}
    for phase, took in marks:
        vitals.mark(phase, now)
        now += took
        expected.setdefault(PHASES[phase], []).append(took)
    vitals.mark(BETWEEN, now)
    assert vitals.times() == {
        name: Times(len(took), max(took), tuple(took[-RING:])) for name, took in expected.items()
    }


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(-20, -1)), max_size=60))
def test_sections_nest_and_overlap_and_are_read_the_oldest_first(acts: list[int]) -> None:
    """Numbers from 0 on enter that section; the others leave one of those that are open."""
    vitals = fresh()
    for index in range(4):
        vitals.name_section(index, f"s{index}")
    inside: list[tuple[int, OpenSection]] = []
    for now, act in enumerate(acts, 1):
        if act >= 0:
            place = vitals.enter(act, float(now), own=act != 3)
            assert (place < 0) == (len(inside) == MOST_OPEN)
            if place >= 0:
                inside.append((place, OpenSection(float(now), f"s{act}", own=act != 3)))
        elif inside:
            place, _ = inside.pop(act % len(inside))
            vitals.leave(place)
        assert vitals.read().sections == tuple(sorted(one for _, one in inside))


def test_more_sections_than_there_are_places_for_are_not_watched() -> None:
    vitals = fresh()
    places = [vitals.enter(0, 1.0) for _ in range(MOST_OPEN + 1)]
    assert places[-1] == -1
    vitals.leave(-1)
    assert len(vitals.read().sections) == MOST_OPEN


@pytest.mark.parametrize("name", ["data", "step", "first step"])
def test_a_section_that_is_called_like_a_phase_is_another_thing(name: str) -> None:
    vitals = fresh()
    vitals.name_section(0, name)
    vitals.enter(0, 1.0)
    vitals.took(len(PHASES), 7.0)
    assert vitals.read().sections[0].name == section_name(name) == f"{name} (section)"
    assert list(vitals.times()) == [f"{name} (section)"]


@given(st.text(min_size=1, max_size=50))
def test_any_name_of_a_section_comes_back_as_it_is_called_in_the_vitals(name: str) -> None:
    vitals = fresh()
    vitals.name_section(3, name)
    vitals.enter(3, 1.0)
    assert vitals.read().sections[0].name == section_name(name).rstrip("\0")
    assert len(section_name(name).encode(errors="replace")) < 32


def test_a_process_is_warm_after_its_first_few_steps() -> None:
    vitals = fresh()
    for step in range(WARM_UP):
        assert not vitals.read().warm
        vitals.stepped(61.0 + step, None if step == 0 else 1.0)
    signs = vitals.read()
    assert (signs.steps, signs.step_at, signs.warm) == (WARM_UP, 60.0 + WARM_UP, True)


def test_the_first_step_has_no_duration() -> None:
    vitals = fresh()
    vitals.stepped(5.0, None)
    vitals.stepped(7.0, 2.0)
    assert vitals.times() == {PHASES[STEP]: Times(1, 2.0, (2.0,))}


def test_whoever_takes_a_step_is_the_thread_that_trains() -> None:
    vitals = fresh()
    assert vitals.trainer == threading.get_ident()
    seen: list[int] = []

    def train() -> None:
        vitals.stepped(1.0, None)
        seen.extend((threading.get_ident(), threading.get_native_id()))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert [vitals.trainer, vitals.read().thread] == seen


def test_a_beat_tells_how_the_training_thread_stands_and_since_when_it_is_there() -> None:
    vitals = fresh()
    vitals.beat(1.0, IN_COLLECTIVE, 1, line=77)
    vitals.beat(2.0, IN_BACKWARD, 2, line=77)
    signs = vitals.read()
    assert (signs.beat_at, signs.line_at) == (2.0, 1.0)
    assert (signs.waits, signs.in_backward, signs.codes) == (True, True, 2)
    vitals.beat(3.0, IN_LOADER, 3, line=78)
    signs = vitals.read()
    assert (signs.line_at, signs.waits, signs.loads) == (3.0, False, True)


@given(st.text(max_size=200))
def test_a_place_is_read_as_it_was_noted_and_cut_where_it_is_too_long(place: str) -> None:
    vitals = fresh()
    vitals.note_place(place, vitals.marks)
    found = vitals.read().place
    assert len(found) <= 120
    expected = place.encode(errors="replace")[:120].decode(errors="ignore").rstrip("\0")
    assert found == expected
    vitals.note_place("b", vitals.marks)
    assert vitals.read().place == "b"


def test_a_place_from_before_the_last_mark_is_not_told() -> None:
    """If a thread keeps the GIL from then on, no beat could correct it."""
    vitals = fresh()
    vitals.mark(DATA, 1.0)
    vitals.note_place("train.py:7 (load)", vitals.marks)
    assert vitals.read().place == "train.py:7 (load)"
    vitals.mark(FORWARD, 2.0)
    assert vitals.read().place == ""


def test_a_place_that_is_being_written_is_not_told() -> None:
    seen: list[str] = []

    class Torn(Vitals):
        def _text(self, at: int, size: int) -> str:
            found = super()._text(at, size)
            if not seen:
                seen.append(found)
                self.note_place("other.py:1 (g)", self.marks)
            return found

    vitals = Torn(memoryview(bytearray(VITALS_BYTES)))
    vitals.note_place("train.py:7 (load)", 0)
    assert vitals.read().place == ""
    assert vitals.read().place == "other.py:1 (g)"


def test_the_timeout_of_the_process_group_is_kept() -> None:
    vitals = fresh()
    assert vitals.read().group_timeout_s == 0.0
    vitals.note_group_timeout(1800.0)
    assert vitals.read().group_timeout_s == 1800.0


def test_a_mark_forgets_in_which_code_the_thread_was_seen() -> None:
    vitals = fresh()
    vitals.beat(1.0, NO, 9)
    vitals.mark(OPTIMIZER, 2.0)
    assert vitals.read().codes == 0


def test_a_dump_that_is_wanted_is_made_once() -> None:
    vitals = fresh()
    assert not vitals.dump_wanted
    vitals.want_dump()
    assert vitals.dump_wanted
    vitals.dumped()
    assert not vitals.dump_wanted


def test_what_a_forked_process_does_is_no_sign_of_the_worker() -> None:
    """DataLoader's workers are forks of the rank, with its hooks and its memory."""
    fd = create_page()
    page, reader = RankPage(fd), RankPage(fd)
    page.vitals.mark(DATA, 1.0)
    page.write(7, 7, 1.0, 1.0, 0.0, 0.0)
    pid = os.fork()
    if pid == 0:
        try:
            page.detach()
            page.vitals.mark(FORWARD, 2.0)
            page.vitals.enter(0, 2.0)
            page.vitals.stepped(2.0, None)
            page.write(99, 99, 2.0, 2.0, 0.0, 0.0)
            os._exit(0 if page.vitals.read().phase == "forward" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    signs = reader.vitals.read()
    assert (signs.phase, signs.mark_at, signs.steps, signs.sections) == ("data", 1.0, 0, ())
    assert reader.read().step == 7
    for each in (page, reader):
        each.close()
    os.close(fd)


def test_a_sign_costs_as_little_as_some_function_calls() -> None:
    vitals = fresh()
    assert cost_in_calls(lambda: vitals.mark(DATA, 1.0)) < 100


# ---- the lease on the round ----


def test_without_a_word_about_a_lease_there_is_none_to_be_over() -> None:
    assert not fresh().lease_is_over(1e12)


def test_a_lease_is_over_after_its_end_and_can_be_renewed() -> None:
    vitals = fresh()
    vitals.lend(50.0)
    assert not vitals.lease_is_over(50.0)
    assert vitals.lease_is_over(50.001)
    vitals.lend(60.0)
    assert not vitals.lease_is_over(50.001)


def test_an_endless_lease_is_never_over() -> None:
    vitals = fresh()
    vitals.lend(50.0)
    vitals.lend(math.inf)
    assert not vitals.lease_is_over(1e12)


def test_a_lease_is_noted_beside_the_other_signs() -> None:
    vitals = fresh()
    vitals.mark(DATA, 1.0)
    vitals.beat(2.0, NO, 1)
    vitals.note_place("train.py:3 (train)", vitals.marks)
    vitals.note_group_timeout(77.0)
    before = vitals.read()
    vitals.lend(50.0)
    assert vitals.read() == before


def test_the_agent_lends_to_the_worker_that_shares_the_page() -> None:
    fd = create_page()
    agent, worker = RankPage(fd), RankPage(fd)
    agent.vitals.lend(50.0)
    assert worker.vitals.lease_is_over(51.0)
    for each in (agent, worker):
        each.close()
    os.close(fd)
