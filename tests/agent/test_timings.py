"""What an agent reports of its ranks' steps. Time is given: nothing here waits."""

from __future__ import annotations

import pytest

from holdfast.agent.contention import Reading, ThreadTime
from holdfast.agent.timings import StepTimings, TrainingProcess
from holdfast.messages.timings import RankTimings, Timing
from holdfast.messages.units import Rank
from holdfast.shm.vital_signs import (
    ALSO_IN_FORWARD,
    BETWEEN,
    DATA,
    FORWARD,
    LEFT_OUT,
    OPTIMIZER,
    PHASES,
    VITALS_BYTES,
    WARM_UP,
    Vitals,
)

STEP_S = 0.02
PID = 1000


class Node:
    """Ranks that a test moves by hand."""

    def __init__(self, ranks: int = 1) -> None:
        self.now = 100.0
        self.timings = StepTimings(self._counters)
        self.queued_s: dict[int, float] = {}
        """Run-queue delay so far, by process id."""
        self.vitals = [Vitals(memoryview(bytearray(VITALS_BYTES))) for _ in range(ranks)]

    def _counters(self, pid: int, now: float) -> Reading:
        return Reading(now, {pid: ThreadTime(0.0, self.queued_s.get(pid, 0.0))})

    def read(self) -> tuple[RankTimings, ...]:
        processes = [
            TrainingProcess(Rank(rank), PID + rank, vitals)
            for rank, vitals in enumerate(self.vitals)
        ]
        return self.timings.read(processes, self.now)

    def sections(self) -> dict[str, Timing]:
        (told,) = self.read()
        return {timing.section: timing for timing in told.timings}

    def train(self, steps: int = WARM_UP + 5) -> None:
        for _ in range(steps):
            for phase in (DATA, FORWARD, BETWEEN):
                self.now += STEP_S / 3
                for vitals in self.vitals:
                    vitals.mark(phase, self.now)
            for vitals in self.vitals:
                vitals.stepped(self.now, STEP_S)


def test_timings_are_those_since_the_last_time() -> None:
    node = Node(ranks=2)
    node.train()
    node.read()
    assert node.read() == ()
    node.vitals[1].mark(FORWARD, node.now)
    node.now += 0.5
    node.vitals[1].mark(BETWEEN, node.now)
    (told,) = node.read()
    assert told.rank == 1
    timings = {timing.section: timing for timing in told.timings}
    assert timings["forward"].median_s == pytest.approx(0.5)
    assert (timings["forward"].count, timings["forward"].waits) == (1, False)


def test_the_first_steps_of_a_process_are_not_reported() -> None:
    node = Node()
    node.train(WARM_UP - 1)
    assert node.read() == ()
    node.train(1)
    assert node.sections()["step"].count == 1


def test_on_a_gpu_the_times_there_are_told() -> None:
    node = Node()
    node.train()
    node.read()
    for _ in range(3):
        node.train()
        node.vitals[0].took_itself(FORWARD, 0.25)
    timings = node.sections()
    assert timings["forward"].median_s == pytest.approx(0.25)
    assert timings["forward"].count > 3, "for all steps, though only some were looked at"
    node.train()
    assert "forward" not in node.sections(), "nothing was looked at"


def test_with_a_sharded_model_ranks_wait_in_forward_too() -> None:
    node = Node()
    node.vitals[0].waiting = ALSO_IN_FORWARD
    node.train()
    timings = node.sections()
    assert timings["forward"].waits
    assert not timings["data"].waits
    node.vitals[0].waiting = LEFT_OUT
    node.train()
    assert {name for name, timing in node.sections().items() if timing.waits} == {"step"}


def test_the_time_between_phases_is_one_duration_a_step_without_waits() -> None:
    """Its pieces are of very different lengths: a median of them says nothing about the step."""
    node = Node()
    node.train()
    assert "between" not in node.sections(), "on a GPU it is not timed"
    for _ in range(8):
        node.train(1)
        node.vitals[0].took_itself(BETWEEN, 0.005)
    between = node.sections()["between"]
    assert (between.count, between.median_s, between.waits) == (8, 0.005, False)


def test_sections_of_a_script_with_phases_are_not_reported_as_they_may_contain_waits() -> None:
    node = Node()
    node.vitals[0].name_section(0, "sync")
    node.vitals[0].took(len(PHASES), 0.4)
    node.train()
    assert node.sections()["sync"].median_s == 0.4
    node.vitals[0].took(len(PHASES), 0.4)
    node.vitals[0].mark(OPTIMIZER, node.now)
    node.train()
    assert "sync" not in node.sections()


def test_with_its_timings_goes_how_long_a_rank_had_no_cpu() -> None:
    node = Node(ranks=2)
    node.train()
    node.read()
    node.queued_s = {PID: 0.05, PID + 1: 0.01}
    node.train()
    assert [told.shortage.queued_s for told in node.read()] == [0.05, 0.01]
    node.train()
    assert [told.shortage.queued_s for told in node.read()] == [0.0, 0.0]


def test_the_shortage_of_a_long_step_is_reported_when_the_step_is() -> None:
    node = Node()
    node.train()
    node.read()
    node.queued_s = {PID: 0.05}
    node.now += 1.0
    assert node.read() == ()
    node.train()
    (told,) = node.read()
    assert told.shortage.queued_s == 0.05
