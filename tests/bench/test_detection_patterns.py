"""The rows that judge the hang policy: what holds of them without running a job."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from detection import healthy, hung, pool
from detection.beside import Beside
from detection.jobs import Setting
from detection.patterns import KINDS, MODULES, ROWS, STEPS_MS, Pattern
from detection.trial import Outcome, Try
from harness import processes

LEFT_OPEN = {"stopped", "ended-but-alive", "exited"}
"""Ranks that are at no line of their script: stopped from outside, or past its end."""


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tries=20, quick=False, folder=tmp_path)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = {process.pid for process in processes.descendants()}
    yield
    assert {process.pid for process in processes.descendants()} <= before


def test_every_row_has_a_name_of_its_own() -> None:
    assert len(ROWS) == sum(len(module.ROWS) for module in MODULES)


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_the_script_of_every_row_is_python(row: Pattern) -> None:
    compile(row.script, f"{row.name}.py", "exec")


def test_at_least_forty_healthy_patterns() -> None:
    assert sum(row.group == "healthy" for row in ROWS.values()) >= 40


@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.group != "healthy"], ids=str)
def test_every_hang_says_where_the_guilty_rank_is(row: Pattern) -> None:
    assert bool(row.places) == (row.name not in LEFT_OPEN)


def test_a_place_is_the_marked_line_of_the_script_that_is_run() -> None:
    row = ROWS["lock-twice"]
    number = int(row.places[0].split(":")[1])
    assert row.script.splitlines()[number - 1].strip() == "lock.acquire()  # here"


def test_every_healthy_row_is_run_in_every_variant_it_has(setting: Setting) -> None:
    tries = healthy.plan(setting)
    assert len({one.number for one in tries}) == len(tries)
    for row in ROWS.values():
        if row.group == "healthy":
            mine = {(one.kind, one.step_ms) for one in tries if one.pattern == row.name}
            assert mine == {(kind, ms) for kind in KINDS if kind in row.kinds for ms in STEPS_MS}


def test_twenty_tries_of_a_hang_go_through_all_ranks_kinds_and_lengths(setting: Setting) -> None:
    tries = [one for one in hung.plan(setting, "proven", None) if one.pattern == "order"]
    assert len(tries) == 20
    assert {one.rank for one in tries} == set(range(4))
    assert {(one.kind, one.step_ms) for one in tries} == {
        (kind, step_ms) for kind in KINDS for step_ms in hung.STEPS_MS
    }


def test_a_healthy_job_with_a_torn_file_was_not_left_alone() -> None:
    one = Try(0, "atexit", "ddp", 20, rank=0)
    assert Outcome(one, exit_code=0).untouched
    assert not Outcome(one, exit_code=0, note="not whole: final").untouched
    assert not Outcome(one, exit_code=1).untouched
    assert not Outcome(one, exit_code=0, restarts=1).untouched


def _leave_a_process_behind(number: int) -> int:
    subprocess.Popen(["sleep", "1000"])
    return number


def test_tries_run_side_by_side_and_leave_no_process_behind() -> None:
    results = pool.run(_leave_a_process_behind, range(5), range(5, 7), jobs=3)
    assert sorted(results) == list(range(7))


def _die(number: int) -> int:
    os._exit(number)


def test_a_try_that_dies_is_an_error_and_not_a_result() -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        list(pool.run(_die, [3], [], jobs=1))


def test_a_slow_receiver_takes_as_long_as_the_row_says(tmp_path: Path) -> None:
    sink = Beside("sink", 1.0, tmp_path)
    sink.start()
    host, port = sink.address.split(":")
    began = time.monotonic()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(bytes(1 << 20))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(2) == b"ok"
    assert time.monotonic() - began > 0.8
