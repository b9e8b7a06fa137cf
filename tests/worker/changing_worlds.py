"""Worlds of real processes that enter a training function again, in another world: ranks are killed,
fresh processes take their places or not, survivors keep theirs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ports import free_port
from torch.nn.parallel import DistributedDataParallel
from worlds import _warm

import holdfast
from holdfast.data import ElasticDataLoader
from holdfast.inprocess import groups
from holdfast.inprocess.kept.keep import keep
from holdfast.inprocess.kept.registry import function_left

PATIENCE_S = 120.0
SIZE, GLOBAL_BATCH, BATCH, STEPS = 96, 32, 2, 6
"""Three steps an epoch, two epochs."""


class Fault(NamedTuple):
    """Where which process fails in which entry, and how."""

    process: int
    step: int
    """Steps that were finished before."""
    micro_batch: int
    place: str
    """`forward`, `backward`, `buckets` or `reduced`: before the backward pass, in it, after the first
    bucket was reduced, or after all were."""
    kill: bool = True
    entry: int = 0


class Net(torch.nn.Module):
    """Registered in the order in which gradients come, as DDP's later buckets are: its first ones are
    in that of registration, and gloo would add in another order after DDP was made again."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(16, 1, bias=False)
        self.first = torch.nn.Linear(4, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return found


class Injected(Exception):
    """An error in one rank."""


class Script:
    """What a process does: its objects are made once, or in each entry."""

    def __init__(
        self,
        process: int,
        faults: Sequence[Fault],
        *,
        remake: bool,
        bucket_mb: float | None = None,
        **options: Any,
    ) -> None:
        self.process, self.faults = process, faults
        self.remake, self.bucket_mb, self.options = remake, bucket_mb, options
        self.computed: list[tuple[int, int, int]] = []
        """Entry, step and record of each record whose gradient was computed."""
        self.passes = [0, 0]
        self.make()

    def make(self) -> None:
        torch.manual_seed(7)
        self.model = Net()
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        records = [(torch.tensor(n), torch.randn(4)) for n in range(SIZE)]
        self.data = ElasticDataLoader(
            records, BATCH, global_batch=GLOBAL_BATCH, shuffle=True, seed=3
        )

    def enter(self, entry: int) -> dict[str, Any]:
        if entry and self.remake:
            self.make()
        replica = DistributedDataParallel(self.model, init_sync=False, bucket_cap_mb=self.bucket_mb)
        trainer = holdfast.ElasticTrainer(replica, self.optim, self.data, **self.options)
        state = {"model": self.model, "optim": self.optim, "trainer": trainer, "data": self.data}
        kept = keep(state)
        kept.restore()
        self.model.first.weight.register_hook(lambda grad: self.fail_late(entry, trainer))
        for _ in self.data.epochs(2):
            for number, x in self.data:
                assert self.data.current is not None
                with trainer.accumulate():
                    self.fail(entry, trainer.steps, "forward")
                    loss = replica(x).pow(2).mean()
                    loss.register_hook(lambda grad: self.fail(entry, trainer.steps, "backward"))
                    self.passes[min(entry, 1)] += 1
                    if self.data.current.records:
                        self.computed += [(entry, trainer.steps, int(n)) for n in number]
                    trainer.backward(loss)
                self.fail(entry, trainer.steps, "reduced")
                if trainer.step():
                    kept.commit(trainer.steps)
        return {
            "model": self.model.state_dict(),
            "optim": self.optim.state_dict(),
            "computed": self.computed,
            "passes": self.passes,
            "restored": kept.restored,
            "samples": trainer.samples,
        }

    def fail_late(self, entry: int, trainer: Any) -> None:
        """Fail when the gradients of the first layer come, which are the last."""
        reduction = trainer.kept_steps._reduction
        for work in reduction._works if reduction is not None else ():
            work.wait()
        self.fail(entry, trainer.steps, "buckets")

    def fail(self, entry: int, step: int, place: str) -> None:
        current = self.data.current
        assert current is not None
        for fault in self.faults:
            here = (self.process, step, current.index, place, entry)
            if here == (fault.process, fault.step, fault.micro_batch, fault.place, fault.entry):
                if fault.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise Injected


def _live(
    process: int,
    places: dict[int, tuple[int, int, int]],
    make: Callable[[int], Script],
    results: Path,
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        script = make(process)
        groups.watch()
        for entry, (rank, size, port) in places.items():
            address = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
            try:
                torch.save(script.enter(entry), results / f"{rank}.pt")
                dist.barrier()
            except (Injected, RuntimeError) as error:
                # A rank that fails, and those whose collectives end with it.
                if entry == max(places):
                    raise
                del error
            groups.abort_groups()
            function_left()
            groups.forget_groups()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise


def train(
    worlds: Sequence[Sequence[int]],
    results: Path,
    *faults: Fault,
    remake: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train in these worlds, one after the other: each lists its processes by their ranks.

    Return what the ranks of the last one have in the end. `faults` end all worlds but the last."""
    _warm()
    results.mkdir(parents=True, exist_ok=True)
    ports = [free_port() for _ in worlds]
    context = multiprocessing.get_context("fork")
    running = {}
    for process in sorted({one for world in worlds for one in world}):
        places = {
            entry: (world.index(process), len(world), ports[entry])
            for entry, world in enumerate(worlds)
            if process in world
        }

        def make(process: int) -> Script:
            return Script(process, faults, remake=remake, **options)

        running[process] = context.Process(target=_live, args=(process, places, make, results))
    for one in running.values():
        one.start()
    until = time.monotonic() + PATIENCE_S
    try:
        for one in running.values():
            one.join(max(0.0, until - time.monotonic()))
        codes = {process: running[process].exitcode for process in worlds[-1]}
        assert set(codes.values()) == {0}, codes
    finally:
        for one in running.values():
            one.kill()
            one.join()
    return [torch.load(results / f"{r}.pt", weights_only=False) for r in range(len(worlds[-1]))]
