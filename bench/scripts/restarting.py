"""A training function that is left and entered again, and breaks in whatever way it is told to.

Faults are ordered as `orders.py` says. Each entry writes the steps that it finishes to a file of its
own, as each life of `ddp.py` does.

Batches depend on step and rank, and gradients are summed in one flat buffer, so the sum does not depend
on how often groups were made: the parameters after N steps are the same bits, whatever happened.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ddp import StepMarks, last_step
from orders import Orders
from torch import nn

import holdfast

FEATURES, ROWS = 64, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps to train in all")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="idle time in each step")
    parser.add_argument("--width", type=int, default=64, help="hidden units")
    parser.add_argument(
        "--saves", type=Path, help="folder of a Checkpointer, which saves to memory"
    )
    parser.add_argument("--stop-at", type=Path, help="a file that may come to name the last step")
    parser.add_argument("--result", type=Path, help="a file for the digest of the parameters")
    return parser.parse_args()


def average(model: nn.Module, world: int) -> None:
    """Make the gradients the mean of all ranks': one buffer, one operation."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for gradient in gradients:
        gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()


def digest(model: nn.Module, optim: torch.optim.Optimizer) -> str:
    """Return a digest of every bit of the parameters and of the optimizer's state."""
    found = hashlib.sha256()
    for one in model.parameters():
        found.update(one.detach().numpy().tobytes())
        for _, value in sorted(optim.state[one].items()):
            found.update(torch.as_tensor(value).numpy().tobytes())
    return found.hexdigest()


def tell(step: int, moments: list[float]) -> None:
    """Print, once an entry, when it came to its group, its state and its first step."""
    if moments:
        entered, group, restored = moments
        took = f"group {group - entered:.3f} s, state {restored - group:.3f} s"
        first = time.monotonic() - restored
        print(f"entered {entered:.3f}, {took}, step {step} {first:.3f} s", flush=True)
        moments.clear()


@holdfast.inprocess.restartable()
def train(
    args: argparse.Namespace, orders: Orders, model: nn.Module, optim: torch.optim.Optimizer
) -> int:
    marks = StepMarks(Path(os.environ["BENCH_MARKS"]), int(os.environ["RANK"]))
    moments = [time.monotonic()]
    try:
        orders.strike("entry")
        dist.init_process_group("gloo")
        state = {"model": model, "optim": optim}
        moments.append(time.monotonic())
        saves = holdfast.Checkpointer(args.saves, state, memory_every=10) if args.saves else None
        kept = holdfast.inprocess.keep(state, saves)
        step = kept.restore()
        moments.append(time.monotonic())
        rank, world = dist.get_rank(), dist.get_world_size()
        while step < last_step(args):
            time.sleep(args.pause_ms / 1000)
            seed = torch.Generator().manual_seed(step * 1000 + rank)
            batch = torch.randn(ROWS, FEATURES, generator=seed)
            orders.strike("forward")
            loss = model(batch).square().mean()
            loss.register_hook(lambda _: orders.strike("backward"))
            optim.zero_grad(set_to_none=True)
            loss.backward()
            orders.strike("reduce")
            average(model, world)
            optim.step()
            orders.strike("between")
            step += 1
            kept.commit(step)
            if saves is not None:
                saves.save(step)
            marks.finished(step)
            tell(step, moments)
            orders.strike("after")
        return step
    finally:
        marks.close()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = nn.Linear(FEATURES, args.width)
    model = nn.Sequential(hidden, nn.ReLU(), nn.Linear(args.width, FEATURES))
    optim = torch.optim.Adam(model.parameters(), 1e-3)
    step = train(args, Orders(Path(os.environ["BENCH_MARKS"]).with_name("orders")), model, optim)
    if args.result and os.environ["RANK"] == "0":
        args.result.write_text(f"{step} {digest(model, optim)}\n")


if __name__ == "__main__":
    main()
