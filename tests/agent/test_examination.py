"""A close look at a worker, whatever becomes of it meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent.evidence import Departed, Examined, examine, last_collectives, of_departed
from holdfast.diagnosis import flight
from holdfast.messages.evidence import RankEvidence
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber
from holdfast.shm.vital_signs import BETWEEN, VITALS_BYTES, Vitals


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that waits."""
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def look(pid: int, vitals: Vitals, folder: Path, limit_s: float = 0.2) -> RankEvidence:
    worker = Examined(
        rank=Rank(3),
        pid=pid,
        vitals=vitals,
        step=StepNumber(7),
        stepped_at=time.monotonic() - 5,
        flight=folder / "rank_3.flight",
        log_tail="step 7\n",
    )
    (found,) = asyncio.run(examine(NodeId("n"), RoundNumber(2), [worker], limit_s))
    return found


def fresh() -> Vitals:
    return Vitals(memoryview(bytearray(VITALS_BYTES)))


def test_what_the_vitals_say_is_part_of_the_evidence(pid: int, tmp_path: Path) -> None:
    vitals = fresh()
    vitals.name_section(0, "eval")
    vitals.enter(0, time.monotonic())
    vitals.name_section(1, "upload")
    vitals.enter(1, time.monotonic(), own=False)
    vitals.mark(BETWEEN, time.monotonic())
    vitals.beat(time.monotonic() - 4, 0, 1)
    found = look(pid, vitals, tmp_path)
    assert (found.rank, found.step, found.round, found.log_tail) == (3, 7, 2, "step 7\n")
    assert found.sections == ("eval",), "another thread's says nothing of where it stands"
    assert 4 <= (found.beat_age_s or 0) < 60
    assert 5 <= (found.since_step_s or 0) < 60
    assert found.process_state in ("S", "R")
    assert "the flight recorder was not dumped in time" in found.missing
    assert vitals.dump_wanted


def test_a_worker_that_ends_while_it_is_looked_at_costs_nobody_elses_evidence(
    pid: int, tmp_path: Path
) -> None:
    class Closing(Vitals):
        """Its process ends right after the look has begun."""

        def want_dump(self) -> None:
            self.close()

    found = look(pid, Closing(memoryview(bytearray(VITALS_BYTES))), tmp_path)
    assert (found.rank, found.beat_age_s, found.sections) == (3, None, ())


def test_a_dump_that_cannot_be_read_is_missing_and_says_why(pid: int, tmp_path: Path) -> None:
    class Dumping(Vitals):
        def want_dump(self) -> None:
            (tmp_path / "rank_3.flight").write_bytes(b"no dump at all")

    found = look(pid, Dumping(memoryview(bytearray(VITALS_BYTES))), tmp_path)
    assert found.collectives is None
    assert any("cannot be read" in reason for reason in found.missing)


def test_of_a_rank_that_is_gone_its_last_collectives_are_left(tmp_path: Path) -> None:
    path = tmp_path / "rank_3.flight"
    gone = Departed(Rank(3), 99, StepNumber(7), path)
    (found,) = of_departed(NodeId("n"), RoundNumber(2), [gone])
    assert (found.ended, found.process_state, found.collectives) == (True, "X", None)
    path.write_bytes(flight.dump())
    (found,) = of_departed(NodeId("n"), RoundNumber(2), [gone])
    assert (found.rank, found.step, found.collectives) == (3, 7, ())
    assert last_collectives(path) == ()


def test_a_dump_is_read_once_so_that_one_found_at_the_end_is_the_last(
    pid: int, tmp_path: Path
) -> None:
    class Dumping(Vitals):
        def want_dump(self) -> None:
            (tmp_path / "rank_3.flight").write_bytes(flight.dump())

    found = look(pid, Dumping(memoryview(bytearray(VITALS_BYTES))), tmp_path)
    assert found.collectives == ()
    assert not (tmp_path / "rank_3.flight").exists()
