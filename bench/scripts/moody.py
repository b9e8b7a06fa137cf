"""A plain data-parallel training script that hangs, pauses, saves and evaluates as it is told.

Like ddp.py it knows no launcher, and writes down each finished step. A rank hangs when there is a file
in the orders' folder that is named after the way and the rank; it notes when it began to.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ddp import FEATURES, StepMarks, last_step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

PAUSE_STEPS = 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--steps", type=int, default=1_000_000, help="steps to train in all")
    add("--step-ms", type=float, default=20.0, help="about how long a step takes")
    add("--between-ms", type=float, default=0.0, help="work of the script between its passes")
    add("--pauses", type=float, default=0.0, help="chance of a pause of ten steps, at each step")
    add("--save-every", type=int, default=0, metavar="STEPS")
    add("--save-s", type=float, default=0.0, help="how long rank 0 takes to save")
    add("--evaluate-every", type=int, default=0, metavar="STEPS")
    add("--linger-every", type=int, default=0, metavar="STEPS", help="all ranks pause at once")
    add("--linger-s", type=float, default=0.0)
    add("--slow-rank", type=int, default=-1)
    add("--slow", type=float, default=1.0, help="how many times as long that rank takes")
    add("--sharded", action="store_true", help="FSDP instead of DDP; without saves and evaluations")
    add("--stop-at", type=Path, help="a file that may come to name the last step")
    args = parser.parse_args()
    if args.sharded and (args.save_every or args.evaluate_every):
        parser.error("--sharded: rank 0 alone can neither save nor evaluate")
    return args


def told(what: str, rank: int) -> bool:
    """Whether the rank is to hang now, in that way; only once."""
    order = Path("orders") / f"{what}.{rank}"
    try:
        order.unlink()
    except FileNotFoundError:
        return False
    Path(f"{order}.done").write_text(str(time.monotonic()))
    return True


class Net(nn.Module):
    """Takes its time, and as long again for the gradients."""

    def __init__(self, rank: int, own_s: float) -> None:
        super().__init__()
        self.rank, self.own_s = rank, own_s
        self.inner = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if told("sleep", self.rank):
            time.sleep(10_000)
        if told("gil", self.rank):
            ctypes.PyDLL(None).usleep(4_000_000_000)
        time.sleep(self.own_s / 2)
        outputs: torch.Tensor = self.inner(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: time.sleep(self.own_s / 2))
        return outputs


class SlowStorage(io.RawIOBase):
    """Takes what it is given, in so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._pause_s = seconds / 10

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        time.sleep(self._pause_s)
        return memoryview(data).nbytes  # type: ignore[arg-type]


def evaluate(model: nn.Module, batches: int) -> None:
    model.eval()
    with torch.no_grad():
        for inputs in DataLoader([torch.ones(FEATURES)] * batches * 4, batch_size=4):
            model(inputs)
    model.train()


def tally(count: int) -> int:
    return sum(range(count))


def score(count: int) -> int:
    return tally(count) + 1


def compare(count: int) -> int:
    return score(count) - tally(count)


def report(seconds: float) -> None:
    """Work that no hook can see: plain Python, here and there."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        compare(10_000)


def between_steps(
    args: argparse.Namespace, step: int, rank: int, model: nn.Module, net: Net
) -> None:
    if args.save_every and step % args.save_every == 0 and rank == 0:
        torch.save(net.state_dict(), SlowStorage(args.save_s))
    if args.evaluate_every and step % args.evaluate_every == 0:
        turn = step // args.evaluate_every
        long = turn % 10 == 0
        if turn % 3 == 0:
            evaluate(model, 200 if long else 20)
        elif rank == 0 and turn % 3 == 1:
            evaluate(net, 200 if long else 20)
        elif rank == 0:
            report(4.0 if long else 0.5)
        dist.barrier()
    if args.linger_every and step % args.linger_every == 0:
        time.sleep(args.linger_s)


def main() -> None:
    args = arguments()
    rank = int(os.environ["RANK"])
    marks = StepMarks(Path(os.environ["BENCH_MARKS"]), rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own_s = args.step_ms / 1000 * (args.slow if rank == args.slow_rank else 1.0)
    net = Net(rank, own_s)
    model = fully_shard(net) if args.sharded else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    chance = random.Random(rank)
    inputs, step = torch.ones(16, FEATURES), 0
    while step < last_step(args):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        step += 1
        time.sleep(args.between_ms / 1000)
        if chance.random() < args.pauses:
            time.sleep(PAUSE_STEPS * own_s)
        between_steps(args, step, rank, model, net)
        if not told("skip", rank):
            dist.barrier()
        marks.finished(step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
