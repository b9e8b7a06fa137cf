"""Living state that is sharded: with FSDP a rank's shard dies with it, with HSDP a replica has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kept_worlds import Body, Fault, enter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.errors import CheckpointError
from holdfast.inprocess.kept.keep import KeptState, keep
from holdfast.worker.checkpointer import Checkpointer

STEPS = 5


class Sharded:
    """A script that shards its model over the ranks, and makes all objects in each entry."""

    def __init__(self, mesh: tuple[int, ...]) -> None:
        torch.manual_seed(1)
        names = ("replicate", "shard")[-len(mesh) :]
        over = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
        )
        for layer in self.model:
            fully_shard(layer, mesh=over)
        fully_shard(self.model, mesh=over)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optim": self.optim}

    def train(self, kept: KeptState, to: int, broken: bool = False) -> None:
        step = kept.step
        while step < to:
            torch.manual_seed(step * 8 + dist.get_rank())
            self.model(torch.randn(3, 4)).pow(2).sum().backward()
            self.optim.step()
            self.optim.zero_grad()
            step += 1
            kept.commit(step)
        if broken:  # Left in a forward pass, with some parameters gathered.
            self.model[2].register_forward_hook(lambda *_: _leave())
            self.model(torch.ones(2, 4))

    def report(self, kept: KeptState) -> dict[str, Any]:
        tensors = {name: _whole(value) for name, value in self.model.state_dict().items()}
        for number, state in self.optim.state_dict()["state"].items():
            tensors |= {f"{number}.{key}": _whole(value) for key, value in state.items()}
        return {"tensors": tensors, "step": kept.step, "restored": kept.restored}


def _leave() -> None:
    raise Fault


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def run(
    where: Path,
    mesh: tuple[int, ...],
    *,
    replaced: tuple[int, ...] = (),
    saves: bool = False,
    entries: int = 2,
    shift: int = 0,
) -> list[Any]:
    """Train three steps in the first entry, and the rest in the last."""
    size = torch.Size(mesh).numel()

    def make() -> Body:
        def body(rank: int, entry: int) -> Any:
            script = Sharded(mesh)
            checkpointer = Checkpointer(where / "saved", script.state) if saves else None
            kept = keep(script.state, checkpointer)
            try:
                kept.restore()
            except CheckpointError as error:
                return str(error)
            if entry < entries - 1:
                script.train(kept, 2)
                if checkpointer is not None:
                    checkpointer.save(2).storage()
                script.train(kept, 3, broken=True)
            script.train(kept, STEPS)
            return script.report(kept)

        return body

    return enter(size, make, where / "results", entries=entries, replaced=replaced, shift=shift)[-1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], Any]:
    path = tmp_path_factory.mktemp("undisturbed")
    return {
        mesh: run(path / str(number), mesh, entries=1)[0]["tensors"]
        for number, mesh in enumerate(((2,), (2, 2)))
    }


def check(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    assert found["step"] == STEPS
    assert found["tensors"].keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found["tensors"][name], tensor), name


def test_shards_of_which_all_ranks_live_are_kept(tmp_path: Path, undisturbed: Any) -> None:
    for found in run(tmp_path, (2,)):
        assert (found["restored"].where, found["restored"].step) == ("living", 3)
        check(found, undisturbed[2,])


def test_a_shard_that_died_with_its_rank_comes_from_the_checkpointer(
    tmp_path: Path, undisturbed: Any
) -> None:
    for found in run(tmp_path, (2,), replaced=(1,), saves=True):
        assert (found["restored"].where, found["restored"].step) == ("storage", 2)
        assert "what rank 1 needs" in found["restored"].refused[0]
        check(found, undisturbed[2,])


def test_a_shard_that_died_with_its_rank_is_an_error_without_a_checkpointer(tmp_path: Path) -> None:
    for found in run(tmp_path, (2,), replaced=(0,)):
        assert "no rank has a whole copy of what rank 0 needs" in found
        assert "there is no checkpointer" in found


def test_a_replaced_rank_gets_its_shard_from_the_replica_of_it(
    tmp_path: Path, undisturbed: Any
) -> None:
    for found in run(tmp_path, (2, 2), replaced=(1, 2)):
        assert found["restored"].where == "living"
        assert found["restored"].sources == (0, 3, 0, 3)
        check(found, undisturbed[2, 2])


def test_both_replicas_of_a_shard_may_not_die(tmp_path: Path) -> None:
    for found in run(tmp_path, (2, 2), replaced=(1, 3)):
        assert "no rank has a whole copy of what ranks 1, 3 need" in found


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=["FSDP", "HSDP"])
def test_ranks_that_change_places_exchange_their_shards(
    tmp_path: Path, mesh: tuple[int, ...], undisturbed: Any
) -> None:
    for found in run(tmp_path, mesh, shift=1):
        assert found["restored"].where == "living"
        check(found, undisturbed[mesh])
