"""No snapshot counts that mixes two moments of a state, whatever changes it right after the save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from states import FakeLink
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import run_world

from holdfast.checkpoint.checkpointer import LinkedCheckpointer
from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.memory.images import id_of
from holdfast.checkpoint.restore import load as restore
from holdfast.checkpoint.restore.sources import open_image
from holdfast.messages.requests import StateFound

SIDE = 1400
"""One layer of 8 MB: a copy of it takes as long as the operation that changes it."""
TRIES = 6


class Training:
    """One large layer, an average of it, and an optimizer that has taken a step."""

    def __init__(self, link: FakeLink, **settings: Any) -> None:
        self.model = torch.nn.Linear(SIDE, SIDE, bias=False)
        self.weight = self.model.weight
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.other = torch.empty(SIDE, SIDE)
        self.state = {"model": self.model, "optim": self.optimizer}
        self.link = link
        self.checkpointer = LinkedCheckpointer(None, self.state, link=link, **settings)
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer.step()

    def fill(self, value: float) -> None:
        """Make every element of the state the same."""
        with torch.no_grad():
            self.weight.fill_(value)
            for moment in ("exp_avg", "exp_avg_sq"):
                self.optimizer.state[self.weight][moment].fill_(value)
        self.other.fill_(-value)


def _no_grad(act: Callable[[Training], object]) -> Callable[[Training], object]:
    def quietly(training: Training) -> None:
        with torch.no_grad():
            act(training)

    return quietly


def _swap(training: Training) -> None:
    """Put an average of the weights in their place, as for an evaluation."""
    kept = training.weight.detach().clone()
    training.weight.copy_(training.other)
    training.other.copy_(kept)


def _fused_by_hand(training: Training) -> None:
    state = training.optimizer.state[training.weight]
    torch._fused_adam_(
        [training.weight],
        [torch.ones_like(training.weight)],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [torch.tensor(1.0)],
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


def _restore(training: Training) -> None:
    training.link.offered = [StateFound(where="nowhere")]
    training.checkpointer.restore()
    training.weight.detach().copy_(training.other)


COUNTED = {
    "tanh_": _no_grad(lambda t: t.weight.tanh_()),
    "copy_": _no_grad(lambda t: t.weight.copy_(t.other)),
    "swap": _no_grad(_swap),
    "foreach": _no_grad(lambda t: torch._foreach_mul_([t.weight], 3.0)),
    "detach": lambda t: t.weight.detach().tanh_(),
    "moment": lambda t: t.optimizer.state[t.weight]["exp_avg"].tanh_(),
    "step": lambda t: t.optimizer.step(),
    "restore": _no_grad(_restore),
}
"""Changes that torch counts."""
UNCOUNTED = {
    "fused": _no_grad(_fused_by_hand),
    "data": lambda t: t.weight.data.tanh_(),
    "numpy": lambda t: t.weight.detach().numpy().__imul__(3.0),
}
"""Changes that torch does not count."""
EVERY: dict[str, Callable[[Training], object]] = {**COUNTED, **UNCOUNTED}


@pytest.fixture
def link(shm: Path) -> FakeLink:
    return FakeLink(shm)


def torn_saves(training: Training, change: Callable[[Training], object]) -> list[str]:
    """Save, and change the state at once; return what counts although it is of no one moment."""
    found = []
    for step in range(1, TRIES + 1):
        training.fill(0.5 + step)
        ticket = training.checkpointer.save(step)
        change(training)
        if ticket.memory(60).outcome != "saved":
            continue
        for name, tensor in loaded(training.link.saves[-1][2]).items():
            if not bool((tensor == 0.5 + step).all()):
                found.append(f"{name} of step {step}")
    return found


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """Return the large tensors of an image."""
    state: dict[str, Any] = {"model": None, "optim": None}
    record = Image.open(path).record()
    assert record is not None
    with ExitStack() as until:
        restore.load(state, [open_image(path, id_of(record), until)], 0)
    moments = state["optim"]["state"]["weight"]
    return {
        "weight": state["model"]["weight"],
        "exp_avg": moments["exp_avg"],
        "exp_avg_sq": moments["exp_avg_sq"],
    }


@pytest.mark.parametrize("change", EVERY.values(), ids=EVERY)
def test_a_save_is_of_one_moment_whatever_changes_the_state_next(
    link: FakeLink, change: Callable[[Training], object]
) -> None:
    assert torn_saves(Training(link), change) == []


@pytest.mark.parametrize("change", COUNTED.values(), ids=COUNTED)
def test_an_overlapped_save_that_torch_saw_change_never_counts_torn(
    link: FakeLink, change: Callable[[Training], object]
) -> None:
    assert torn_saves(Training(link, overlap=True), change) == []


def test_a_changed_shard_is_seen(tmp_path: Path) -> None:
    """Torch counts the changes of a DTensor in the DTensor, not in this rank's part of it."""

    def act(rank: int) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(64), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        state = {"weight": weight, "optim": optimizer}
        checkpointer = LinkedCheckpointer(None, state, link=FakeLink(tmp_path), overlap=True)
        ticket = checkpointer.save(1)
        with torch.no_grad():
            weight.tanh_()
        assert "changed while it was copied" in ticket.memory().reason

    run_world(1, act)
