"""When a rank is past its deadline, and how it stands there. Time is given: nothing here waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.agent.stall_detector import (
    LOOK_EVERY_S,
    REPEAT_S,
    Activity,
    StallDetector,
    WatchedRank,
)
from holdfast.core.hangs.deadlines import HANG_BASE_S, HANG_STEPS, OVERDUE_FLOOR_S
from holdfast.messages.hangs import FIRST_STEP, LINES, HangTerms, Paces, Stall
from holdfast.messages.records import Part
from holdfast.messages.units import Rank, RoundNumber
from holdfast.proc import Effort
from holdfast.shm.vital_signs import (
    BETWEEN,
    DATA,
    FORWARD,
    IN_BACKWARD,
    IN_COLLECTIVE,
    NO,
    PHASES,
    VITALS_BYTES,
    WARM_UP,
    Vitals,
)

STEP_S = 0.02
LIMIT_S = HANG_BASE_S + HANG_STEPS * STEP_S
PLACE = 3 * LINES + 10
OTHER_THREAD = False


class Timer:
    def __init__(self, at: float, act: Callable[[], None]) -> None:
        self.at, self.act, self.cancelled = at, act, False

    def cancel(self) -> None:
        self.cancelled = True


class FakeSystem:
    """A world in which nothing happens by itself."""

    def __init__(self) -> None:
        self.time = 100.0
        self.timers: list[Timer] = []
        self.states: dict[int, str] = {}
        self.efforts: dict[int, Effort] = {}

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, act: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.time + delay_s, act))
        return self.timers[-1]

    def process_state(self, pid: int) -> str:
        return self.states.get(pid, "S")

    def effort(self, pid: int, thread: int) -> Effort:
        return self.efforts.get(pid, Effort())


class Scene:
    """Ranks that a test moves by hand, and the watch that looks at them."""

    def __init__(self, ranks: int = 1, before: Paces | None = None, **terms: Any) -> None:
        self.system = FakeSystem()
        self.told: list[tuple[Stall, ...]] = []
        self.detector = StallDetector(HangTerms(**terms), self.told.append, self.system)
        self.begin_round(ranks, before)

    def begin_round(self, ranks: int = 1, before: Paces | None = None, **alarms: int) -> None:
        self.vitals = [Vitals(memoryview(bytearray(VITALS_BYTES))) for _ in range(ranks)]
        self.beating = [True] * ranks
        self.standing: list[dict[str, int]] = [{} for _ in range(ranks)]
        part = Part(
            round=RoundNumber(1),
            first_rank=Rank(0),
            slots=len(self.vitals),
            group_rank=0,
            group_world_size=1,
            world_size=len(self.vitals),
            store_address="",
            store_port=0,
            restarts=0,
            max_restarts=0,
            paces=before or Paces(),
            alarms=alarms,
        )
        self.detector.begin_round(part)
        for rank, vitals in enumerate(self.vitals):
            self.detector.add(Rank(rank), 1000 + rank, vitals)

    @property
    def now(self) -> float:
        return self.system.time

    def stand(self, rank: int = 0, waits: int = NO, codes: int = 1, place: int = PLACE) -> None:
        """How the beats see the rank from now on."""
        self.standing[rank] = {"waits": waits, "codes": codes, "place": place}
        self._beat(rank)

    def _beat(self, rank: int) -> None:
        if self.beating[rank]:
            how = {"waits": NO, "codes": 1, "place": PLACE, **self.standing[rank]}
            self.vitals[rank].beat(self.now, **how)

    def run(self, seconds: float) -> None:
        """Let time pass, with timers when they are due, and a beat before each."""
        until = self.now + seconds
        while True:
            due = [timer for timer in self.system.timers if not timer.cancelled]
            at = min([until, *(timer.at for timer in due)])
            self.system.time = max(self.now, at)
            for rank in range(len(self.vitals)):
                self._beat(rank)
            for timer in due:
                if timer.at <= self.now:
                    self.system.timers.remove(timer)
                    timer.act()
            if self.now >= until:
                return

    def train(self, steps: int = WARM_UP + 5, step_s: float = STEP_S) -> None:
        """Every rank takes steps, and ends at the begin of a phase."""
        for _ in range(steps):
            for phase in (DATA, FORWARD, BETWEEN):
                for vitals in self.vitals:
                    vitals.mark(phase, self.now)
                self.run(step_s / 3)
            for rank, vitals in enumerate(self.vitals):
                first = vitals.read().steps == 0
                vitals.stepped(self.now, None if first else step_s)
                if first:
                    self.detector.stepped(Rank(rank))
        for vitals in self.vitals:
            vitals.mark(BETWEEN, self.now)

    def stalls(self) -> tuple[Stall, ...]:
        return self.told[-1] if self.told else ()

    def kinds(self) -> dict[int, str]:
        return {stall.rank: stall.kind for stall in self.stalls()}

    def enter(self, name: str, rank: int = 0, own: bool = True) -> int:
        vitals = self.vitals[rank]
        index = sum(ord(letter) for letter in name) % 24
        vitals.name_section(index, name)
        if own:
            vitals.mark(BETWEEN, self.now)
        return vitals.enter(index, self.now, own)

    def leave(self, place: int, name: str, took_s: float, rank: int = 0) -> None:
        vitals = self.vitals[rank]
        vitals.took(len(PHASES) + sum(ord(letter) for letter in name) % 24, took_s)
        vitals.leave(place)
        vitals.go_on(BETWEEN, self.now)

    def section(self, name: str, took_s: float, rank: int = 0) -> None:
        """A section that is entered and left."""
        place = self.enter(name, rank)
        self.run(took_s)
        self.leave(place, name, took_s, rank)


# ---- phases ------------------------------------------------------------------------------------


def test_a_rank_that_trains_is_never_told_of() -> None:
    scene = Scene(ranks=3)
    scene.train(steps=200)
    assert scene.told == []


def test_a_rank_that_stands_still_is_told_of_when_its_time_is_up() -> None:
    scene = Scene(ranks=2)
    scene.train()
    for tenth in range(17):
        scene.run(0.1)
        scene.vitals[1].mark(DATA, scene.now)
        assert scene.told == [] or tenth > 14
    (stall,) = scene.stalls()
    assert (stall.rank, stall.kind, stall.where) == (0, "still", "between")
    assert stall.limit_s == pytest.approx(LIMIT_S)
    assert stall.for_s == pytest.approx(LIMIT_S, abs=0.1)


def test_when_it_moves_on_that_is_told_too() -> None:
    scene = Scene()
    scene.train()
    scene.run(LIMIT_S + 0.1)
    assert scene.kinds() == {0: "still"}
    scene.vitals[0].mark(DATA, scene.now)
    scene.run(0.3)
    assert scene.stalls() == ()


def test_a_phase_that_was_seen_to_take_long_may_do_so_again() -> None:
    scene = Scene(ranks=2)
    scene.train()
    for vitals in scene.vitals:
        vitals.mark(FORWARD, scene.now)
    scene.vitals[0].mark(DATA, scene.now)
    scene.run(1.0)
    scene.vitals[1].mark(BETWEEN, scene.now)
    scene.vitals[0].mark(FORWARD, scene.now)
    for _ in range(4):
        scene.run(0.7)
        scene.vitals[1].mark(BETWEEN, scene.now)
    assert scene.told == [], "what one rank of the node took, another may take"
    scene.run(0.5)
    assert [stall.where for stall in scene.stalls()] == ["forward"]


def test_nobody_is_told_of_without_detection() -> None:
    scene = Scene(detect=False)
    scene.train()
    scene.run(10_000)
    assert scene.told == []
    assert scene.system.timers == []


def test_a_rank_that_has_ended_is_not_looked_at_any_more() -> None:
    scene = Scene(ranks=2)
    scene.train()
    scene.run(LIMIT_S + 0.1)
    scene.detector.remove(Rank(0))
    scene.run(0.5)
    assert scene.kinds() == {1: "still"}
    scene.detector.stop()
    scene.run(100)
    assert scene.kinds() == {1: "still"}


def test_what_stands_is_told_again_ever_more_seldom() -> None:
    scene = Scene()
    scene.train()
    scene.run(LIMIT_S + 0.1)
    assert len(scene.told) == 1
    scene.run(REPEAT_S + 0.5)
    assert len(scene.told) == 2
    scene.run(45.0)
    assert len(scene.told) == 5
    assert {stall.rank for told in scene.told for stall in told} == {0}


# ---- how it stands -----------------------------------------------------------------------------


def test_each_way_to_stand_is_told_apart() -> None:
    scene = Scene(ranks=6)
    scene.train()
    scene.system.states[1000] = "T"
    scene.beating[0] = scene.beating[1] = False
    scene.stand(2, waits=IN_COLLECTIVE)
    scene.stand(3, codes=5)
    scene.stand(4, waits=IN_BACKWARD)
    scene.run(LIMIT_S + 0.1)
    ways = {0: "stopped", 1: "gil", 2: "waits", 3: "busy", 4: "waits", 5: "still"}
    assert scene.kinds() == ways


def test_one_that_moves_from_collective_to_collective_does_not_wait() -> None:
    scene = Scene()
    scene.train()
    for line in range(20):
        scene.stand(waits=IN_COLLECTIVE, place=PLACE + line % 2)
        scene.run(0.3)
    assert scene.kinds() == {0: "busy"}


def test_a_backward_pass_that_computes_does_not_wait() -> None:
    scene = Scene(ranks=2)
    scene.train()
    for rank in (0, 1):
        scene.stand(rank, waits=IN_BACKWARD)
    for tenth in range(40):
        scene.system.efforts[1000] = Effort(cpu_s=tenth * 0.1)
        scene.run(0.1)
    assert scene.kinds() == {0: "busy", 1: "waits"}


def test_one_that_reads_or_writes_is_busy() -> None:
    """A save to slow storage that nobody told us of."""
    scene = Scene(ranks=2)
    scene.train()
    for mega in range(40):
        scene.system.efforts[1000] = Effort(moved_bytes=mega << 20)
        scene.run(0.1)
    assert scene.kinds() == {0: "busy", 1: "still"}


def test_a_beat_that_is_late_once_is_no_lock() -> None:
    scene = Scene()
    scene.train()
    scene.run(8.0)
    scene.beating[0] = False
    scene.run(1.5)
    assert scene.kinds() == {0: "still"}
    scene.run(10.0)
    assert scene.kinds() == {0: "gil"}


def test_one_that_writes_now_and_then_is_busy_between_two_writes() -> None:
    """As to a slow storage: longer and longer apart, but it goes on."""
    scene = Scene()
    scene.train()
    scene.run(LOOK_EVERY_S)
    for mega, gap_s in enumerate((0.2, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0), 1):
        scene.system.efforts[1000] = Effort(moved_bytes=mega << 20)
        scene.run(gap_s)
    assert {kind for stalls in scene.told for kind in [s.kind for s in stalls]} == {"busy"}
    scene.run(8)
    assert scene.kinds() == {0: "still"}, "it does not write any more"


def test_what_was_written_before_it_fell_silent_does_not_make_it_busy() -> None:
    scene = Scene()
    scene.train()
    scene.system.efforts[1000] = Effort(moved_bytes=1 << 20)
    scene.run(LIMIT_S + 0.1)
    assert scene.kinds() == {0: "still"}


@pytest.mark.parametrize("state", ["D", "t"], ids=["storage", "debugger"])
def test_a_rank_whose_storage_does_not_answer_or_that_is_debugged_is_busy(state: str) -> None:
    scene = Scene()
    scene.train()
    scene.system.states[1000] = state
    scene.beating[0] = False
    scene.run(LIMIT_S + 0.1)
    assert scene.kinds() == {0: "busy"}


def test_where_it_stands_is_told_by_the_line_the_function_or_not_at_all() -> None:
    scene = Scene(ranks=3)
    scene.train()
    for line in range(19):
        scene.stand(1, codes=1, place=PLACE + line % 3)
        scene.stand(2, codes=2, place=PLACE + line % 3 * LINES)
        scene.run(0.1)
    assert [stall.place for stall in scene.stalls()] == [PLACE, 3 * LINES, 0]


def test_after_many_times_its_deadline_it_is_overdue() -> None:
    scene = Scene()
    scene.train()
    scene.run(OVERDUE_FLOOR_S - 1.0)
    assert [stall.overdue for stall in scene.stalls()] == [False]
    scene.run(2.0)
    assert [stall.overdue for stall in scene.stalls()] == [True]


def test_what_the_user_said_makes_it_overdue_at_once() -> None:
    scene = Scene(rank_heartbeat_timeout=5.0)
    scene.train()
    scene.run(4.9)
    assert scene.told == []
    scene.run(0.2)
    assert [(stall.limit_s, stall.overdue) for stall in scene.stalls()] == [(5.0, True)]


# ---- the first step ----------------------------------------------------------------------------


def test_a_script_may_take_half_an_hour_to_its_first_step() -> None:
    scene = Scene()
    scene.stand()
    scene.run(1799.0)
    assert scene.told == []
    scene.run(2.0)
    assert [stall.where for stall in scene.stalls()] == [FIRST_STEP]


def test_a_script_that_takes_no_steps_at_all_may_run_for_ever() -> None:
    scene = Scene()
    for line in range(20):
        scene.stand(waits=IN_COLLECTIVE, place=PLACE + line)
        scene.run(600.0)
    assert scene.told == []


def test_when_it_is_known_how_long_the_first_step_takes_that_decides() -> None:
    scene = Scene(before=Paces(STEP_S, {FIRST_STEP: 10.0}))
    scene.run(99.0)
    assert scene.told == []
    scene.run(2.0)
    assert [stall.where for stall in scene.stalls()] == [FIRST_STEP]


def test_after_a_long_restore_the_first_step_has_its_time_again() -> None:
    scene = Scene(before=Paces(STEP_S, {FIRST_STEP: 5.0}))
    place = scene.enter("restore")
    scene.run(250.0)
    scene.leave(place, "restore", 250.0)
    scene.run(59.0)
    assert scene.told == []
    scene.run(2.0)
    assert [stall.where for stall in scene.stalls()] == [FIRST_STEP]


def test_what_the_user_said_about_the_first_step_holds_from_the_begin() -> None:
    scene = Scene(initial_rank_heartbeat_timeout=30.0)
    for _ in range(31):
        scene.vitals[0].mark(DATA, scene.now)
        scene.run(1.0)
    assert [(stall.where, stall.overdue) for stall in scene.stalls()] == [(FIRST_STEP, True)]


def test_how_long_the_first_step_took_is_told() -> None:
    scene = Scene()
    scene.run(30.0)
    scene.train()
    news = scene.detector.news()
    assert news is not None
    assert news.longest_s[FIRST_STEP] == pytest.approx(30.0, abs=0.1)


def test_a_process_that_warms_up_has_more_time() -> None:
    scene = Scene()
    scene.train(steps=2)
    scene.run(9.5)
    assert scene.told == []
    scene.run(1.0)
    assert scene.kinds() == {0: "still"}


def test_what_a_process_took_to_warm_up_is_not_learnt() -> None:
    scene = Scene()
    scene.vitals[0].mark(FORWARD, scene.now)
    scene.run(300.0)
    scene.train()
    news = scene.detector.news()
    assert news is not None
    assert news.longest_s["forward"] < 0.1
    scene.run(LIMIT_S + 0.1)
    assert scene.kinds() == {0: "still"}


# ---- sections ----------------------------------------------------------------------------------


def test_a_section_has_a_deadline_of_its_own() -> None:
    scene = Scene()
    scene.train()
    scene.section("eval", 4.0)
    assert scene.told == [], "it was never seen to end"
    scene.enter("eval")
    scene.run(19.0)
    assert scene.told == []
    scene.run(1.5)
    assert [stall.where for stall in scene.stalls()] == ["eval"]


def test_the_time_in_a_section_is_not_learnt_as_a_phase() -> None:
    scene = Scene()
    scene.train()
    scene.section("eval", 100.0)
    scene.run(LIMIT_S + 0.1)
    assert [stall.where for stall in scene.stalls()] == ["between"]


def test_a_slow_save_is_no_hang() -> None:
    scene = Scene()
    scene.train()
    scene.section("checkpoint", 1.0)
    scene.enter("checkpoint")
    scene.run(290.0)
    assert scene.told == []
    scene.run(15.0)
    assert [stall.where for stall in scene.stalls()] == ["checkpoint"]


@pytest.mark.parametrize("outer_first", [True, False])
def test_of_two_open_sections_the_one_that_expired_decides(outer_first: bool) -> None:
    """NVRx: the last one that was checked decided, so an expired one was overlooked."""
    limits = {"outer": 5.0, "inner": 500.0} if outer_first else {"outer": 500.0, "inner": 5.0}
    scene = Scene(rank_section_timeouts=limits)
    scene.train()
    scene.enter("outer")
    scene.enter("inner")
    scene.run(4.9)
    assert scene.told == []
    scene.run(0.2)
    assert [stall.where for stall in scene.stalls()] == ["outer" if outer_first else "inner"]


def test_sections_that_overlap_are_left_in_any_order() -> None:
    scene = Scene(rank_section_timeouts={"a": 5.0, "b": 8.0})
    scene.train()
    first = scene.enter("a")
    scene.run(3.0)
    second = scene.enter("b")
    scene.leave(first, "a", 3.0)
    scene.run(4.9)
    assert scene.told == [], "of a nothing is left"
    scene.run(3.2)
    assert [stall.where for stall in scene.stalls()] == ["b"]
    scene.leave(second, "b", 8.1)
    scene.run(0.3)
    assert scene.stalls() == ()


def test_when_all_sections_are_closed_the_rank_has_its_time_again() -> None:
    """NVRx: `end_all_sections` did nothing, and the rank was killed."""
    scene = Scene(rank_section_timeouts={"a": 2.0, "b": 2.0, "c": 2.0})
    scene.train()
    places = [(scene.enter(name), name) for name in "abc"]
    scene.run(1.9)
    for place, name in reversed(places):
        scene.leave(place, name, 1.9)
    scene.run(1.4)
    assert scene.told == []


def test_within_a_section_around_the_training_each_phase_has_its_deadline() -> None:
    """`with holdfast.section("epoch")`, hours long, must not hide a hang."""
    scene = Scene()
    scene.enter("epoch")
    scene.train()
    scene.run(LIMIT_S + 0.1)
    assert [stall.where for stall in scene.stalls()] == ["between"]


def test_within_a_section_of_the_epoch_an_evaluation_has_its_own() -> None:
    scene = Scene()
    scene.enter("epoch")
    scene.train()
    scene.enter("eval")
    scene.run(500.0)
    assert scene.told == []


def test_a_section_never_seen_to_end_is_well_while_there_are_signs_within_it() -> None:
    scene = Scene()
    scene.train()
    scene.enter("evaluation of everything")
    for _ in range(50):
        scene.vitals[0].mark(DATA, scene.now)
        scene.run(50.0)
    assert scene.told == []


def test_a_section_of_another_thread_does_not_hide_the_training_thread() -> None:
    scene = Scene()
    scene.train()
    scene.enter("upload", own=OTHER_THREAD)
    scene.run(LIMIT_S + 0.1)
    assert [stall.where for stall in scene.stalls()] == ["between"]


def test_a_section_of_another_thread_that_expires_says_nothing_of_the_training_thread() -> None:
    scene = Scene(rank_section_timeouts={"upload": 5.0})
    scene.train()
    scene.enter("upload", own=OTHER_THREAD)
    for _ in range(60):
        scene.vitals[0].mark(DATA, scene.now)
        scene.stand(waits=IN_COLLECTIVE)
        scene.run(0.1)
    assert scene.kinds() == {0: "busy"}


@pytest.mark.parametrize("name", ["step", "a name that is far too long for the vitals to keep"])
def test_the_users_limit_is_found_by_the_users_name(name: str) -> None:
    scene = Scene(rank_section_timeouts={name: 3.0})
    scene.train()
    scene.enter(name)
    scene.run(3.2)
    assert [stall.limit_s for stall in scene.stalls()] == [3.0]


# ---- stopped -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "checkpoint"])
def test_a_stopped_rank_is_told_of_soon_wherever_it_is(inside: str) -> None:
    scene = Scene()
    if inside:
        scene.train()
        scene.enter(inside)
    scene.system.states[1000] = "T"
    scene.beating[0] = False
    scene.run(LOOK_EVERY_S + HANG_BASE_S + 0.2)
    assert scene.kinds() == {0: "stopped"}


def test_a_rank_that_was_stopped_for_a_moment_is_not() -> None:
    scene = Scene()
    for _ in range(10):
        scene.system.states[1000] = "T"
        scene.run(1.2)
        scene.system.states[1000] = "S"
        scene.run(1.2)
    assert scene.told == []


# ---- the agent itself --------------------------------------------------------------------------


def test_an_agent_that_was_suspended_gives_everybody_their_time_again() -> None:
    scene = Scene(ranks=2)
    scene.train()
    scene.system.time += 3600.0
    scene.run(LIMIT_S - 0.2)
    assert scene.told == []
    scene.run(0.4)
    assert scene.kinds() == {0: "still", 1: "still"}


def test_an_agent_that_was_suspended_with_its_stopped_ranks_does_not_blame_them() -> None:
    """Slurm suspends a whole job."""
    scene = Scene()
    scene.train()
    scene.system.states[1000] = "T"
    scene.run(0.5)
    scene.system.time += 3600.0
    scene.run(0.1)
    scene.system.states[1000] = "S"
    scene.vitals[0].mark(DATA, scene.now)
    scene.run(1.0)
    assert scene.told == []


# ---- what is told of how long things take ------------------------------------------------------


def test_news_are_told_once_and_again_when_they_grow() -> None:
    scene = Scene()
    scene.train()
    news = scene.detector.news()
    assert news is not None
    assert news.step_s == pytest.approx(STEP_S)
    assert scene.detector.news() is None
    scene.vitals[0].mark(FORWARD, scene.now)
    scene.run(1.0)
    scene.vitals[0].mark(BETWEEN, scene.now)
    again = scene.detector.news()
    assert again is not None
    assert list(again.longest_s) == ["forward"]


def test_what_earlier_rounds_and_alarms_say_holds_in_the_next() -> None:
    scene = Scene()
    scene.train()
    scene.begin_round(between=1)
    scene.train()
    scene.run(4 * LIMIT_S - 0.2)
    assert scene.told == []
    scene.run(0.4)
    assert scene.kinds() == {0: "still"}


# ---- what a thread did ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "seconds", "expected"),
    [
        (Effort(3.0, 10), 2.0, Activity(1.0, moved=False)),
        (Effort(1.0, 11), 2.0, Activity(0.0, moved=True)),
        (Effort(3.0, 11), 0.0, Activity(0.0, moved=True)),
    ],
)
def test_what_was_done_lately_is_the_difference(
    after: Effort, seconds: float, expected: Activity
) -> None:
    vitals = Vitals(memoryview(bytearray(VITALS_BYTES)))
    one = WatchedRank(Rank(0), 1, vitals, 0.0, looked_at=50.0, effort=Effort(1.0, 10))
    vitals.mark(BETWEEN, 60.0)
    assert one.activity(vitals.read(), after, 50.0 + seconds) == expected
    assert one.activity(vitals.read(), after, 61.0) == Activity()
