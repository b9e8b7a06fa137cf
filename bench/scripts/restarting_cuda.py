"""Trains on one GPU inside a restartable function, and raises every few steps with work in flight.

    restarting_cuda.py RESTARTS BACKEND FILE

Each rank writes how long it took from each failure to the next finished step, and how much of the
device's memory was in use then.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

import holdfast
from holdfast.inprocess import Context

WIDTH, STEPS, PRODUCTS = 2048, 5, 20
QUEUED = 4096
"""Matrices of this size are multiplied in the background: some 50 ms of work on an H200."""

restarts, backend, file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
seconds: list[float] = []
used: list[int] = []
failed_at = [0.0]


@holdfast.inprocess.restartable()
def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, context: Context) -> None:
    dist.init_process_group(backend)
    rank = dist.get_rank()
    kept = holdfast.inprocess.keep({"model": model, "optimizer": optimizer})
    step = kept.restore()
    replica = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    data = torch.randn(256, WIDTH, device="cuda")
    for _ in range(STEPS):
        loss = replica(data).pow(2).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step += 1
        kept.commit(step)
        if _ == 0:
            note(loss)
    if context.iteration == restarts:
        return
    queue_work()
    failed_at[0] = time.monotonic()
    if rank == dist.get_world_size() - 1:
        # Another signature each time: a failure that repeats would cost the process its place.
        raise type(f"Failure{context.iteration}", (RuntimeError,), {})("with work in flight")
    replica(data).sum().backward()
    torch.cuda.synchronize()


def note(loss: torch.Tensor) -> None:
    """Note that training is back, once the device has done the first step."""
    loss.item()
    if failed_at[0]:
        seconds.append(time.monotonic() - failed_at[0])
    free, total = torch.cuda.mem_get_info()
    used.append(total - free)


def queue_work() -> None:
    matrix = torch.randn(QUEUED, QUEUED, device="cuda")
    for _ in range(PRODUCTS):
        matrix = matrix @ matrix * 1e-4


torch.manual_seed(0)
torch.cuda.set_device(0)
layers = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)]).cuda()
train(layers, torch.optim.AdamW(layers.parameters(), 1e-4))
with open(f"{file}.{os.environ['RANK']}", "w") as out:
    json.dump({"seconds": seconds, "used": used}, out)
