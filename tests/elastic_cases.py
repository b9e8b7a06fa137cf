"""Training runs whose results must not depend on the number of ranks, and what they are compared with.

`Lockstep` follows the contract of loaders in docs/data.md. `reference` trains in the plainest way: one
process, whole batches, no trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

import holdfast

SIZE, GLOBAL_BATCH, EPOCHS = 61, 13, 2
STEPS_PER_EPOCH = 5
"""Four of 13 records and one of 9."""


class Info(NamedTuple):
    records: int
    global_records: int | None
    index: int  # type: ignore[assignment]
    of: int


class Lockstep:
    """Hands each rank its records of each step, in micro-batches."""

    def __init__(self, batch_size: int, rank: int, world: int, *, global_batch: int | None) -> None:
        self.batch_size = batch_size
        self.global_batch = global_batch
        self.current: Info | None = None
        self.epoch = self.position = self._offset = 0
        self._rank, self._world = rank, world

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self._offset = self.position

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Records of the rest of an epoch, as indices."""
        while self.position < SIZE:
            start = self.position
            stop = min(start + (self.global_batch or self._world * self.batch_size), SIZE)
            own = [p for p in range(start, stop) if (p - self._offset) % self._world == self._rank]
            most = math.ceil((stop - start) / self._world)
            count = math.ceil(most / self.batch_size)
            parts = torch.tensor(own).tensor_split(count)
            for index, part in enumerate(parts):
                if index == count - 1:
                    self.position = stop
                self.current = Info(len(part), stop - start, index, count)
                yield part
        self.epoch, self.position, self._offset = self.epoch + 1, 0, 0


class Case(NamedTuple):
    wrapper: str = "ddp"
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    batch_size: int = 2
    loss: Any = "mean"
    told: bool = False
    """Whether the script tells the samples, so that their sum has to be found."""
    sync_each: bool = False


CASES = {
    "ddp, SGD with momentum, float64": Case(),
    "ddp, AdamW, float64": Case(optimizer="adamw"),
    "ddp, SGD with momentum, float32": Case(dtype=torch.float32),
    "ddp, AdamW, float32": Case(optimizer="adamw", dtype=torch.float32),
    "ddp, micro-batches without records": Case(batch_size=1),
    "ddp, one micro-batch a step": Case(batch_size=13),
    "ddp, loss is a sum": Case(loss="sum"),
    "ddp, samples are told": Case(told=True),
    "ddp, samples are told, loss is a sum": Case(told=True, loss="sum"),
    "ddp, gradients reduced each time": Case(sync_each=True),
    "fully_shard, SGD with momentum, float64": Case("fully_shard"),
    "fully_shard, AdamW, float32": Case("fully_shard", "adamw", torch.float32),
    "fully_shard, micro-batches without records": Case("fully_shard", batch_size=1),
    "fully_shard, samples are told": Case("fully_shard", told=True),
    "fully_shard, gradients reduced each time": Case("fully_shard", sync_each=True),
}
MAX_NORM = 0.45
"""Some steps are clipped by it, and some are not."""


def records(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    x = torch.randn(SIZE, 6, generator=made, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (SIZE,), generator=made)


def new_model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(5)
    layers = (torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    return torch.nn.Sequential(*layers).to(dtype)


def new_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def new_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)


class Training:
    """A model and all that trains it, as a script would make them."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        self.case = case
        self.x, self.y = records(case.dtype)
        self.model = wrap(case.wrapper, new_model(case.dtype), world)
        self.optimizer = new_optimizer(case.optimizer, self.model)
        self.scheduler = new_scheduler(self.optimizer)
        self.data = Lockstep(case.batch_size, rank, world, global_batch=GLOBAL_BATCH)
        self.trainer = holdfast.ElasticTrainer(
            self.model,
            self.optimizer,
            self.data,
            scheduler=self.scheduler,
            max_grad_norm=MAX_NORM,
            loss=case.loss,
            sync_each=case.sync_each,
        )
        self.norms: list[float] = []

    def until(self, step: int) -> None:
        while self.trainer.steps < step:
            for part in self.data:
                with self.trainer.accumulate(len(part) if self.case.told else None):
                    out = self.model(self.x[part])
                    loss = functional.cross_entropy(out, self.y[part], reduction=self.case.loss)
                    self.trainer.backward(loss)
                if self.trainer.step():
                    self.norms.append(float(self.trainer.grad_norm))
                    if self.trainer.steps == step:
                        return


def wrap(wrapper: str, model: torch.nn.Module, world: int) -> torch.nn.Module:
    if world == 1:
        return model
    if wrapper == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if wrapper == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer)
        return model
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


class Reference(NamedTuple):
    parameters: dict[str, torch.Tensor]
    norms: list[float]
    rate: float


def reference(case: Case, steps: int) -> Reference:
    """What one process gets from whole batches."""
    x, y = records(case.dtype)
    model = new_model(case.dtype)
    optimizer = new_optimizer(case.optimizer, model)
    scheduler = new_scheduler(optimizer)
    norms = []
    for step in range(steps):
        start = step % STEPS_PER_EPOCH * GLOBAL_BATCH
        stop = min(start + GLOBAL_BATCH, SIZE)
        functional.cross_entropy(model(x[start:stop]), y[start:stop]).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return Reference(model.state_dict(), norms, optimizer.param_groups[0]["lr"])
