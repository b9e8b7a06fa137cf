"""`holdfast coordinator`: terms of its own, the job's end in a file, and jobs that go on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from holdfast.jobhome import JobFile, JobHome
from holdfast.messages.endnote import EndNote
from holdfast.messages.wire import AskStatus, AskStop, StatusTold, StopTaken
from holdfast.wire.visitors import Coordinates, ask_at

from .harness import wait_for

NAME = "alone"


class Alone:
    """A coordinator alone, as a process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.home = JobHome(folder / "jobs" / NAME)
        words = [sys.executable, "-m", "holdfast", "coordinator", f"--job={NAME}", "--json"]
        self.process = subprocess.Popen(
            [*words, *flags],
            env={**os.environ, "HOLDFAST_HOME": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def listens(self) -> JobFile:
        assert self.process.stdout is not None
        json.loads(self.process.stdout.readline())
        return self.home.read_job_file()

    def status(self) -> StatusTold:
        at = self.listens()
        return ask_at(Coordinates(NAME, at.host, at.port, at.token), AskStatus(), StatusTold)

    def stop(self, code: int) -> None:
        at = self.home.read_job_file()
        question = AskStop(code=code, reason="enough")
        ask_at(Coordinates(NAME, at.host, at.port, at.token), question, StopTaken)

    def code(self) -> int:
        return self.process.wait(60.0)


@contextmanager
def alone(folder: Path, *flags: str) -> Iterator[Alone]:
    made = Alone(folder, *flags)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        assert made.process.stdout is not None
        made.process.stdout.close()


def end_of(path: Path) -> EndNote:
    return msgspec.json.decode(path.read_bytes(), type=EndNote)


def test_a_coordinator_with_terms_begins_the_job_before_any_node_joins(tmp_path: Path) -> None:
    with alone(tmp_path, "--nnodes=2:4") as here:
        assert here.status().status.state == "gathering"


def test_the_end_is_written_and_written_again_but_the_job_is_not_begun_anew(tmp_path: Path) -> None:
    end = tmp_path / "end"
    end.touch()
    flags = ("--nnodes=2", f"--end-file={end}")
    with alone(tmp_path, *flags) as here:
        here.status()
        here.stop(93)
        assert here.code() == 0, "that the job failed is in the file"
    first = end_of(end)
    assert (first.code, first.reason, first.requeues) == (93, "enough", 0)
    end.write_text("")
    with alone(tmp_path, *flags, "--requeues=5") as here:
        assert here.code() == 0
    assert end_of(end) == first


def test_a_job_that_had_to_stop_goes_on_once_for_each_requeue(tmp_path: Path) -> None:
    end = tmp_path / "end"
    flags = ("--nnodes=2", f"--end-file={end}")
    with alone(tmp_path, *flags) as here:
        here.status()
        here.stop(75)
        assert here.code() == 0
    with alone(tmp_path, *flags, "--requeues=1") as here:
        assert here.status().status.requeues == 1
    with alone(tmp_path, *flags, "--requeues=1") as here:
        assert here.status().status.requeues == 1, "it was only restarted"
        here.stop(75)
        assert here.code() == 0
    assert end_of(end).requeues == 1
    with alone(tmp_path, *flags, "--requeues=1") as here:
        assert here.code() == 0, "it has ended, and nobody asked to go on"


def test_without_terms_the_first_node_decides_them(tmp_path: Path) -> None:
    with alone(tmp_path) as here:
        here.listens()
        wait_for(here.home.has_job_file, "the address")
        assert not here.home.opened_id()


def test_a_coordinator_listens_at_an_ipv6_address(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with alone(tmp_path, "--nnodes=1", "--listen=[::1]:0") as here:
        assert here.status().status.state == "gathering"
