"""A save may die at every call it makes: of the process, or of the machine.

Whatever is left, the newest step that counts as complete is the one before or the new one, and it
verifies; saving again succeeds; nothing that is not ours has changed.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from bodies import make_body, save, save_and_prune, write
from faulty import (
    FaultyDisk,
    Machine,
    RecordingDisk,
    broken,
    crashes,
    dies,
    in_child,
    lay_out,
    no_space,
)

from holdfast.checkpoint.storage.commit import verify
from holdfast.checkpoint.storage.manifest import steps
from holdfast.checkpoint.storage.posix import PosixStorage
from holdfast.errors import StorageError

FOREIGN = {
    "notes.txt": b"mine",
    "step_000000100/analysis.csv": b"1,2,3",
    "step_000000300/.metadata.bak": b"mine",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints, what a save that died left of a third, and files of somebody else."""
    root = tmp_path / "root"
    storage = PosixStorage(root)
    save(storage, 100)
    save(storage, 200)
    write(storage, make_body(300, 1, 0, 2))
    (root / "step_000000300" / ".__1_1.distcp.0123456789abcdef.partial").write_bytes(b"half")
    for path, content in FOREIGN.items():
        (root / path).write_bytes(content)
    return root


def attempt(storage: PosixStorage) -> None:
    """Save step 300 in a new round, and keep two."""
    save_and_prune(storage, 300, round=2, keep=2)


def newest(root: Path) -> int:
    """The step that a restore would take; every step that counts as complete verifies."""
    storage = PosixStorage(root)
    complete = [one.step for one in steps(storage) if one.state == "complete"]
    assert [verify(storage, step) for step in complete] == [[] for _ in complete]
    assert {path: (root / path).read_bytes() for path in FOREIGN} == FOREIGN
    return complete[0]


def check(root: Path) -> int:
    """Old or new, whole, and it goes on from there."""
    found = newest(root)
    assert found in (200, 300)
    attempt(PosixStorage(root))
    assert newest(root) == 300
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    for step in ("step_000000200/%s_1", "step_000000300/%s_2"):
        left -= {step % "__0" + ".distcp", step % "__1" + ".distcp"}
        left -= {f"{step[:14]}/.metadata", f"{step[:14]}/holdfast.json"}
    assert left == set(FOREIGN)
    return found


def points(root: Path, tmp_path: Path) -> list[str]:
    shutil.copytree(root, tmp_path / "count")
    disk = FaultyDisk()
    attempt(PosixStorage(tmp_path / "count", disk))
    return disk.points


def test_killed_at_any_call(root: Path, tmp_path: Path) -> None:
    calls = points(root, tmp_path)
    assert len(calls) > 35
    found = []
    for at in range(1, len(calls) + 1):
        place = tmp_path / str(at)
        shutil.copytree(root, place)
        doomed = PosixStorage(place, FaultyDisk(at, dies))
        assert in_child(partial(attempt, doomed)) == -9
        found.append(check(place))
    # There is one call before which the old one is the newest, and after which the new one is.
    assert found == sorted(found)
    assert calls[found.index(300) - 1] == "link to holdfast.json"


@pytest.mark.parametrize("happens", [no_space, broken])
def test_failing_at_any_call(root: Path, tmp_path: Path, happens: object) -> None:
    for at in range(1, len(points(root, tmp_path)) + 1):
        place = tmp_path / str(at)
        shutil.copytree(root, place)
        with suppress(StorageError):  # Not when it is only that leftovers cannot be removed.
            attempt(PosixStorage(place, FaultyDisk(at, happens)))  # type: ignore[arg-type]
        check(place)


def forgotten_by(root: Path, disk: RecordingDisk) -> list[tuple[int, dict[str, bytes | None]]]:
    before = Machine.of(root)
    attempt(PosixStorage(root, disk))
    return list(crashes(before, disk.calls))


def test_whatever_a_machine_forgets_when_it_dies_at_any_call(root: Path, tmp_path: Path) -> None:
    states = forgotten_by(root, RecordingDisk(root))
    assert len(states) > 30
    found = set()
    for number, (_, tree) in enumerate(states):
        place = tmp_path / str(number)
        lay_out(tree, place)
        found.add(check(place))
        shutil.rmtree(place)
    assert found == {200, 300}
    # Once the save has returned, no crash takes it back.
    assert check(root) == 300


@pytest.mark.parametrize("forgets", ["sync", "sync_directory"])
def test_that_model_would_see_a_sync_that_is_missing(
    root: Path, tmp_path: Path, forgets: str
) -> None:
    for number, (_, tree) in enumerate(forgotten_by(root, RecordingDisk(root, (forgets,)))):
        place = tmp_path / str(number)
        lay_out(tree, place)
        try:
            newest(place)
        except (AssertionError, IndexError):
            return
        shutil.rmtree(place)
    pytest.fail(f"nothing is lost without {forgets}")
