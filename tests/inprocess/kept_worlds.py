"""Worlds that enter a function again: survivors in their process, others in a fresh one."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ports import free_port
from torch.distributed.tensor import DTensor
from worlds import _warm

from holdfast.inprocess.kept.registry import function_left

PATIENCE_S = 120.0
Body = Callable[[int, int], Any]
"""Called with rank and entry; what it returns is kept for the test."""


class Fault(BaseException):
    """The end of an entry, in the middle of what it did."""


def _process(
    first: int,
    shift: int,
    size: int,
    ports: dict[int, int],
    make: Callable[[], Body],
    results: Path,
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        body = make()
        for entry, port in ports.items():
            rank = (first + shift * entry) % size
            address = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
            try:
                found = body(rank, entry)
                torch.save(found, results / f"{entry}-{rank}.pt")
                dist.barrier()
            except Fault:
                pass
            finally:
                dist.destroy_process_group()
                _forget_meshes()
            function_left()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise


def _forget_meshes() -> None:
    """Clear what torch remembers of DTensors: it takes meshes that look alike for the same one, though
    this rank may have another place in the new one."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def enter(
    size: int,
    make: Callable[[], Body],
    results: Path,
    *,
    entries: int = 2,
    replaced: Collection[int] = (),
    shift: int = 0,
) -> list[list[Any]]:
    """Have all ranks enter that often; return what they returned, by entry and rank.

    `make` is called once in each process and returns the function; the ranks in `replaced` are a fresh
    process in each entry. Each rank grows by `shift` from entry to entry."""
    _warm()
    results.mkdir(parents=True, exist_ok=True)
    ports = {entry: free_port() for entry in range(entries)}
    context = multiprocessing.get_context("fork")
    processes = []
    for rank in range(size):
        lives = [{e: p} for e, p in ports.items()] if rank in replaced else [ports]
        for life in lives:
            arguments = (rank, shift, size, life, make, results)
            processes.append(context.Process(target=_process, args=arguments))
    for process in processes:
        process.start()
    until = time.monotonic() + PATIENCE_S
    try:
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        codes = [process.exitcode for process in processes]
        assert codes == [0] * len(codes), codes
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [[_result(results / f"{e}-{r}.pt") for r in range(size)] for e in range(entries)]


def _result(path: Path) -> Any:
    return torch.load(path, weights_only=False) if path.exists() else None
