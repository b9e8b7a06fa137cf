"""A plain data-parallel training script, as one would write it for torchrun.

It is what every launcher in the bench has to start and to bring back, so it knows none of them: it
reads the environment torchrun gives and trains a small model with DDP, over gloo and on the CPU unless
it is told otherwise. The one thing it does for the bench is to write down each finished step, with a
clock that all processes of the machine share; a step counts as finished once its checkpoint, if one was
due, is in place.

The batches depend only on step and rank, so a resumed run trains on what it would have seen.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES = 64


class StepMarks:
    """One file a process: who it is, then a line for each finished step.

    A line is one short write, so a process that is killed leaves whole lines behind.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        name = f"{rank}.{os.getpid()}.{time.monotonic_ns()}"
        self._fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._write(f"begin {rank} {os.getpid()}")

    def finished(self, step: int) -> None:
        self._write(str(step))

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, text: str) -> None:
        os.write(self._fd, f"{text} {time.monotonic():.6f}\n".encode())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps to train in all")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="idle time in each step")
    parser.add_argument("--batch", type=int, default=16, help="rows in a rank's batch")
    parser.add_argument("--width", type=int, default=128, help="hidden units")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--checkpoint", type=Path, help="save to this file and resume from it")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--stop-at", type=Path, help="a file that may come to name the last step")
    return parser.parse_args()


def last_step(args: argparse.Namespace) -> int:
    """The step to end at. All ranks are within one step of each other, so a number that was written
    well ahead of them ends them together."""
    try:
        return min(int(args.steps), int(args.stop_at.read_text()))
    except (AttributeError, FileNotFoundError):
        return int(args.steps)


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    partial = path.with_suffix(".partial")
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, partial)
    os.replace(partial, path)


def resume(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint if there is one; the step to go on from."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def batch(step: int, rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    inputs = torch.randn(rows, FEATURES, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True)


def own_device(kind: str) -> torch.device:
    """The rank's own GPU, or a share of one where there are fewer GPUs than ranks."""
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def main() -> None:
    args = arguments()
    rank = int(os.environ["RANK"])
    marks = StepMarks(Path(os.environ["BENCH_MARKS"]), rank)
    device = own_device(args.device)
    dist.init_process_group(args.backend)
    torch.manual_seed(0)
    width = args.width
    layers = (nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    model = nn.Sequential(*layers, nn.Linear(width, 1)).to(device)
    kind = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-3)
    step = resume(args.checkpoint, model, optimizer)
    parallel = DistributedDataParallel(model)

    while step < last_step(args):
        inputs, targets = (part.to(device) for part in batch(step, rank, args.batch))
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(parallel(inputs), targets))
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        step += 1
        if args.pause_ms:
            time.sleep(args.pause_ms / 1000)
        if rank == 0 and args.checkpoint and step % args.checkpoint_every == 0:
            save(args.checkpoint, step, model, optimizer)
        marks.finished(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
