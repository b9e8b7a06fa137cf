"""The training of `restarting.py` in NVRx's in-process restart, over gloo and without a GPU.

NVRx's own abort looks for CUDA devices. In its place the process groups are destroyed, which is what a
script for gloo can do: it closes the connections, and the other ranks fail in their collective.

NVRx 0.4 does not understand annotations that are strings, so here they are none.
"""

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp import StepMarks, last_step
from nvidia_resiliency_ext import inprocess
from orders import Orders
from torch import nn

FEATURES, ROWS = 64, 8


class DestroyGroups(inprocess.abort.Abort):
    def __call__(self, state: Any) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()
        return state


@inprocess.Wrapper(
    store_kwargs={"timeout": timedelta(seconds=60), "port": int(os.environ["MASTER_PORT"]) + 1},
    abort=DestroyGroups(),
)
def train(
    args: argparse.Namespace,
    orders: Orders,
    model: nn.Module,
    optim: torch.optim.Optimizer,
    store: dist.Store,
    entry: inprocess.CallWrapper = None,
) -> None:
    marks = StepMarks(Path(os.environ["BENCH_MARKS"]), int(os.environ["RANK"]))
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        mine = dist.PrefixStore(str(entry.iteration), store)
        dist.init_process_group("gloo", store=mine, rank=rank, world_size=world)
        step = 0
        while step < last_step(args):
            time.sleep(args.pause_ms / 1000)
            optim.zero_grad(set_to_none=True)
            model(torch.randn(ROWS, FEATURES)).square().mean().backward()
            for one in model.parameters():
                dist.all_reduce(one.grad)
            optim.step()
            step += 1
            marks.finished(step)
            orders.strike("after")
    finally:
        marks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--pause-ms", type=float, default=20.0)
    parser.add_argument("--stop-at", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Linear(FEATURES, FEATURES)
    optim = torch.optim.Adam(model.parameters(), 1e-3)
    orders = Orders(Path(os.environ["BENCH_MARKS"]).with_name("orders"))
    port, first = int(os.environ["MASTER_PORT"]) + 2, os.environ["RANK"] == "0"
    store = dist.TCPStore("127.0.0.1", port, int(os.environ["WORLD_SIZE"]), first)
    train(args, orders, model, optim, store)


if __name__ == "__main__":
    main()
