"""A data-parallel training script with a checkpoint worth having, for `holdfast run` and torchrun.

It trains as `ddp.py` does, with a model whose state, AdamW's included, has as many bytes as it is told.
With `--with holdfast` each step is kept in memory by a `holdfast.Checkpointer`; with `--with torch`
rank 0 writes a file by `torch.save` now and then, and all ranks read it by `torch.load`. Where the
state came from, and how long that took, goes into a file for each life.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp import StepMarks, last_step, resume, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BYTES_OF_A_PARAMETER = 12
"""Itself and AdamW's two moments."""
ROWS = 16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--with", dest="keep", choices=("holdfast", "torch"), required=True)
    parser.add_argument("--size", type=int, default=200_000_000, help="bytes of a rank's state")
    parser.add_argument("--notes", type=Path, required=True, help="a folder for what was restored")
    parser.add_argument("--file", type=Path, required=True, help="where torch.save puts it")
    parser.add_argument("--file-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps to train in all")
    parser.add_argument("--stop-at", type=Path, help="a file that may come to name the last step")
    return parser.parse_args()


def restore(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, Any]:
    """The step to go on from, and what saves from there on."""
    began = time.monotonic()
    checkpointer: Any = None
    where: str | None = None
    if args.keep == "holdfast":
        import holdfast

        checkpointer = holdfast.Checkpointer(None, {"model": model, "optim": optimizer})
        step = checkpointer.restore()
        where = checkpointer.restored.where
    else:
        where = "file" if args.file.exists() else None
        step = resume(args.file, model, optimizer)
    note = {"where": where, "step": step, "began": began, "done": time.monotonic()}
    name = f"{os.environ['RANK']}.{os.getpid()}.{time.monotonic_ns()}"
    (args.notes / name).write_text(json.dumps(note))
    return step, checkpointer


def main() -> None:
    args = arguments()
    rank = int(os.environ["RANK"])
    marks = StepMarks(Path(os.environ["BENCH_MARKS"]), rank)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = int((args.size / BYTES_OF_A_PARAMETER / 2) ** 0.5)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step, checkpointer = restore(args, model, optimizer)
    parallel = DistributedDataParallel(model)
    while step < last_step(args):
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        inputs = torch.randn(ROWS, width, generator=generator)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(parallel(inputs), inputs))
        optimizer.step()
        step += 1
        if checkpointer is not None:
            checkpointer.save(step)
        elif rank == 0 and step % args.file_every == 0:
            save(args.file, step, model, optimizer)
        marks.finished(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
