"""Optimizers are saved under the names of their parameters; wrappers of modules make no difference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import Rank, check_same, image_of
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import run_world

from holdfast.checkpoint.dcp.foreign import newest_plain
from holdfast.checkpoint.restore import load as restore
from holdfast.checkpoint.restore.plain_dcp import load_plain
from holdfast.checkpoint.restore.sources import open_image
from holdfast.checkpoint.state.parameter_names import ParameterNames, without_wrappers
from holdfast.checkpoint.storage.posix import PosixStorage
from holdfast.errors import CheckpointError
from holdfast.worker.checkpointer import Checkpointer

Wrap = Callable[[torch.nn.Module], torch.nn.Module]


def layers(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    found = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False)
    return torch.nn.Sequential(*found)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    for _ in range(2):
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optim": optimizer}


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def example(wrap: Wrap = lambda model: model, seed: int = 1) -> dict[str, Any]:
    model = wrap(layers(seed))
    return trained(model, adam(model))


def through_an_image(shm: Path, saved: dict[str, Any], into: dict[str, Any]) -> set[str]:
    """Save a state and load it; the names of all tensors of the optimizer."""
    rank, names = Rank(shm), ParameterNames()
    state, orders = restore.captured_state(saved, names)
    path = rank.save(state, parameters=orders)
    with ExitStack() as until:
        stored = open_image(path, image_of(1), until)
        restore.load(into, [stored], 0)
        return {i.name for i in stored.contents.items if i.name.startswith("optim.")}


def of_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """The state of each parameter by its name, whatever its number is."""
    return {
        name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state
    }


# ---- optimizers ----


def test_an_optimizer_is_saved_under_the_names_of_its_parameters(shm: Path) -> None:
    saved, into = example(seed=1), example(seed=2)
    names = through_an_image(shm, saved, into)
    assert "optim.state.0.weight.exp_avg" in names
    assert "optim.state.2.weight.step" in names
    for entry in ("model", "optim"):
        check_same(into[entry].state_dict(), saved[entry].state_dict())


def test_a_fresh_optimizer_gets_its_state_back(shm: Path) -> None:
    saved, model = example(seed=1), layers(2)
    into = {"model": model, "optim": adam(model)}
    through_an_image(shm, saved, into)
    check_same(into["optim"].state_dict(), saved["optim"].state_dict())


def test_parameters_in_another_order_get_their_own_state_back(shm: Path) -> None:
    saved, model = example(seed=1), layers(2)
    backwards = torch.optim.AdamW([*reversed(list(model.parameters()))], lr=0.1)
    through_an_image(shm, saved, {"model": model, "optim": backwards})
    check_same(of_parameters(backwards, model), of_parameters(saved["optim"], saved["model"]))


def test_groups_in_another_order_keep_their_own_settings(shm: Path) -> None:
    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        decay = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3}
        return [decay, {"params": [p for p in model.parameters() if p.dim() == 1]}]

    model, other = layers(1), layers(2)
    saved = trained(model, torch.optim.AdamW(groups(model), lr=0.1, weight_decay=0.0))
    optimizer = torch.optim.AdamW([*reversed(groups(other))], lr=9.0, weight_decay=9.0)
    through_an_image(shm, saved, {"model": other, "optim": optimizer})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.3]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    check_same(of_parameters(optimizer, other), of_parameters(saved["optim"], model))


def test_other_groups_are_refused_by_name(shm: Path) -> None:
    saved, model = example(seed=1), layers(2)
    each = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(CheckpointError, match=r"no group .* consists of '0\.weight'"):
        through_an_image(shm, saved, {"model": model, "optim": torch.optim.AdamW(each)})


def test_other_parameters_are_refused_by_name_before_anything_changes(shm: Path) -> None:
    saved, model = example(seed=1), layers(2)
    before = copy.deepcopy(model.state_dict())
    fewer = torch.optim.AdamW([*model.parameters()][:-1])
    with pytest.raises(CheckpointError, match=r"has '2\.weight', which this one lacks"):
        through_an_image(shm, saved, {"model": model, "optim": fewer})
    check_same(model.state_dict(), before)


def test_what_an_older_version_saved_under_numbers_is_restored(shm: Path) -> None:
    saved, into = example(seed=1), example(seed=2)
    fresh_model = layers(3)
    fresh = {"model": fresh_model, "optim": adam(fresh_model)}
    rank = Rank(shm)
    path = rank.save({name: entry.state_dict() for name, entry in saved.items()})
    with ExitStack() as until:
        stored = open_image(path, image_of(1), until)
        assert "optim.state.0.exp_avg" in {item.name for item in stored.contents.items}
        for state in (into, fresh):
            restore.load(state, [stored], 0)
            check_same(state["optim"].state_dict(), saved["optim"].state_dict())


@pytest.mark.parametrize("kind", ["of no module", "of two modules", "with a form of its own"])
def test_an_optimizer_keeps_its_numbers_where_there_are_no_names(shm: Path, kind: str) -> None:
    def make(seed: int) -> dict[str, Any]:
        one, two = layers(seed), layers(seed + 1)
        state = trained(one, adam(one))
        if kind == "of no module":
            return {"model": two, "optim": state["optim"]}
        if kind == "of two modules":
            both = torch.nn.Sequential(layers(seed), torch.nn.Linear(2, 3))
            return {"a": both[0], "b": both[1], **trained(both, adam(both)), "model": two}
        odd = _Odd(one.parameters(), lr=0.1, momentum=0.9)
        return trained(one, odd)

    saved, into = make(1), make(5)
    names = through_an_image(shm, saved, into)
    number = "optim.state.p0." if kind == "with a form of its own" else "optim.state.0."
    assert any(name.startswith(number) for name in names), names
    assert not any("weight" in name for name in names)
    check_same(into["optim"].state_dict(), saved["optim"].state_dict())


class _Odd(torch.optim.SGD):
    """An optimizer whose state dict has keys of its own."""

    def state_dict(self) -> dict[str, Any]:
        usual = super().state_dict()
        return {**usual, "state": {f"p{number}": one for number, one in usual["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {int(key[1:]): one for key, one in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})


def test_without_its_module_an_optimizer_takes_the_state_in_the_order_of_the_save(
    shm: Path,
) -> None:
    saved, into = example(seed=1), example(seed=2)
    del into["model"]
    through_an_image(shm, saved, into)
    check_same(into["optim"].state_dict(), saved["optim"].state_dict())


def test_an_optimizer_that_gets_more_parameters_is_saved_with_all_of_them() -> None:
    state, names = example(), ParameterNames()
    model, optimizer = state["model"], state["optim"]
    some = torch.optim.SGD([model[0].weight])
    state = {"model": model, "optim": some}
    assert names.of(state, "optim") == ["0.weight"]
    some.add_param_group({"params": [model[2].weight]})
    assert names.of(state, "optim") == ["0.weight", "2.weight"]
    assert names.of({"model": model, "optim": optimizer}, "optim") is not None


# ---- with plain torch ----


def saved_by(directory: Path, make: Callable[[], dict[str, Any]], size: int = 1) -> None:
    def act(rank: int) -> None:
        state = make()
        with Checkpointer(directory, state) as checkpointer:
            checkpointer.save(1)
        whole = get_optimizer_state_dict(state["model"], state["optim"])
        torch.save(full(whole), directory / f"{rank}.pt")

    run_world(size, act)


def full(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: full(one) for key, one in value.items()}
    if isinstance(value, list):
        return [full(one) for one in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    return fully_shard(model)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, sharded, torch.compile])
def test_torchs_own_functions_read_the_optimizer(tmp_path: Path, wrap: Wrap) -> None:
    size = 1 if wrap is torch.compile else 2
    compiled = wrap is torch.compile

    def make() -> dict[str, Any]:
        inner = layers(1)
        model = wrap(inner)
        return {**trained(inner if compiled else model, adam(model)), "model": model}

    saved_by(tmp_path, make, size)
    want = torch.load(tmp_path / "0.pt")

    def act(rank: int) -> None:
        model = layers(2)
        optimizer = adam(model)
        state = {"optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=tmp_path / "step_000000001", no_dist=True)
        set_optimizer_state_dict(model, optimizer, state["optim"])
        check_same(get_optimizer_state_dict(model, optimizer), want)

    run_world(1, act)


def test_what_torchs_own_functions_saved_is_restored(tmp_path: Path) -> None:
    saved, model = example(seed=1), layers(2)
    theirs = {
        "model": get_model_state_dict(saved["model"]),
        "optim": get_optimizer_state_dict(saved["model"], saved["optim"]),
    }
    dcp.save(theirs, checkpoint_id=tmp_path, no_dist=True)
    plain = newest_plain(PosixStorage(tmp_path))
    assert plain is not None
    into = {"model": model, "optim": torch.optim.AdamW([*reversed(list(model.parameters()))])}
    load_plain(into, plain)
    check_same(into["model"].state_dict(), saved["model"].state_dict())
    check_same(of_parameters(into["optim"], model), of_parameters(saved["optim"], saved["model"]))


# ---- wrapped modules ----


class Holder(torch.nn.Module):
    """A module of which `module` is an attribute of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.module = layers(seed)
        self.head = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(x))  # type: ignore[no-any-return]


@pytest.fixture
def _alone() -> Any:
    """A world of one, which DistributedDataParallel needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def both(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(DistributedDataParallel(model))  # type: ignore[no-any-return]


def inside(model: torch.nn.Module) -> torch.nn.Module:
    model[0] = torch.compile(model[0])  # type: ignore[index,operator]
    return model


WRAPS: dict[str, Wrap] = {
    "plain": lambda model: model,
    "DDP": DistributedDataParallel,
    "compiled": torch.compile,  # type: ignore[dict-item]
    "both": both,
    "a layer compiled": inside,
}


def wrapped_example(wrap: Wrap, seed: int) -> dict[str, Any]:
    model = layers(seed)
    state = trained(model, adam(model))
    return {**state, "model": wrap(model)}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("there", WRAPS)
@pytest.mark.parametrize("here", WRAPS)
def test_wrappers_make_no_difference_to_what_is_restored(
    shm: Path, tmp_path: Path, there: str, here: str
) -> None:
    saved, into = wrapped_example(WRAPS[there], 1), wrapped_example(WRAPS[here], 2)
    through_an_image(shm, saved, into)
    for entry in ("model", "optim"):
        got, want = into[entry].state_dict(), saved[entry].state_dict()
        check_same(list(got.values()), list(want.values()))
    plain_files = tmp_path / "plain"
    dcp.save({"model": saved["model"].state_dict()}, checkpoint_id=plain_files)
    plain, again = newest_plain(PosixStorage(plain_files)), wrapped_example(WRAPS[here], 3)
    assert plain is not None
    load_plain({"model": again["model"]}, plain)
    check_same(again["model"].state_dict(), into["model"].state_dict())


@pytest.mark.usefixtures("_alone")
def test_a_module_of_which_module_is_an_attribute_is_restored_wrapped_or_not(shm: Path) -> None:
    saved, into = Holder(1), Holder(2)
    through_an_image(shm, {"model": DistributedDataParallel(saved)}, {"model": into})
    check_same(into.state_dict(), saved.state_dict())


def test_another_module_is_still_refused_by_name(shm: Path) -> None:
    with pytest.raises(CheckpointError, match="is another module than the one that was saved"):
        through_an_image(shm, {"model": Holder(1)}, {"model": layers(1)})


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_module_is_exported_with_the_keys_of_the_plain_one(wrap: str) -> None:
    model = layers(1)
    want = copy.deepcopy(model.state_dict())
    got = without_wrappers(WRAPS[wrap](model).state_dict())
    assert list(got) == list(want)
    plain = layers(2)
    plain.load_state_dict(got)
    check_same(plain.state_dict(), want)
    assert got._metadata["1"] == want._metadata["1"]  # type: ignore[attr-defined]


def test_what_is_no_module_is_exported_as_it_is() -> None:
    for value in ({"module.a": 1, "b": 2}, {1: 2}, [1], "module", {}, {"module": torch.ones(1)}):
        assert without_wrappers(value) is value
