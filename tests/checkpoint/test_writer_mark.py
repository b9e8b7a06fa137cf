"""A second job that writes into a directory is told; a dead job, or the same one again, is not in the
way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from keepers import until
from worlds import end_world, run_world, start_world

from holdfast.checkpoint.keeper import files
from holdfast.checkpoint.storage import writer_mark
from holdfast.checkpoint.storage.writer_mark import MARK, Writer, WriterMark
from holdfast.errors import CheckpointError
from holdfast.worker.checkpointer import Checkpointer

KEEPER = """
import sys, time
from holdfast.checkpoint.storage.writer_mark import WriterMark, Writer
WriterMark(sys.argv[1], Writer.of_keeper(sys.argv[2])).claim(lambda: None)
print("claimed", flush=True)
time.sleep(600)
"""


class OtherJob:
    """A job that writes there, with a keeper that is a real process."""

    def __init__(self, directory: Path, job: str = "other") -> None:
        command = [sys.executable, "-c", KEEPER, str(directory), job]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"claimed\n"

    def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[OtherJob]:
    job = OtherJob(tmp_path)
    yield job
    job.end()


def mark_of(directory: Path, job: str = "mine", watch_s: float = 10.0) -> WriterMark:
    return WriterMark(str(directory), Writer.of_keeper(job), watch_s)


def nothing() -> None: ...


def elsewhere(directory: Path) -> None:
    """Let the mark be that of a job whose processes are not known here."""
    path = directory / MARK
    writer = msgspec.json.decode(path.read_bytes(), type=Writer)
    moved = msgspec.structs.replace(writer, namespace="another machine", host="node7")
    with path.open("r+b") as file:  # In place: its writer goes on to touch it.
        file.truncate()
        file.write(msgspec.json.encode(moved))


def test_a_job_that_writes_there_is_named(tmp_path: Path, other: OtherJob) -> None:
    with pytest.raises(CheckpointError, match=rf"job other \(process {os.getpid()} on .*is alive"):
        mark_of(tmp_path).claim(nothing)


def test_a_job_on_another_machine_is_named_too(tmp_path: Path, other: OtherJob) -> None:
    elsewhere(tmp_path)
    with pytest.raises(CheckpointError, match="on node7"):
        mark_of(tmp_path).claim(nothing)


def test_a_job_that_is_about_to_restore_is_warned(
    tmp_path: Path, other: OtherJob, caplog: pytest.LogCaptureFixture
) -> None:
    files._warn(mark_of(tmp_path))
    assert "nothing can be saved here" in caplog.text
    assert "job other" in caplog.text


def test_a_dead_job_is_not_in_the_way_not_even_for_a_moment(
    tmp_path: Path, other: OtherJob
) -> None:
    other.end()
    began = time.monotonic()
    mark_of(tmp_path, watch_s=60.0).claim(nothing)
    assert time.monotonic() - began < 30.0


def test_a_dead_job_of_another_machine_is_not_in_the_way(tmp_path: Path, other: OtherJob) -> None:
    elsewhere(tmp_path)
    other.end()
    mark_of(tmp_path, watch_s=0.5).claim(nothing)
    assert msgspec.json.decode((tmp_path / MARK).read_bytes())["job"] == "mine"


def test_the_same_job_started_again_is_not_watched(tmp_path: Path) -> None:
    job = OtherJob(tmp_path, "mine")
    try:
        elsewhere(tmp_path)
        mark_of(tmp_path, watch_s=600.0).claim(nothing)
    finally:
        job.end()


def test_a_job_whose_mark_was_replaced_while_it_was_stopped_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_mark, "BEAT_S", 0.05)
    mine = mark_of(tmp_path)
    mine.claim(nothing)
    os.unlink(tmp_path / MARK)  # As whoever found it unchanged would do.
    until(lambda: mine._beating is None, "the mark to be missed")
    job = OtherJob(tmp_path)
    try:
        with pytest.raises(CheckpointError, match="job other"):
            mine.claim(nothing)
    finally:
        job.end()
    mine.claim(nothing)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[" * 5000])
def test_a_damaged_mark_is_not_in_the_way(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MARK).write_bytes(content)
    mark_of(tmp_path).claim(nothing)
    assert msgspec.json.decode((tmp_path / MARK).read_bytes())["job"] == "mine"


def test_where_no_mark_can_be_written_there_is_none(tmp_path: Path) -> None:
    mark_of(tmp_path / "missing").claim(nothing)
    (tmp_path / "file").touch()
    mark_of(tmp_path / "file").claim(nothing)


@pytest.mark.parametrize(
    ("env", "want"),
    [
        ({"TORCHELASTIC_RUN_ID": "abc", "SLURM_JOB_ID": "7"}, "torchrun abc"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "Slurm 7.0"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, "n1:29500"),
        ({"WORLD_SIZE": "1", "MASTER_PORT": "29500"}, ""),
    ],
)
def test_a_job_without_holdfast_is_known_by_its_launcher(
    env: dict[str, str], want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert writer_mark._launched() == want


# ---- real checkpointers ----


def test_a_second_script_is_told_at_its_first_save_and_may_still_restore(tmp_path: Path) -> None:
    directory, saved, go = tmp_path / "ckpt", tmp_path / "saved", tmp_path / "go"

    def first(rank: int) -> None:
        state = {"w": torch.ones(3)}
        with Checkpointer(directory, state) as checkpointer:
            checkpointer.save(1).result()
            saved.touch()
            until(go.exists, "the other script", 60)
            checkpointer.save(2).result()

    def second(rank: int) -> None:
        checkpointer = Checkpointer(directory, {"w": torch.zeros(3)})
        assert checkpointer.restore() == 1
        with pytest.raises(CheckpointError, match=r"another script \(process \d+ on .*is alive"):
            checkpointer.save(5).result()

    running = start_world(1, first)
    try:
        until(saved.exists, "the first save", 60)
        run_world(1, second)
        go.touch()
    finally:
        codes = end_world(running)
    assert codes == [0]
    assert sorted(path.name for path in directory.glob("step_*")) == [
        "step_000000001",
        "step_000000002",
    ]


def test_a_script_that_was_killed_is_followed_by_the_next_at_once(tmp_path: Path) -> None:
    def first(rank: int) -> None:
        Checkpointer(tmp_path, {"w": torch.ones(3)}).save(1).result()
        os._exit(0)

    def second(rank: int) -> None:
        with Checkpointer(tmp_path, {"w": torch.zeros(3)}) as checkpointer:
            assert checkpointer.restore() == 1
            checkpointer.save(2)

    run_world(1, first)
    run_world(1, second)
