"""Steps and samples a second: of training alone, of one round alone."""

from __future__ import annotations

from typing import Any

import pytest
from driver import Driver, encoded, replayed
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import report
from holdfast.core.speed import windows
from holdfast.core.speed.windows import HALF_S, HALF_STEPS, TrainingSpeeds
from holdfast.core.view import JobSpeed
from holdfast.messages.events import Progress
from holdfast.messages.records import RankProgress
from holdfast.messages.units import Rank, StepNumber, Time

BATCH = 8


class Training(Driver):
    """A job whose ranks take given steps, each with a batch of eight, and report them."""

    def __init__(self, *nodes: str, counted: bool = True, **terms: Any) -> None:
        super().__init__(**terms)
        self.counted = counted
        self.running(*nodes)
        self.begin()

    def begin(self, base: int = 0) -> None:
        """All ranks finish their first step, after the one that they went on from."""
        self.base, self.steps, self.trained_s, self.asides = base, 1, 0.0, dict[str, float]()
        self.first_at = self.after(1).at
        self.tell()

    def train(self, steps: int, step_s: float = 1.0, every: int = 1, **asides: float) -> None:
        """Take steps, with something else between the last two; report as often as that."""
        for number in range(1, steps + 1):
            self.steps += 1
            self.trained_s += step_s
            self.after(step_s)
            if number == steps:
                self.after(sum(asides.values()))
                self.asides = {
                    name: self.asides.get(name, 0.0) + seconds for name, seconds in asides.items()
                }
            if number % every == 0 or number == steps:
                self.tell()

    def pages(self) -> list[RankProgress]:
        return [
            RankProgress(
                rank=rank,
                step=StepNumber(self.base + self.steps),
                steps=self.steps,
                first_at=self.first_at,
                last_at=self.at,
                step_s=1.0,
                samples=BATCH * self.steps if self.counted else None,
                trained_s=self.trained_s,
                **self.asides,
            )
            for rank in self.job.ranks
        ]

    def tell(self) -> None:
        for page in self.pages():
            node = self.node_of(page.rank)
            self.take(Progress(at=self.at, node=node, round=self.round, ranks=(page,)))

    def break_and_restart(self, base: int, *nodes: str) -> None:
        """A rank is killed; all stop, other nodes join, and the next round goes on from that step."""
        self.exit(0, signal=9, code=None)
        for node in nodes:
            self.join(node)
        self.all_ready()
        self.after(60).tick()
        self.start_all()
        self.begin(base)

    @property
    def speed(self) -> JobSpeed:
        return self.job.speed


# ---- rate ----


def test_the_speed_is_that_of_the_latest_minutes() -> None:
    job = Training("a")
    job.train(300, step_s=1.0)
    assert job.speed == JobSpeed(2, 1.0, 2 * BATCH, True)
    job.train(480, step_s=0.25)
    assert job.speed == JobSpeed(2, 4.0, 2 * BATCH * 4, True)


def test_the_speed_of_all_ranks_is_the_sum_of_their_samples_and_the_steps_of_one() -> None:
    job = Training("a", "b", min_nodes=2, max_nodes=2)
    job.train(10, step_s=0.5)
    assert (job.speed.steps_per_s, job.speed.samples_per_s) == (2.0, 4 * BATCH * 2.0)
    status = report.status(job.job, job.at, alive=True)
    assert (status.steps_per_s, status.samples_per_s) == (2.0, 64.0)
    ranks = [rank for node in status.nodes for rank in node.ranks]
    assert {(rank.steps_per_s, rank.samples_per_s) for rank in ranks} == {(2.0, 16.0)}


@pytest.mark.parametrize("every", [1, 7, 100])
def test_how_often_ranks_report_does_not_change_the_speed(every: int) -> None:
    job = Training("a")
    job.train(1000, step_s=0.5, every=every)
    assert job.speed.steps_per_s == pytest.approx(2.0)


def test_before_half_a_second_of_training_the_speed_is_unknown() -> None:
    job = Training("a")
    assert job.speed.steps_per_s is None
    job.train(1, step_s=0.4)
    assert job.speed.steps_per_s is None
    job.train(1, step_s=0.1)
    assert job.speed.steps_per_s == 4.0


def test_a_script_that_does_not_count_samples_has_no_speed_in_samples() -> None:
    job = Training("a", counted=False)
    job.train(10)
    assert (job.speed.steps_per_s, job.speed.samples_per_s) == (1.0, None)
    assert report.goodput(job.job, job.at).samples is None


def test_samples_that_are_counted_from_some_step_on_are_not_divided_by_the_time_before() -> None:
    job = Training("a", counted=False)
    job.train(50)
    job.counted = True
    job.train(1)  # All samples so far come with it.
    job.train(10)
    assert job.speed.samples_per_s == 2 * BATCH


# ---- what does not count ----


@pytest.mark.parametrize("aside", ["evaluation_s", "pause_s", "checkpoint_s"])
def test_evaluations_stalls_and_saves_do_not_lower_the_speed(aside: str) -> None:
    job = Training("a")
    for _ in range(3):
        job.train(20, **{aside: 100.0})
    assert (job.speed.steps_per_s, job.speed.samples_per_s) == (1.0, 2 * BATCH)


def test_what_turns_out_to_have_been_pauses_begins_the_window_anew() -> None:
    job = Training("a")
    job.train(3, step_s=30.0)  # Compilations, as is known once steps of a second follow.
    job.trained_s = 4.0
    job.train(20)
    assert job.speed.steps_per_s == 1.0


def test_while_a_job_stands_its_speed_falls_in_steps_and_samples_alike() -> None:
    job = Training("a")
    job.train(100)
    status = report.status(job.job, job.after(50).at, alive=True)
    assert (status.no_step_s, status.steps_per_s) == (50, 0.02)
    assert status.samples_per_s == pytest.approx(2 * BATCH / 50)
    assert not status.speed_stable


# ---- rounds ----


def test_after_a_roll_back_the_speed_is_measured_at_once_and_not_mixed_with_earlier() -> None:
    job = Training("a")
    job.train(300, step_s=1.0)
    job.break_and_restart(base=100)
    assert job.speed.steps_per_s is None
    job.train(5, step_s=0.5)
    assert job.speed.steps_per_s == 2.0
    assert job.job.highest == 301, "the steps are not new, and count all the same"


def test_a_recovery_is_no_time_of_training() -> None:
    job = Training("a")
    job.train(30)
    job.break_and_restart(base=20)
    job.train(30)
    assert job.speed.steps_per_s == 1.0


def test_a_window_never_mixes_two_world_sizes() -> None:
    job = Training("a", min_nodes=1, max_nodes=2)
    job.train(300)
    assert job.speed == JobSpeed(2, 1.0, 2 * BATCH, True)
    job.break_and_restart(300, "b")
    job.train(20, step_s=0.5)
    assert job.speed == JobSpeed(4, 2.0, 4 * BATCH * 2, False)


# ---- stability ----


def test_a_speed_is_stable_after_a_minute_of_training_at_one_world_size() -> None:
    job = Training("a")
    job.train(59)
    assert not job.speed.stable
    job.train(1, evaluation_s=100.0)
    assert job.speed.stable
    job.break_and_restart(base=60)
    job.train(59)
    assert not job.speed.stable
    job.train(1)
    assert job.speed.stable


def test_slow_steps_are_stable_once_there_are_some_of_them() -> None:
    job = Training("a")
    job.train(HALF_STEPS - 1, step_s=600.0)
    assert not job.speed.stable
    job.train(1, step_s=600.0)
    assert job.speed.stable


def test_one_rank_that_has_just_begun_makes_the_speed_unstable() -> None:
    job = Training("a")
    job.train(100)
    del job.job.speeds.windows[Rank(1)]
    assert not job.speed.stable


def test_ranks_that_have_finished_count_no_more() -> None:
    job = Training("a")
    job.train(100)
    job.exit(0, 101, code=0)
    assert job.speed.samples_per_s == BATCH
    job.exit(1, 101, code=0)
    assert not job.speed.stable


# ---- always ----


def test_the_speed_is_the_same_after_a_replay() -> None:
    job = Training("a")
    job.train(100)
    job.break_and_restart(base=50)
    job.train(70, step_s=0.5)
    again = replayed(job.history, revive_at=len(job.history) // 2)
    assert encoded(again) == encoded(job.job)
    assert again.speed == job.speed


@given(
    st.lists(st.tuples(st.floats(0.001, 200.0), st.integers(1, 50), st.integers(0, 9)), min_size=1)
)
def test_a_window_holds_the_latest_halves_whatever_the_steps_are(
    reports: list[tuple[float, int, int]],
) -> None:
    """Against a model that keeps every report: the window begins with one of them, and is full as soon
    as there is enough."""
    speeds, marks = TrainingSpeeds(), [(0.0, 1, 8)]
    for step_s, steps, samples in [(0.0, 0, 0), *reports]:
        seconds, count, used = marks[-1]
        marks.append((seconds + step_s * steps, count + steps, used + samples * steps))
        progress = RankProgress(
            rank=Rank(0),
            step=StepNumber(marks[-1][1]),
            steps=marks[-1][1],
            first_at=Time(1.0),
            last_at=Time(1.0 + marks[-1][0]),
            trained_s=marks[-1][0],
            samples=marks[-1][2],
        )
        windows.progressed(speeds, progress)
    window = speeds.windows[Rank(0)]
    begin, end = (window.begin.trained_s, window.begin.steps, window.begin.samples), marks[-1]
    assert begin in marks
    assert (window.end.trained_s, window.end.steps, window.end.samples) == end
    full = [m for m in marks if end[0] - m[0] >= HALF_S and end[1] - m[1] >= HALF_STEPS]
    assert window.full == bool(full)
    if window.seconds >= windows.LEAST_S:
        assert window.steps_per_s == pytest.approx((end[1] - begin[1]) / (end[0] - begin[0]))
        assert window.samples_per_s == pytest.approx((end[2] - begin[2]) / (end[0] - begin[0]))
