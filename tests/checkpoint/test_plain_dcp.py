"""A job starts from what plain `torch.distributed.checkpoint` saved, and says it is not verified."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bodies import save as save_of_ours
from states import check_same
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import run_world

from holdfast.checkpoint.dcp.foreign import find_plain, newest_plain
from holdfast.checkpoint.restore.plain_dcp import load_plain, plain_state
from holdfast.checkpoint.storage.backends import METADATA, step_directory
from holdfast.checkpoint.storage.posix import PosixStorage
from holdfast.errors import CheckpointError
from holdfast.worker.checkpointer import Checkpointer

WIDTH = 50


class Job:
    """A model, its optimizer and some values, some steps into training."""

    def __init__(self, seed: int, steps: int = 0, sharded: bool = False) -> None:
        torch.manual_seed(seed)
        layers = torch.nn.Linear(7, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 3)
        self.model: torch.nn.Module = torch.nn.Sequential(*layers)
        if sharded:
            self.model = fully_shard(self.model)
        elif dist.is_initialized():
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        self.state = {
            "model": self.model,
            "optim": self.optimizer,
            "epoch": seed,
            "random": {"torch": torch.get_rng_state(), "names": ["a", seed]},
        }
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(28.0).view(4, 7)).square().mean().backward()
        self.optimizer.step()

    def states(self) -> dict[str, Any]:
        return {n: e.state_dict() if hasattr(e, "state_dict") else e for n, e in self.state.items()}

    def whole(self) -> dict[str, Any]:
        """The state with all shards put together."""
        return gathered(self.states())  # type: ignore[no-any-return]


def gathered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: gathered(child) for key, child in value.items()}
    if isinstance(value, list):
        return [gathered(child) for child in value]
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.detach().clone()
    return value


def in_one_process(act: Any) -> None:
    run_world(1, lambda rank: act())


# ---- one process ----


def test_a_job_starts_from_a_plain_checkpoint_and_says_that_it_is_not_verified(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old" / "step-500"

    def act() -> None:
        saved = Job(1, steps=3)
        dcp.save(saved.states(), checkpoint_id=old, no_dist=True)
        job = Job(2)
        checkpointer = Checkpointer(tmp_path / "new", job.state)
        assert checkpointer.restore(start_from=old) == 500
        assert not checkpointer.restored.verified
        assert checkpointer.restored.where == "start"
        check_same(job.whole(), saved.whole())
        saved.step()
        job.step()
        check_same(job.whole(), saved.whole())

    in_one_process(act)
    told = capfd.readouterr().err
    assert f"started from {old}, which torch.distributed.checkpoint saved: NOT VERIFIED" in told


def test_once_the_job_has_saved_itself_that_is_what_it_restores(tmp_path: Path) -> None:
    def first() -> None:
        dcp.save(Job(1, steps=3).states(), checkpoint_id=tmp_path / "old", no_dist=True)
        job = Job(2)
        checkpointer = Checkpointer(tmp_path / "new", job.state)
        assert checkpointer.restore(start_from=tmp_path / "old") == 0
        job.step()
        checkpointer.save(1).result()
        torch.save(job.whole(), tmp_path / "want")

    def second() -> None:
        job = Job(3)
        checkpointer = Checkpointer(tmp_path / "new", job.state)
        assert checkpointer.restore(start_from=tmp_path / "old") == 1
        assert checkpointer.restored.verified
        check_same(job.whole(), torch.load(tmp_path / "want"))

    in_one_process(first)
    in_one_process(second)


def test_a_plain_checkpoint_in_the_directory_itself_is_found(tmp_path: Path) -> None:
    def act() -> None:
        for number in (1, 2):
            path = tmp_path / f"checkpoint-{number}0"
            dcp.save(Job(number, steps=1).states(), checkpoint_id=path, no_dist=True)
        job = Job(3)
        assert Checkpointer(tmp_path, job.state).restore() == 20
        check_same(job.whole(), Job(2, steps=1).whole())

    in_one_process(act)


def test_another_jobs_checkpoint_is_verified_as_any(tmp_path: Path) -> None:
    def act() -> None:
        saved = Job(1, steps=2)
        Checkpointer(tmp_path / "one", saved.state).save(7).result()
        job = Job(2)
        checkpointer = Checkpointer(tmp_path / "other", job.state)
        assert checkpointer.restore(start_from=tmp_path / "one") == 7
        assert checkpointer.restored.verified
        check_same(job.whole(), saved.whole())

    in_one_process(act)


def test_to_start_from_nothing_is_an_error(tmp_path: Path) -> None:
    def act() -> None:
        checkpointer = Checkpointer(tmp_path / "new", {"a": 1})
        with pytest.raises(CheckpointError, match="start_from: there is no checkpoint in"):
            checkpointer.restore(start_from=tmp_path / "old")
        assert checkpointer.restore() == 0

    in_one_process(act)


# ---- several ranks ----


def save_world(directory: Path, sharded: bool) -> None:
    def act(rank: int) -> None:
        job = Job(1, steps=3, sharded=sharded)
        dcp.save(job.states(), checkpoint_id=directory / "20")
        whole = job.whole()
        if rank == 0:
            torch.save(whole, directory / "want")

    run_world(3, act)


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_world_of_any_size_starts_from_what_another_saved(
    tmp_path: Path, sharded: bool, ranks: int
) -> None:
    save_world(tmp_path, sharded)

    def act(rank: int) -> None:
        job = Job(2, sharded=sharded)
        checkpointer = Checkpointer(tmp_path / "new", job.state)
        assert checkpointer.restore(start_from=tmp_path / "20") == 20
        check_same(job.whole(), torch.load(tmp_path / "want"))
        job.step()
        checkpointer.save(21).result()
        assert job.state["epoch"] == 1

    run_world(ranks, act)


class AppState:
    """The wrapper that torch's tutorial has."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.job.model, self.job.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        job, model, optim = self.job, state["model"], state["optim"]
        set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=optim)


def test_what_was_saved_through_torchs_own_state_dicts_is_restored(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        saved = Job(1, steps=3, sharded=True)
        dcp.save({"app": AppState(saved)}, checkpoint_id=tmp_path / "20")
        job = Job(2, sharded=True)
        Checkpointer(tmp_path / "new", {"app": AppState(job)}).restore(start_from=tmp_path / "20")
        for name in ("model", "optim"):
            check_same(job.whole()[name], saved.whole()[name])

    run_world(2, act)


# ---- what is refused ----


def plain(directory: Path, state: dict[str, Any]) -> Any:
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return newest_plain(PosixStorage(directory))


def test_what_is_missing_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    there = plain(tmp_path, {"w": torch.ones(3)})
    state = {"w": torch.zeros(3), "epoch": 4}
    with pytest.raises(CheckpointError, match="has no 'epoch'; its entries are 'w'"):
        load_plain(state, there)
    assert not state["w"].any()  # type: ignore[attr-defined]


def test_another_shape_is_an_error_that_names_it(tmp_path: Path) -> None:
    there = plain(tmp_path, {"m": torch.nn.Linear(3, 4).state_dict()})
    with pytest.raises(CheckpointError, match=r"m\.weight: saved with shape \[4, 3\]"):
        load_plain({"m": torch.nn.Linear(2, 4)}, there)


def test_another_module_is_an_error_that_names_what_it_lacks(tmp_path: Path) -> None:
    there = plain(tmp_path, {"m": torch.nn.Linear(3, 4).state_dict()})
    with pytest.raises(CheckpointError, match=r"has 'm\.bias', which the state here lacks"):
        load_plain({"m": torch.nn.Linear(3, 4, bias=False)}, there)


class Ran:
    """An object that leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_objects_are_not_unpickled_unless_that_is_allowed(tmp_path: Path) -> None:
    there = plain(tmp_path / "c", {"x": Ran(tmp_path / "ran")})
    with pytest.raises(CheckpointError, match="pickling=True"):
        load_plain({"x": None}, there)
    assert not (tmp_path / "ran").exists()
    load_plain({"x": None}, there, pickling=True)
    assert (tmp_path / "ran").exists()


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    there = plain(tmp_path, {"w": torch.ones(1000)})
    path = next(tmp_path.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=path.name):
        load_plain({"w": torch.zeros(1000)}, there)


@pytest.mark.parametrize(
    ("file", "text"), [(METADATA, b"Metadata"), ("__0_0.distcp", b"serialization_id")]
)
def test_damaged_text_is_told_as_damage_and_not_as_a_codecs_error(
    tmp_path: Path, file: str, text: bytes
) -> None:
    there = plain(tmp_path, {"w": torch.ones(1000)})
    path = tmp_path / file
    path.write_bytes(path.read_bytes().replace(text, b"\xff" * len(text)))
    with pytest.raises(CheckpointError, match=r"is damaged.*copy it again") as told:
        load_plain({"w": torch.zeros(1000)}, there)
    assert "codec" not in str(told.value)
    assert "Unicode" not in str(told.value)


def test_a_checkpoint_of_ours_that_was_refused_or_deleted_is_not_taken_for_a_plain_one(
    tmp_path: Path,
) -> None:
    storage = PosixStorage(tmp_path)
    save_of_ours(storage, 5, 1)
    manifest = tmp_path / step_directory(5) / "holdfast.json"
    manifest.rename(f"{manifest}.refused")
    assert (tmp_path / step_directory(5) / METADATA).exists()
    assert find_plain(storage) == find_plain(PosixStorage(tmp_path / step_directory(5))) == []


def test_several_without_a_step_in_their_names_are_not_guessed_among(tmp_path: Path) -> None:
    for name in ("good", "better"):
        plain(tmp_path / name, {"a": 1})
    with pytest.raises(CheckpointError, match="none with a step in its name"):
        newest_plain(PosixStorage(tmp_path))


@pytest.mark.parametrize(
    ("name", "step"),
    [("500", 500), ("step-500", 500), ("global_step500", 500), ("checkpoint-0500", 500)],
)
def test_the_step_is_the_number_in_the_directorys_name(
    tmp_path: Path, name: str, step: int
) -> None:
    assert plain(tmp_path / name, {"a": 1}).step == step
    assert plain(tmp_path / "run2", {"a": 1}).step is None


# ---- as a tree ----


def test_a_tree_has_what_torch_would_have_made_of_it(tmp_path: Path) -> None:
    state = {
        "m": {"w": torch.arange(6.0).view(2, 3)},
        "list": [torch.ones(2), {"a": 1}],
        "values": {"t": (1, 2), "n": None, "empty": [], "text": "x"},
    }
    check_same(plain_state(plain(tmp_path, state)), state)


@pytest.mark.parametrize("name", ["step_000000500", "step_500"])
def test_a_plain_checkpoint_is_found_whatever_its_name(tmp_path: Path, name: str) -> None:
    """Others number their steps as Holdfast does."""
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / name, no_dist=True)

    def act(rank: int) -> None:
        state = {"a": torch.zeros(3)}
        checkpointer = Checkpointer(tmp_path, state)
        assert checkpointer.restore() == 500
        assert (state["a"] == 1).all()
        assert not checkpointer.restored.verified
        files = sorted((tmp_path / name).iterdir())
        refused = checkpointer.save(500).storage()
        if name == step_directory(500):
            assert "Holdfast did not write" in refused.reason
            assert sorted((tmp_path / name).iterdir()) == files
        assert checkpointer.save(501).storage().outcome == "saved"

    run_world(1, act)


def test_what_has_lost_its_manifest_is_restored_and_not_verified(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        checkpointer = Checkpointer(tmp_path, {"a": torch.ones(3)})
        assert checkpointer.save(7).storage().outcome == "saved"

    run_world(1, act)
    (tmp_path / step_directory(7) / "holdfast.json").unlink()

    def again(rank: int) -> None:
        state = {"a": torch.zeros(3)}
        checkpointer = Checkpointer(tmp_path, state)
        assert checkpointer.restore() == 7
        assert (state["a"] == 1).all()
        assert not checkpointer.restored.verified

    run_world(1, again)


@pytest.mark.parametrize("name", ["step_000000500", "latest"])
def test_a_link_is_refused_by_name_where_there_is_nothing_else(tmp_path: Path, name: str) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "elsewhere", no_dist=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / name).symlink_to(tmp_path / "elsewhere")

    def act(rank: int) -> None:
        checkpointer = Checkpointer(tmp_path / "here", {"a": torch.zeros(3)})
        with pytest.raises(CheckpointError, match="symbolic link"):
            checkpointer.restore()

    run_world(1, act)
