"""A step is a checkpoint when its manifest says so, and the manifest is right."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from bodies import bodies_of, make_body, save, small_blocks, write
from faulty import FaultyDisk, broken
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.checkpoint.state.layout import FileRecord
from holdfast.checkpoint.storage import commit as commits
from holdfast.checkpoint.storage.backends import MANIFEST
from holdfast.checkpoint.storage.commit import AlreadyCommitted, Committed, commit, verify
from holdfast.checkpoint.storage.manifest import (
    decoded,
    encoded,
    find_step,
    load_manifest,
    refuse,
    steps,
)
from holdfast.checkpoint.storage.posix import PosixStorage
from holdfast.errors import CheckpointError, NotThere, StorageError, Unusable

STEP = "step_000000500"


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path)


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def names(storage: PosixStorage, directory: str = STEP) -> set[str]:
    return {entry.name for entry in storage.entries(directory)}


# ---- commit ----


def test_a_committed_step_is_complete_and_verifies(storage: PosixStorage) -> None:
    done = save(storage, 500, round=3, world_size=3)
    assert isinstance(done, Committed)
    manifest = done.manifest
    assert (manifest.step, manifest.round, manifest.world_size) == (500, 3, 3)
    assert (manifest.job, manifest.saved_at.isoformat()) == ("job", "2001-09-09T01:46:40+00:00")
    assert [file.name for file in manifest.files] == [f"__{rank}_3.distcp" for rank in range(3)]
    assert load_manifest(storage, 500) == manifest
    assert [(one.step, one.state) for one in steps(storage)] == [(500, "complete")]
    read: list[int] = []
    assert verify(storage, 500, read.append) == []
    assert 0 < sum(read) < manifest.total_bytes
    assert names(storage) == {MANIFEST, ".metadata", *(file.name for file in manifest.files)}


def test_the_manifest_can_be_read_by_people(storage: PosixStorage, tmp_path: Path) -> None:
    save(storage, 500)
    text = (tmp_path / STEP / MANIFEST).read_text()
    assert text.splitlines()[:4] == ["{", ' "format": 1,', ' "job": "job",', ' "step": 500,']
    assert ' "saved_at": "2001-09-09T01:46:40Z",' in text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_reads_what_was_committed(storage: PosixStorage, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    save(storage, 500, world_size=2)
    state = {
        "weight": torch.zeros(600, dtype=torch.uint8),
        "layer1": torch.zeros(600, dtype=torch.uint8),
        "step": 0,
    }
    dcp.load(state, checkpoint_id=tmp_path / STEP, no_dist=True)
    bodies = bodies_of(500, 1)
    shards = [next(i for i in b.contents.items if i.name == "weight").raw for b in bodies]
    parts = [b.data[s.at : s.end] for b, s in zip(bodies, shards, strict=True)]
    assert bytes(state["weight"].tolist()) == b"".join(parts)
    layer = next(i for i in bodies[0].contents.items if i.name == "layer1").raw
    assert bytes(state["layer1"].tolist()) == bodies[0].data[layer.at : layer.end]
    assert state["step"] == 500


def test_committing_again_changes_nothing(storage: PosixStorage, tmp_path: Path) -> None:
    records = [write(storage, body) for body in bodies_of(500, 1)]
    first = commit(storage, 500, 1, 2, records, saved_at=1.0)
    before = files(tmp_path)
    again = commit(storage, 500, 1, 2, records[::-1], saved_at=2.0)
    assert again == first
    assert files(tmp_path) == before


def test_the_first_commit_of_a_step_wins(storage: PosixStorage) -> None:
    ours = [write(storage, body) for body in bodies_of(500, 1)]
    theirs = [write(storage, body) for body in bodies_of(500, 2)]
    assert isinstance(commit(storage, 500, 2, 2, theirs), Committed)
    late = commit(storage, 500, 1, 2, ours)
    assert isinstance(late, AlreadyCommitted)
    assert late.manifest.round == 2
    assert verify(storage, 500) == []
    assert names(storage) == {MANIFEST, ".metadata", "__0_2.distcp", "__1_2.distcp"}


@pytest.mark.parametrize("point", ["rename to .metadata", "link to holdfast.json"])
def test_two_rounds_that_commit_at_once_leave_one_good_checkpoint(
    storage: PosixStorage, tmp_path: Path, point: str
) -> None:
    """The slow one has looked, seen no manifest, and is overtaken."""
    slow = [write(storage, body) for body in bodies_of(500, 1)]
    fast = [write(storage, body) for body in bodies_of(500, 2)]

    class Slow(FaultyDisk):
        def _point(self, name: str) -> None:
            if name == point and not self.points:
                self.points.append(name)
                assert isinstance(commit(storage, 500, 2, 2, fast), Committed)

    try:
        late = commit(PosixStorage(tmp_path, Slow()), 500, 1, 2, slow)
    except StorageError:  # What it had begun was tidied away.
        late = commit(storage, 500, 1, 2, slow)
    assert isinstance(late, AlreadyCommitted)
    assert late.manifest.round == 2
    assert verify(storage, 500) == []


def test_a_lost_metadata_file_is_written_anew(storage: PosixStorage, tmp_path: Path) -> None:
    records = [write(storage, body) for body in bodies_of(500, 1)]
    commit(storage, 500, 1, 2, records)
    (tmp_path / STEP / ".metadata").write_bytes(b"of another round")
    assert [refusal.file for refusal in verify(storage, 500)] == [".metadata"]
    commit(storage, 500, 1, 2, records)
    assert verify(storage, 500) == []


def test_extra_files_never_block_a_commit(storage: PosixStorage, tmp_path: Path) -> None:
    """Some count files, and one too many is a checkpoint that never is."""
    for rank in range(4):
        write(storage, make_body(500, 1, rank, 4))
    (tmp_path / STEP / "notes.txt").write_text("mine")
    (tmp_path / STEP / "7.done").write_text("")
    done = save(storage, 500, round=2, world_size=2)
    assert isinstance(done, Committed)
    assert done.untidy == ""
    assert names(storage) == {
        *(MANIFEST, ".metadata", "__0_2.distcp", "__1_2.distcp", "notes.txt", "7.done")
    }


def test_only_what_is_ours_is_tidied_up(storage: PosixStorage, tmp_path: Path) -> None:
    place = tmp_path / STEP
    place.mkdir()
    ours = [".__0_1.distcp.0123456789abcdef.partial", ".holdfast.json.0123456789abcdef.partial"]
    theirs = ["__0_0.distcp", "a.partial", ".hidden", "holdfast.json.bak", "__x_1.distcp"]
    for name in (*ours, *theirs):
        (place / name).write_bytes(b"not a file that ends as ours do, though it may be long enough")
    (place / "__7_7.distcp").mkdir()
    (place / "__8_8.distcp").symlink_to("/dev/null")
    save(storage, 500)
    left = names(storage)
    assert not left.intersection(ours)
    assert left >= {*theirs, "__7_7.distcp", "__8_8.distcp"}


def test_leftovers_that_cannot_be_removed_are_said_and_do_no_harm(
    storage: PosixStorage, tmp_path: Path
) -> None:
    write(storage, make_body(500, 1, 0, 2))
    records = [write(storage, body) for body in bodies_of(500, 2)]

    class NoUnlink(FaultyDisk):
        def unlink(self, name: str, directory: int) -> None:
            if name == "__0_1.distcp":
                broken()
            super().unlink(name, directory)

    done = commit(PosixStorage(tmp_path, NoUnlink()), 500, 2, 2, records)
    assert isinstance(done, Committed)
    assert "dmesg" in done.untidy
    assert verify(storage, 500) == []


# ---- what is not committed ----


def test_a_step_without_all_its_ranks_is_refused(storage: PosixStorage) -> None:
    records = [write(storage, body) for body in bodies_of(500, 1, 3)]
    with pytest.raises(Unusable, match="no file of rank 1"):
        commit(storage, 500, 1, 3, [records[0], records[2]])
    with pytest.raises(Unusable, match="too many files"):
        commit(storage, 500, 1, 3, [*records, records[0]])
    with pytest.raises(Unusable, match="round 2"):
        commit(storage, 500, 2, 3, records)
    assert find_step(storage, 500).state == "partial"


def test_a_stale_file_of_the_right_name_is_never_accepted(
    storage: PosixStorage, tmp_path: Path
) -> None:
    """A job that is started anew counts its rounds from one again; its old files have these names."""
    write(storage, make_body(500, 1, 1, 2, shared=1))
    stale = (tmp_path / STEP / "__1_1.distcp").read_bytes()
    records = [write(storage, body) for body in bodies_of(500, 1)]
    (tmp_path / STEP / "__1_1.distcp").write_bytes(stale)
    with pytest.raises(Unusable, match="another file than the one that was committed"):
        commit(storage, 500, 1, 2, records)
    assert find_step(storage, 500).state == "partial"


@pytest.mark.parametrize("told", [(501, 1, 2), (500, 2, 2), (500, 1, 3)])
def test_ranks_that_disagree_are_refused(
    storage: PosixStorage, tmp_path: Path, told: tuple[int, int, int]
) -> None:
    step, round, world_size = told
    good = write(storage, make_body(500, 1, 0, 2))
    other = write(storage, make_body(step, round, 1, world_size))
    path = tmp_path / f"step_{step:09d}" / other.name
    path.rename(tmp_path / STEP / "__1_1.distcp")
    with pytest.raises(Unusable, match="is of rank 1 of"):
        commit(storage, 500, 1, 2, [good, replace(other, name="__1_1.distcp")])
    assert find_step(storage, 500).state == "partial"


def test_a_file_that_vanished_or_was_cut_is_refused(storage: PosixStorage, tmp_path: Path) -> None:
    records = [write(storage, body) for body in bodies_of(500, 1)]
    path = tmp_path / STEP / "__1_1.distcp"
    good = path.read_bytes()
    path.unlink()
    with pytest.raises(NotThere, match="__1_1"):
        commit(storage, 500, 1, 2, records)
    path.write_bytes(good[:-1])
    with pytest.raises(Unusable, match="__1_1"):
        commit(storage, 500, 1, 2, records)
    at = good.index(b"layer0") + 3
    path.write_bytes(good[:at] + b"?" + good[at + 1 :])
    with pytest.raises(Unusable, match="contents are not"):
        commit(storage, 500, 1, 2, records)
    path.write_bytes(good)
    assert isinstance(commit(storage, 500, 1, 2, records), Committed)


def test_a_shared_tensor_that_no_rank_wrote_is_refused(storage: PosixStorage) -> None:
    """Ranks that lay out what they share in different ways cut it in different ways."""
    records = [
        write(storage, make_body(500, 1, 0, 2, shared=9)),
        write(storage, make_body(500, 1, 1, 2, shared=1)),
    ]
    with pytest.raises(CheckpointError, match="layer"):
        commit(storage, 500, 1, 2, records)
    assert find_step(storage, 500).state == "partial"


def test_what_all_ranks_wrote_is_good_too(storage: PosixStorage) -> None:
    records = [write(storage, body, "all") for body in bodies_of(500, 1)]
    assert isinstance(commit(storage, 500, 1, 2, records), Committed)
    assert verify(storage, 500) == []


# ---- steps ----


def test_steps_are_newest_first_and_foreign_things_are_ignored(
    storage: PosixStorage, tmp_path: Path
) -> None:
    for step in (100, 300, 1234567890):
        save(storage, step)
    write(storage, make_body(200, 1, 0, 2))
    (tmp_path / "step_000000400").mkdir()
    (tmp_path / "step_000000999").write_text("a file")
    (tmp_path / "step_000000998").symlink_to("step_000000300")
    (tmp_path / "step_7").mkdir()
    (tmp_path / "latest").write_text("300")
    assert [(one.step, one.state) for one in steps(storage)] == [
        (1234567890, "complete"),
        (400, "partial"),
        (300, "complete"),
        (200, "partial"),
        (100, "complete"),
    ]


def test_nothing_is_there_before_the_first_save(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path / "not yet")
    assert steps(storage) == []
    assert find_step(storage, 5).state == "partial"
    assert [refusal.file for refusal in verify(storage, 5)] == [MANIFEST]
    assert not (tmp_path / "not yet").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"{}\n", b"\x00" * 500])
def test_an_empty_or_torn_manifest_hides_no_older_step(
    storage: PosixStorage, tmp_path: Path, content: bytes
) -> None:
    """Where one file names the newest step and is truncated before it is written, a crash between
    the two silently starts training from step 0."""
    save(storage, 400)
    save(storage, 500)
    (tmp_path / STEP / MANIFEST).write_bytes(content)
    found = steps(storage)
    assert [(one.step, one.state) for one in found] == [(500, "refused"), (400, "complete")]
    assert MANIFEST in found[0].why


def test_a_damaged_manifest_is_set_aside_when_the_step_is_saved_again(
    storage: PosixStorage, tmp_path: Path
) -> None:
    save(storage, 500, round=1)
    (tmp_path / STEP / MANIFEST).write_bytes(b"")
    assert isinstance(save(storage, 500, round=2), Committed)
    assert verify(storage, 500) == []
    assert names(storage) == {
        *(MANIFEST, f"{MANIFEST}.refused", ".metadata", "__0_2.distcp", "__1_2.distcp")
    }


def test_a_step_whose_file_is_gone_is_refused_and_can_be_saved_again(
    storage: PosixStorage, tmp_path: Path
) -> None:
    save(storage, 500, round=1)
    (tmp_path / STEP / "__1_1.distcp").unlink()
    assert find_step(storage, 500).state == "refused"
    assert "__1_1.distcp is missing" in find_step(storage, 500).why
    assert isinstance(save(storage, 500, round=2), Committed)
    assert verify(storage, 500) == []


def test_a_step_that_was_refused_can_be_saved_again(storage: PosixStorage) -> None:
    save(storage, 500, round=1)
    refuse(storage, 500)
    refuse(storage, 500)
    assert find_step(storage, 500).state == "refused"
    assert isinstance(save(storage, 500, round=2), Committed)
    assert find_step(storage, 500).state == "complete"


def test_a_manifest_in_the_wrong_directory_is_refused(
    storage: PosixStorage, tmp_path: Path
) -> None:
    save(storage, 500)
    shutil.copytree(tmp_path / STEP, tmp_path / "step_000000600")
    assert find_step(storage, 600).state == "refused"
    assert find_step(storage, 500).state == "complete"


def test_a_step_that_cannot_be_read_hides_no_other(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (400, 500):
        save(storage, step)
    real = os.preadv

    def fails(fd: int, views: list[memoryview], at: int) -> int:
        if STEP in os.readlink(f"/proc/self/fd/{fd}"):
            broken()
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", fails)
    assert [(one.step, one.state) for one in steps(storage)] == [
        (500, "refused"),
        (400, "complete"),
    ]
    # What cannot be read now may be good: it is not set aside, and not written over.
    with pytest.raises(StorageError, match="dmesg"):
        save(storage, 500, round=2)
    monkeypatch.undo()
    assert verify(storage, 500) == []


@pytest.mark.parametrize("name", ["../../other", "notes.txt", "__0_2.distcp", "__1_1.distcp"])
def test_a_manifest_that_lists_other_files_than_ranks_is_refused(
    storage: PosixStorage, name: str
) -> None:
    manifest = save(storage, 500).manifest
    files = (replace(manifest.files[0], name=name), manifest.files[1])
    with pytest.raises(Unusable, match="does not list one file of each of 2 ranks"):
        decoded(encoded(replace(manifest, files=files)), "it")


def test_steps_beyond_what_a_float_can_tell_apart(storage: PosixStorage) -> None:
    save(storage, 16777216)
    save(storage, 16777217)
    assert [one.step for one in steps(storage)] == [16777217, 16777216]


def test_a_manifest_of_a_later_format_is_refused_by_name(storage: PosixStorage) -> None:
    done = save(storage, 500)
    later = encoded(replace(done.manifest, format=2))
    with pytest.raises(Unusable, match="format 2"):
        decoded(later, "it")


# ---- verify ----


Good = tuple[Path, dict[str, bytes]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    """A directory with two steps of a few blocks, and what is in each file."""
    root = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch)
        for step in (400, 500):
            save(PosixStorage(root), step, world_size=2)
    return root, files(root)


@given(data=st.data())
@settings(max_examples=300)
def test_no_flipped_bit_goes_unseen(good: Good, data: st.DataObject) -> None:
    root, content = good
    name = data.draw(st.sampled_from(sorted(n for n in content if n.startswith(STEP))))
    at = data.draw(st.integers(0, len(content[name]) - 1))
    bad = bytearray(content[name])
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    (root / name).write_bytes(bad)
    try:
        with pytest.MonkeyPatch.context() as patch:
            small_blocks(patch)
            refusals = verify(PosixStorage(root), 500)
            assert verify(PosixStorage(root), 400) == []
    finally:
        (root / name).write_bytes(content[name])
    (refusal,) = refusals
    assert refusal.file == name.removeprefix(f"{STEP}/")
    assert refusal.file in refusal.why
    if refusal.block is not None:
        assert refusal.block == at // 1024


@given(data=st.data())
@settings(max_examples=100)
def test_no_cut_or_lengthened_file_goes_unseen(good: Good, data: st.DataObject) -> None:
    root, content = good
    name = data.draw(st.sampled_from(sorted(n for n in content if n.startswith(STEP))))
    whole = content[name]
    size = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.sampled_from([whole[:size], whole + whole[:1] + whole[:size]]))
    (root / name).write_bytes(other)
    try:
        with pytest.MonkeyPatch.context() as patch:
            small_blocks(patch)
            refusals = verify(PosixStorage(root), 500)
    finally:
        (root / name).write_bytes(whole)
    assert [refusal.file for refusal in refusals] == [name.removeprefix(f"{STEP}/")]


def test_everything_that_is_wrong_is_named(
    storage: PosixStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    save(storage, 500, world_size=4)
    place = tmp_path / STEP
    (place / "__0_1.distcp").unlink()
    shutil.copy(place / "__1_1.distcp", place / "__2_1.distcp")
    with (place / "__3_1.distcp").open("r+b") as file:
        for at in (0, 2048):
            file.seek(at)
            file.write(b"damaged")
    (place / ".metadata").unlink()
    found = {(r.file, r.block): r.why for r in verify(storage, 500)}
    assert found.keys() == {
        ("__0_1.distcp", None),
        ("__2_1.distcp", None),
        ("__3_1.distcp", 0),
        ("__3_1.distcp", 2),
        (".metadata", None),
    }
    assert "does not exist" in found["__0_1.distcp", None]
    assert "is the file of rank 1" in found["__2_1.distcp", None]
    assert "bytes 2048 to" in found["__3_1.distcp", 2]


def test_a_file_of_an_earlier_save_of_the_same_step_is_refused(
    storage: PosixStorage, tmp_path: Path
) -> None:
    write(storage, make_body(500, 1, 1, 2, shared=2))
    stale = (tmp_path / STEP / "__1_1.distcp").read_bytes()
    save(storage, 500)
    (tmp_path / STEP / "__1_1.distcp").write_bytes(stale)
    (refusal,) = verify(storage, 500)
    assert refusal.file == "__1_1.distcp"
    assert "another file than the one that was committed" in refusal.why


def test_a_disk_that_cannot_be_read_is_a_refusal_and_no_crash(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(storage, 500)
    real = os.preadv

    def fails(fd: int, views: list[memoryview], at: int) -> int:
        if "__1_1" in os.readlink(f"/proc/self/fd/{fd}") and at == 0:
            broken()
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", fails)
    (refusal,) = verify(storage, 500)
    assert (refusal.file, refusal.block) == ("__1_1.distcp", 0)
    assert "dmesg" in refusal.why


def test_a_thousand_ranks_are_committed_by_their_ends_alone(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file are read its footer, its trailer and its contents, not its blocks."""
    records = [write(storage, body) for body in bodies_of(500, 1, 8)]
    read: list[tuple[FileRecord, int]] = []
    real = os.preadv

    def counts(fd: int, views: list[memoryview], at: int) -> int:
        if "distcp" in os.readlink(f"/proc/self/fd/{fd}"):
            read.append((records[0], sum(map(len, views))))
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", counts)
    monkeypatch.setattr(commits, "_AT_ONCE", 2)
    commit(storage, 500, 1, 8, records)
    assert len(read) == 3 * len(records)
