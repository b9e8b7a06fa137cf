"""What a job has learnt about pauses is there when it is queued again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast import jobhome
from holdfast.coordinator.memories import Memories
from holdfast.messages.hangs import Memory, PlaceMemory

KNOWN = Memory(places={"eval.py:33 (upload)": PlaceMemory(seen=3, still_s=41.5, trusted=True)})


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "pauses.json"
    Memories(path).write(KNOWN)
    assert Memories(path).read() == KNOWN
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_file_nothing_is_known(tmp_path: Path) -> None:
    assert Memories(tmp_path / "pauses.json").read() == Memory()


@pytest.mark.parametrize("content", ["", "{", '{"places": 7}'])
def test_a_damaged_file_costs_what_it_held_and_nothing_else(tmp_path: Path, content: str) -> None:
    path = tmp_path / "pauses.json"
    path.write_text(content)
    assert Memories(path).read() == Memory()


def test_a_full_disk_costs_no_job(tmp_path: Path) -> None:
    Memories(tmp_path / "gone" / "pauses.json").write(KNOWN)


def test_the_next_job_of_the_same_name_inherits_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    first = jobhome.create("llm", "train.py")
    Memories(first.memories).write(KNOWN)
    os.close(first._lock_fd)
    second = jobhome.create("llm", "train.py")
    assert Memories(second.memories).read() == KNOWN
