"""When a rank is late, how it stands there and what of it moves. Time is given: nothing here waits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.agent.life import LOCKED_S, RECENT_S, Counters
from holdfast.agent.stall_detector import (
    AFTER_END,
    LOOK_COST,
    LOOK_EVERY_S,
    REPEAT_MOST_S,
    REPEAT_S,
    Condition,
    StallDetector,
)
from holdfast.core.hangs.deadlines import (
    ENDED_LATE_S,
    LATE_FLOOR_S,
    LATE_UNKNOWN_S,
    SECTION_FLOOR_S,
)
from holdfast.messages.hangs import FIRST_STEP, SILENT_S, HangTerms, Pause, Stall
from holdfast.messages.records import Part
from holdfast.messages.units import Rank, RoundNumber
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
LINE = 10
PLACE = "train.py:10 (step)"
OTHER_THREAD = False


class Timer:
    def __init__(self, at: float, act: Callable[[], None]) -> None:
        self.at, self.act, self.cancelled = at, act, False

    def cancel(self) -> None:
        self.cancelled = True


class FakeObserver:
    """Reads what a test set for a process."""

    def __init__(self, system: FakeSystem, pid: int) -> None:
        self.system, self.pid = system, pid

    def sample(self, thread: int, now: float, strictly: bool, locks: bool) -> Counters:
        self.system.samples.append((self.pid, now))
        more = dict(self.system.counters.get(self.pid, {}))
        more["locked"] = locks and self.pid in self.system.locked
        return Counters(**more)

    def is_at_lock(self, thread: int) -> bool:
        return self.pid in self.system.locked


class FakeSystem:
    """A world in which nothing happens by itself."""

    def __init__(self) -> None:
        self.time = 100.0
        self.timers: list[Timer] = []
        self.states: dict[int, str] = {}
        self.frozen: set[int] = set()
        self.locked: set[int] = set()
        self.counters: dict[int, dict[str, Any]] = {}
        self.samples: list[tuple[int, float]] = []
        """Who was looked at closely, and when."""

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, act: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.time + delay_s, act))
        return self.timers[-1]

    def process_state(self, pid: int) -> str:
        return self.states.get(pid, "S")

    def is_frozen(self, pid: int) -> bool:
        return pid in self.frozen

    def observer(self, pid: int, store_port: int) -> FakeObserver:
        return FakeObserver(self, pid)


class Scene:
    """Ranks that a test moves by hand, and the detector that looks at them."""

    def __init__(self, ranks: int = 1, **terms: Any) -> None:
        self.system = FakeSystem()
        self.told: list[tuple[Stall, ...]] = []
        self.told_at: list[float] = []
        self.pauses: list[Pause] = []
        self.detector = StallDetector(HangTerms(**terms), self._hear, self.system)
        self.begin_round(ranks)

    def _hear(self, stalls: tuple[Stall, ...], pauses: tuple[Pause, ...]) -> None:
        self.told.append(stalls)
        self.told_at.append(self.now)
        self.pauses += pauses

    def begin_round(self, ranks: int = 1) -> None:
        self.vitals = [Vitals(memoryview(bytearray(VITALS_BYTES))) for _ in range(ranks)]
        self.beating = [True] * ranks
        self.standing: list[dict[str, Any]] = [{} for _ in range(ranks)]
        part = Part(
            round=RoundNumber(1),
            first_rank=Rank(0),
            slots=len(self.vitals),
            group_rank=0,
            group_world_size=1,
            world_size=len(self.vitals),
            first_role_rank=0,
            role_size=1,
            store_address="",
            store_port=0,
            restarts=0,
            max_restarts=0,
        )
        self.detector.begin_round(part)
        for rank, vitals in enumerate(self.vitals):
            self.detector.add(Rank(rank), 1000 + rank, vitals)

    @property
    def now(self) -> float:
        return self.system.time

    def stand(self, rank: int = 0, waits: int = NO, line: int = LINE, place: str = PLACE) -> None:
        """How the beats see the rank from now on."""
        self.standing[rank] = {"waits": waits, "line": line, "place": place}
        self._beat(rank)

    def _beat(self, rank: int) -> None:
        if self.beating[rank]:
            how = {"waits": NO, "line": LINE, "place": PLACE, **self.standing[rank]}
            vitals, place = self.vitals[rank], how.pop("place")
            vitals.beat(self.now, codes=1, **how)
            vitals.note_place(place, vitals.marks)

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


# ---- when it is late -----------------------------------------------------------------------------


def test_a_rank_that_trains_is_never_reported_nor_looked_at_closely() -> None:
    scene = Scene(ranks=3)
    scene.train(steps=200)
    assert scene.told == []
    assert scene.system.samples == []


@pytest.mark.parametrize("step_s", [0.02, 0.3, 1.2, 6.0])
def test_a_rank_is_late_soon_after_the_usual_time_of_its_phase(step_s: float) -> None:
    scene = Scene(ranks=2)
    scene.train(step_s=step_s)
    late_s = max(1.0, 0.5 + 1.2 * step_s / 3)
    until = scene.now + late_s
    while scene.now < until - 0.05:
        scene.run(min(0.1, until - 0.05 - scene.now))
        scene.vitals[1].mark(DATA, scene.now)
    assert scene.told == []
    scene.run(0.1)
    (stall,) = scene.stalls()
    assert (stall.rank, stall.kind, stall.where, stall.place) == (0, "elsewhere", "between", PLACE)
    assert stall.for_s == pytest.approx(late_s, abs=0.1)


def test_a_look_that_raises_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.train()

    def unreadable(pid: int) -> str:
        raise OSError("it cannot be read")

    with monkeypatch.context() as patched:
        patched.setattr(scene.system, "process_state", unreadable)
        with pytest.raises(OSError, match="cannot be read"):
            scene.run(LATE_FLOOR_S)
    scene.run(LATE_FLOOR_S + 1.0)
    assert scene.kinds() == {0: "elsewhere"}


def test_a_long_wait_in_the_past_does_not_make_the_next_one_late_later() -> None:
    scene = Scene()
    scene.train()
    scene.vitals[0].mark(BETWEEN, scene.now)
    scene.run(500.0)
    scene.train()
    scene.told.clear()
    scene.run(LATE_FLOOR_S + 0.1)
    assert [stall.rank for stall in scene.stalls()] == [0]


def test_a_rank_that_waits_in_a_collective_for_a_second_is_reported_by_then() -> None:
    scene = Scene()
    scene.train(step_s=2.4)
    scene.stand(waits=IN_COLLECTIVE, line=77)
    began = scene.now
    scene.run(1.1)
    assert scene.kinds() == {0: "waits"}
    assert scene.told_at[0] - began == pytest.approx(1.0, abs=0.1)


def test_when_it_moves_on_that_is_reported_too() -> None:
    scene = Scene()
    scene.train()
    scene.run(LATE_FLOOR_S + 0.1)
    assert scene.kinds() == {0: "elsewhere"}
    scene.vitals[0].mark(DATA, scene.now)
    scene.run(0.3)
    assert scene.stalls() == ()


def test_nobody_is_reported_without_detection() -> None:
    scene = Scene(detect=False)
    scene.train()
    scene.run(10_000)
    assert scene.told == []
    assert scene.system.timers == []
    assert scene.detector.condition(Rank(0)) == Condition(False, False, None)


def test_a_rank_that_is_gone_is_not_looked_at_any_more() -> None:
    scene = Scene(ranks=2)
    scene.train()
    scene.run(LATE_FLOOR_S + 0.1)
    scene.detector.remove(Rank(0))
    scene.run(0.5)
    assert scene.kinds() == {1: "elsewhere"}
    assert scene.detector.condition(Rank(0)) is None
    scene.detector.stop()
    scene.run(100)
    assert scene.kinds() == {1: "elsewhere"}


def test_looks_that_cost_much_come_less_often() -> None:
    scene = Scene()
    scene.train()
    scene.system.counters[1000] = {"took_s": 0.02}
    scene.run(LATE_FLOOR_S + 20.0)
    between = [b - a for (_, a), (_, b) in itertools.pairwise(scene.system.samples)]
    assert min(between) >= 0.02 / LOOK_COST - 0.01


# ---- what is reported again ----------------------------------------------------------------------


def test_what_stands_is_reported_again_ever_more_seldom() -> None:
    scene = Scene()
    scene.train()
    scene.run(SILENT_S + LATE_FLOOR_S + 1.0)
    scene.told.clear()
    scene.told_at.clear()
    scene.run(120.0)
    gaps = [b - a for a, b in itertools.pairwise(scene.told_at)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(REPEAT_MOST_S, abs=LOOK_EVERY_S)
    assert {stall.rank for told in scene.told for stall in told} == {0}


def test_where_a_rank_may_be_silent_for_less_that_is_reported_at_once() -> None:
    scene = Scene(hang_after=2.0)
    scene.train()
    scene.run(LATE_FLOOR_S + 2.2)
    (stall,) = scene.stalls()
    assert 2.0 <= stall.still_s < 2.3


def test_a_rank_that_falls_still_and_one_that_moves_again_are_reported_at_once() -> None:
    scene = Scene()
    scene.train()
    scene.run(LATE_FLOOR_S + 0.1)
    scene.run(SILENT_S + 0.5)
    assert [stall.still_s >= SILENT_S for stall in scene.stalls()] == [True]
    scene.system.counters[1000] = {"ran_ns": 1}
    told = len(scene.told)
    scene.run(0.3)
    (stall,) = scene.stalls()
    assert (len(scene.told), stall.signs, stall.still_s) == (told + 1, ("cpu",), 0.0)
    scene.run(RECENT_S + 0.5)
    assert [stall.signs for stall in scene.stalls()] == [()]


def test_a_rank_that_goes_back_and_forth_is_not_reported_each_time() -> None:
    scene = Scene()
    scene.train()
    for line in range(100):
        scene.stand(line=line % 3 + 1, place=f"eval.py:{line % 3 + 1} (evaluate)")
        scene.run(0.1)
    assert len(scene.told) <= 5
    assert [stall.signs for stall in scene.stalls()] == [("position",)]


def test_a_new_place_where_it_stays_is_reported() -> None:
    scene = Scene()
    scene.train()
    scene.run(LATE_FLOOR_S + 0.1)
    scene.stand(line=99, place="eval.py:33 (upload)")
    scene.run(1.5)
    assert [stall.place for stall in scene.stalls()] == ["eval.py:33 (upload)"]


# ---- how it stands -----------------------------------------------------------------------------


def test_each_way_to_stand_is_told_apart() -> None:
    scene = Scene(ranks=8)
    scene.train()
    scene.system.states[1000] = "T"
    scene.system.frozen.add(1001)
    scene.system.locked = {1005}
    scene.beating[0] = scene.beating[1] = scene.beating[2] = False
    scene.stand(3, waits=IN_COLLECTIVE)
    scene.stand(4, waits=IN_BACKWARD)
    scene.detector.script_ended(Rank(6))
    scene.run(3.5)
    ways = {0: "stopped", 1: "stopped", 2: "gil", 3: "waits", 4: "waits"}
    assert scene.kinds() == {**ways, 5: "locked", 6: "ended", 7: "elsewhere"}


def test_one_that_moves_from_collective_to_collective_does_not_wait() -> None:
    scene = Scene()
    scene.train()
    for line in range(20):
        scene.stand(waits=IN_COLLECTIVE, line=LINE + line % 2)
        scene.run(0.3)
    assert scene.kinds() == {0: "elsewhere"}


def test_a_backward_pass_that_computes_does_not_wait() -> None:
    scene = Scene(ranks=2)
    scene.train()
    for rank in (0, 1):
        scene.stand(rank, waits=IN_BACKWARD)
    for tenth in range(40):
        scene.system.counters[1000] = {"ran_ns": tenth * 100_000_000}
        scene.run(0.1)
    assert scene.kinds() == {0: "elsewhere", 1: "waits"}
    assert [stall.signs for stall in scene.stalls()] == [("cpu",), ()]


def test_a_beat_that_is_late_once_is_no_lock() -> None:
    scene = Scene()
    scene.train()
    scene.run(8.0)
    scene.beating[0] = False
    scene.run(1.5)
    assert scene.kinds() == {0: "elsewhere"}
    scene.run(10.0)
    assert scene.kinds() == {0: "gil"}


def test_a_process_that_never_beat_keeps_no_gil() -> None:
    scene = Scene()
    scene.beating[0] = False
    scene.run(LATE_UNKNOWN_S + 5.0)
    assert scene.kinds() == {0: "elsewhere"}


@pytest.mark.parametrize(("state", "sign"), [("D", "io"), ("t", "position")])
def test_storage_that_does_not_answer_and_a_debugger_are_signs_of_life(
    state: str, sign: str
) -> None:
    scene = Scene()
    scene.train()
    scene.system.states[1000] = state
    scene.system.counters[1000] = {"state": state}
    scene.beating[0] = False
    scene.run(60.0)
    (stall,) = scene.stalls()
    assert (stall.kind, stall.signs, stall.still_s) == ("elsewhere", (sign,), 0.0)


def test_locks_are_proven_soon_after_the_rank_is_late() -> None:
    """Looks begin as soon as it waits for a lock, so that a deadlock is repaired within two
    seconds."""
    scene = Scene()
    scene.train()
    began = scene.now
    scene.system.locked = {1000}
    scene.run(2.0)
    assert scene.kinds() == {0: "locked"}
    locked_at = next(
        at
        for at, told in zip(scene.told_at, scene.told, strict=True)
        if told and told[0].kind == "locked"
    )
    assert LOCKED_S < locked_at - began < 1.6
    condition = scene.detector.condition(Rank(0))
    assert condition is not None
    assert (condition.ended, condition.locked) == (False, True)
    assert condition.still_s == pytest.approx(1.5, abs=0.3)


def test_a_rank_that_waits_for_others_is_not_locked() -> None:
    scene = Scene()
    scene.train()
    scene.stand(waits=IN_COLLECTIVE)
    scene.system.locked = {1000}
    scene.run(5.0)
    assert scene.kinds() == {0: "waits"}


def test_what_an_examination_does_to_a_rank_is_no_sign_of_life() -> None:
    scene = Scene()
    scene.train()
    scene.run(4.0)
    with scene.detector.disturbing():
        scene.system.counters[1000] = {"ran_ns": 1_000_000}
        scene.run(0.5)
        scene.system.counters[1000] = {"ran_ns": 2_000_000}
    scene.run(3.0)
    (stall,) = scene.stalls()
    assert (stall.signs, stall.still_s > 4.0) == ((), True)
    scene.system.counters[1000] = {"ran_ns": 2_000_001}
    scene.run(0.3)
    assert [stall.signs for stall in scene.stalls()] == [("cpu",)]


# ---- the end of the script -----------------------------------------------------------------------


def test_a_rank_whose_script_has_ended_stays_watched() -> None:
    scene = Scene()
    scene.train()
    scene.detector.script_ended(Rank(0))
    scene.run(ENDED_LATE_S - 0.1)
    assert scene.told == []
    scene.beating[0] = False
    scene.run(10.0)
    (stall,) = scene.stalls()
    assert (stall.kind, stall.where, stall.place) == ("ended", AFTER_END, "")
    assert stall.still_s == pytest.approx(stall.for_s - ENDED_LATE_S, abs=0.1)
    condition = scene.detector.condition(Rank(0))
    assert condition is not None
    assert (condition.ended, condition.locked) == (True, False)
    assert condition.still_s == pytest.approx(10.0, abs=0.5)


def test_a_process_that_still_uploads_after_its_script_shows_signs_of_life() -> None:
    scene = Scene()
    scene.train()
    scene.detector.script_ended(Rank(0))
    for count in range(40):
        scene.system.counters[1000] = {"others_ns": {7: count}}
        scene.run(0.5)
    (stall,) = scene.stalls()
    assert (stall.kind, stall.signs) == ("ended", ("cpu",)), "however little it runs"


# ---- the first step ----------------------------------------------------------------------------


def test_before_its_first_step_a_rank_has_some_seconds_at_each_line() -> None:
    scene = Scene()
    for line in range(1, 30):
        scene.stand(line=line)
        scene.run(LATE_UNKNOWN_S - 0.3)
    assert scene.told == []
    scene.run(0.5)
    assert [stall.where for stall in scene.stalls()] == [FIRST_STEP]


def test_what_the_user_said_about_the_first_step_holds_from_the_begin() -> None:
    scene = Scene(initial_rank_heartbeat_timeout=30.0)
    for line in range(301):
        scene.stand(line=line + 1)
        scene.run(0.1)
    assert [stall.where for stall in scene.stalls()] == [FIRST_STEP]
    assert scene.told_at[0] == pytest.approx(130.0, abs=0.1)


# ---- sections ----------------------------------------------------------------------------------


def test_a_section_has_twice_its_usual_time() -> None:
    scene = Scene()
    scene.train()
    for _ in range(3):
        scene.section("eval", 4.0)
    assert scene.told == [], "it was never seen to end"
    scene.enter("eval")
    scene.run(7.9)
    assert scene.told == []
    scene.run(0.2)
    assert [stall.where for stall in scene.stalls()] == ["eval"]


def test_one_slow_save_does_not_make_the_next_late_later() -> None:
    scene = Scene()
    scene.train()
    for took_s in (1.0, 200.0, 1.0, 1.0):
        scene.section("checkpoint", took_s)
    scene.told.clear()
    scene.enter("checkpoint")
    scene.run(SECTION_FLOOR_S + 0.1)
    assert [stall.where for stall in scene.stalls()] == ["checkpoint"]


def test_the_time_in_a_section_is_not_learnt_as_a_phase() -> None:
    scene = Scene()
    scene.train()
    scene.section("eval", 4.0)
    scene.run(LATE_FLOOR_S + 0.1)
    assert [stall.where for stall in scene.stalls()] == ["between"]


@pytest.mark.parametrize("outer_first", [True, False])
def test_of_two_open_sections_the_one_that_expired_decides(outer_first: bool) -> None:
    """NVRx: the last one that was checked decided, so an expired one was overlooked."""
    limits = {"outer": 3.0, "inner": 500.0} if outer_first else {"outer": 500.0, "inner": 3.0}
    scene = Scene(rank_section_timeouts=limits)
    scene.train()
    scene.enter("outer")
    scene.enter("inner")
    scene.run(2.9)
    assert scene.told == []
    scene.run(0.2)
    assert [stall.where for stall in scene.stalls()] == ["outer" if outer_first else "inner"]


def test_sections_that_overlap_are_left_in_any_order() -> None:
    scene = Scene(rank_section_timeouts={"a": 2.0, "b": 3.0})
    scene.train()
    first = scene.enter("a")
    scene.run(1.0)
    second = scene.enter("b")
    scene.leave(first, "a", 1.0)
    scene.run(2.9)
    assert scene.told == [], "of a nothing is left"
    scene.run(0.2)
    assert [stall.where for stall in scene.stalls()] == ["b"]
    scene.leave(second, "b", 3.1)
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
    scene.run(0.9)
    assert scene.told == []


def test_within_a_section_around_the_training_each_phase_has_its_limit() -> None:
    """`with holdfast.section("epoch")`, hours long, must not hide a hang."""
    scene = Scene()
    scene.enter("epoch")
    scene.train()
    scene.run(LATE_FLOOR_S + 0.1)
    assert [stall.where for stall in scene.stalls()] == ["between"]


def test_within_a_section_of_the_epoch_an_evaluation_has_its_own() -> None:
    scene = Scene()
    scene.enter("epoch")
    scene.train()
    scene.enter("eval")
    scene.run(SECTION_FLOOR_S - 0.1)
    assert scene.told == []


def test_a_section_never_seen_to_end_is_well_while_there_are_marks_within_it() -> None:
    scene = Scene()
    scene.train()
    scene.enter("evaluation of everything")
    for _ in range(50):
        scene.vitals[0].mark(DATA, scene.now)
        scene.run(SECTION_FLOOR_S - 0.1)
    assert scene.told == []


def test_a_section_of_another_thread_does_not_hide_the_training_thread() -> None:
    scene = Scene()
    scene.train()
    scene.enter("upload", own=OTHER_THREAD)
    scene.run(LATE_FLOOR_S + 0.1)
    assert [stall.where for stall in scene.stalls()] == ["between"]


def test_a_section_of_another_thread_makes_a_rank_late_only_by_the_users_word() -> None:
    scene = Scene(ranks=2, rank_section_timeouts={"upload": 15.0})
    scene.train()
    scene.enter("upload", rank=0, own=OTHER_THREAD)
    scene.enter("download", rank=1, own=OTHER_THREAD)
    for tenth in range(160):
        for vitals in scene.vitals:
            vitals.mark(DATA, scene.now)
        scene.run(0.1)
        assert scene.told == [] or tenth > 145
    assert [(stall.rank, stall.kind, stall.where) for stall in scene.stalls()] == [
        (0, "elsewhere", "upload")
    ]


@pytest.mark.parametrize("name", ["step", "a name that is far too long for the vitals to keep"])
def test_the_users_limit_is_found_by_the_users_name(name: str) -> None:
    scene = Scene(rank_section_timeouts={name: 3.0})
    scene.train()
    scene.enter(name)
    scene.run(2.9)
    assert scene.told == []
    scene.run(0.3)
    assert [stall.rank for stall in scene.stalls()] == [0]


@pytest.mark.parametrize("name", ["rank_heartbeat_timeout", "rank_out_of_section_timeout"])
def test_a_limit_of_the_user_that_is_shorter_makes_a_rank_late(name: str) -> None:
    terms: dict[str, Any] = {name: 0.6}
    scene = Scene(**terms)
    scene.train()
    scene.run(0.7)
    assert [stall.where for stall in scene.stalls()] == ["between"]


# ---- stopped -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "checkpoint"])
def test_a_stopped_rank_is_reported_at_once_wherever_it_is(inside: str) -> None:
    scene = Scene()
    if inside:
        scene.train()
        scene.enter(inside)
    scene.system.states[1000] = "T"
    scene.beating[0] = False
    scene.run(LOOK_EVERY_S + 0.05)
    assert scene.kinds() == {0: "stopped"}
    (stall,) = scene.stalls()
    assert stall.for_s == 0.0
    scene.run(REPEAT_S + 0.3)
    (stall,) = scene.stalls()
    assert stall.for_s == pytest.approx(2.0, abs=0.3)
    scene.system.states[1000] = "S"
    scene.beating[0] = True
    scene.vitals[0].mark(DATA, scene.now)
    scene.run(0.3)
    assert scene.stalls() == ()


def test_a_frozen_rank_is_reported_when_its_beats_are_missed() -> None:
    scene = Scene()
    scene.train()
    scene.system.frozen.add(1000)
    scene.beating[0] = False
    scene.run(0.8)
    assert scene.kinds() == {0: "stopped"}


# ---- the agent itself --------------------------------------------------------------------------


def test_an_agent_that_was_suspended_gives_everybody_their_time_again() -> None:
    scene = Scene(ranks=2)
    scene.train()
    scene.system.time += 3600.0
    scene.run(LATE_FLOOR_S - 0.2)
    assert scene.told == []
    scene.run(0.4)
    assert scene.kinds() == {0: "elsewhere", 1: "elsewhere"}
    assert scene.pauses == []


def test_an_agent_that_was_suspended_with_its_stopped_ranks_does_not_blame_them() -> None:
    """Slurm suspends a whole job."""
    scene = Scene()
    scene.train()
    scene.system.time += 3600.0
    scene.system.states[1000] = "T"
    scene.run(0.1)
    scene.system.states[1000] = "S"
    scene.vitals[0].mark(DATA, scene.now)
    scene.run(0.9)
    assert scene.told == []


# ---- pauses that end by themselves ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["a mark", "cpu", "position", "the end of the script"])
def test_a_pause_that_ends_by_itself_is_reported_with_its_place(how: str) -> None:
    scene = Scene()
    scene.train()
    scene.stand(line=33, place="eval.py:33 (upload)")
    scene.run(21.0)
    assert scene.pauses == []
    if how == "a mark":
        scene.vitals[0].mark(DATA, scene.now)
    elif how == "cpu":
        scene.system.counters[1000] = {"ran_ns": 1}
    elif how == "position":
        scene.stand(line=34)
    else:
        scene.detector.script_ended(Rank(0))
    scene.run(0.5)
    (pause,) = scene.pauses
    assert pause.place == "eval.py:33 (upload)"
    assert pause.still_s == pytest.approx(20.0, abs=0.3)
    scene.run(0.5)
    assert len(scene.pauses) == 1


def test_a_rank_that_waited_for_others_or_was_stopped_teaches_nothing() -> None:
    scene = Scene(ranks=2)
    scene.train()
    scene.stand(0, waits=IN_COLLECTIVE)
    scene.system.states[1001] = "T"
    scene.run(20.0)
    scene.system.states.clear()
    for vitals in scene.vitals:
        vitals.mark(DATA, scene.now)
    scene.run(0.5)
    assert scene.stalls() == ()
    assert scene.pauses == []


@pytest.mark.parametrize("how", ["its end", "the end of the round"])
def test_a_pause_that_was_ended_teaches_nothing(how: str) -> None:
    scene = Scene()
    scene.train()
    scene.run(20.0)
    if how == "its end":
        scene.detector.remove(Rank(0))
    else:
        scene.detector.stop()
    scene.begin_round()
    scene.train()
    scene.run(5.0)
    assert scene.pauses == []


# ---- what is told of how long things take ------------------------------------------------------


def test_the_longest_sections_are_told_once_and_again_when_they_grow() -> None:
    scene = Scene()
    scene.train()
    scene.section("eval", 2.0)
    news = scene.detector.news()
    assert news is not None
    assert news.step_s == pytest.approx(STEP_S)
    assert news.longest_s == {"eval": 2.0}
    assert scene.detector.news() is None
    scene.section("eval", 2.1)
    assert scene.detector.news() is None
    scene.section("eval", 4.0)
    again = scene.detector.news()
    assert again is not None
    assert again.longest_s == {"eval": 4.0}


def test_a_step_time_that_has_changed_is_told_again() -> None:
    scene = Scene()
    scene.train()
    assert scene.detector.news() is not None
    scene.train(steps=40)
    assert scene.detector.news() is None
    scene.train(steps=40, step_s=0.1)
    news = scene.detector.news()
    assert news is not None
    assert news.step_s == pytest.approx(0.1)
    assert news.longest_s == {}
