"""Trains in short steps, by turns with all the hooks that watch them and without any.

Whatever else a machine does, neighbouring turns have it alike: that is the only way to see a hundredth
of a step on one that is shared. What threads and processes beside the training cost is read from the
kernel's own account of them. The result is a line of JSON in the file that is named.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import backward as watched_backward
from torch.nn.modules import module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer

WIDTH, ROWS = 256, 256
STEPS = 10
"""In a turn."""
WARM_TURNS = 20


@contextmanager
def without_hooks() -> Iterator[None]:
    """Take away what torch calls on our behalf, for a while."""
    places = (
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
        module._global_forward_pre_hooks,
    )
    kept = [dict(place) for place in places]
    for place in places:
        place.clear()
    torch.autograd.backward = watched_backward.__wrapped__
    try:
        yield
    finally:
        torch.autograd.backward = watched_backward
        for place, hooks in zip(places, kept, strict=True):
            place.update(hooks)


def took(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - began) / STEPS


def processor_s(tasks: Path, name: str = "") -> float:
    """What the threads of a process have used, all of them or those of that name."""
    return sum(
        int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in tasks.iterdir()
        if not name or (task / "comm").read_text().strip() == name
    )


def main() -> None:
    turns, result = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optim = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()

    own, agent = Path("/proc/self/task"), Path(f"/proc/{os.getppid()}/task")
    found: dict[str, list[float]] = {"watched": [], "not": []}
    for turn in range(WARM_TURNS + turns):
        if turn == WARM_TURNS:
            before = processor_s(own, "holdfast-beat"), processor_s(agent), time.monotonic()
        # By turns, who is first, too.
        for kind in sorted(found, reverse=bool(turn % 2)):
            with without_hooks() if kind == "not" else nullcontext():
                seconds = took(step)
            if turn >= WARM_TURNS:
                found[kind].append(seconds)
    wall_s = time.monotonic() - before[2]
    shares = {
        "pulse": (processor_s(own, "holdfast-beat") - before[0]) / wall_s,
        "agent": (processor_s(agent) - before[1]) / wall_s,
    }
    if dist.get_rank() == 0:
        half_written = result.with_suffix(".part")
        half_written.write_text(json.dumps({**found, **shares}))
        half_written.rename(result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
