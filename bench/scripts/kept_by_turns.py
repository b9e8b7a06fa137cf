"""Trains two equal models in short steps by turns: one is kept over restarts, the other is not.

Both are in one restartable function, whose own threads wait all the while. Neighbouring turns have the
machine alike. The result is a line of JSON in the file that is named.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from byturns import STEPS, WARM_TURNS, processor_s
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

WIDTH, ROWS = 256, 256
OWN_THREADS = "holdfast-leave"
"""The thread that waits for the order to leave."""


def stepper(
    after: Callable[[], None],
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and a function that trains it for a turn."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model = DistributedDataParallel(module)
    optim = torch.optim.AdamW(module.parameters(), lr=1e-3)
    batch = torch.randn(ROWS, WIDTH)

    def turn() -> None:
        for _ in range(STEPS):
            model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
            after()

    return module, optim, turn


@holdfast.inprocess.restartable()
def train(turns: int, result: Path) -> None:
    dist.init_process_group("gloo")
    step = 0

    def commit() -> None:
        nonlocal step
        step += 1
        kept.commit(step)

    module, optim, with_kept = stepper(commit)
    without = stepper(lambda: None)[2]
    kept = holdfast.inprocess.keep({"model": module, "optim": optim})
    kept.restore()
    work = {"kept": with_kept, "not": without}
    found: dict[str, list[float]] = {"kept": [], "not": []}
    own = Path("/proc/self/task")
    for turn in range(WARM_TURNS + turns):
        if turn == WARM_TURNS:
            used, since = processor_s(own, OWN_THREADS), time.monotonic()
        for kind in sorted(work, reverse=bool(turn % 2)):  # By turns, who is first, too.
            began = time.perf_counter()
            work[kind]()
            if turn >= WARM_TURNS:
                found[kind].append((time.perf_counter() - began) / STEPS)
    threads = (processor_s(own, OWN_THREADS) - used) / (time.monotonic() - since)
    if dist.get_rank() == 0:
        half_written = result.with_suffix(".part")
        half_written.write_text(json.dumps({**found, "threads": threads, "steps": STEPS}))
        half_written.rename(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--stop-at", help="not used: the turns end it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    train(args.turns, args.result)


if __name__ == "__main__":
    main()
