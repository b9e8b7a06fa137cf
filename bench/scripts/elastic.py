"""Trains with a fixed global batch at whatever world size there is, and leaves its parameters behind.

Run by one process without a launcher, it is the reference for what several ranks should arrive at.

    elastic.py FOLDER STEP_MS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast

RECORDS, GLOBAL_BATCH, EPOCHS = 3_000, 28, 3
"""The last step of an epoch is short, and 28 is divisible by neither 3 nor 8."""


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.x = torch.randn(RECORDS, 16, generator=drawn)
        self.y = torch.randn(RECORDS, 1, generator=drawn)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def main() -> None:
    folder, step_s = Path(sys.argv[1]), float(sys.argv[2]) / 1000
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.7)
    data = holdfast.data.ElasticDataLoader(
        Points(), batch_size=4, global_batch=GLOBAL_BATCH, shuffle=True, seed=3, name="points"
    )
    trainer = holdfast.ElasticTrainer(
        model, optimizer, data, scheduler=scheduler, max_grad_norm=1.0
    )
    state = {
        "model": model,
        "optim": optimizer,
        "schedule": scheduler,
        "trainer": trainer,
        "data": data,
    }
    ckpt = holdfast.Checkpointer(folder / "checkpoints", state, memory_every=3, storage_every=40)
    ckpt.restore()
    for _ in data.epochs(EPOCHS):
        for x, y in data:
            with trainer.accumulate():
                trainer.backward(torch.nn.functional.mse_loss(model(x), y))
            if trainer.step():
                ckpt.save(trainer.steps)
                time.sleep(step_s)
                if rank == 0:
                    (folder / "step").write_text(str(trainer.steps))
    if rank == 0:
        plain = getattr(model, "module", model)
        torch.save({**plain.state_dict(), "steps": trainer.steps}, folder / "parameters.pt")
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
