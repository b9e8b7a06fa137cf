"""Worlds of real processes, joined by gloo, with torch imported only once."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from ports import free_port

PATIENCE_S = 90.0


def _rank(rank: int, size: int, port: int, act: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if size > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    try:
        act(rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise


def run_world(size: int, act: Callable[[int], None]) -> None:
    """Have that done by every rank of a world, each a process of `multiprocessing`; all succeed."""
    codes = end_world(start_world(size, act))
    assert codes == [0] * size, codes


@cache
def _warm() -> None:
    """What every rank would have to import for its first step, a second each."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.sum().backward()
    torch.optim.AdamW([parameter]).step()
    importlib.import_module("torch.distributed.tensor")
    importlib.import_module("torch.distributed.fsdp")


def start_world(size: int, act: Callable[[int], None]) -> list[multiprocessing.Process]:
    _warm()
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [context.Process(target=_rank, args=(rank, size, port, act)) for rank in range(size)]
    for process in ranks:
        process.start()
    return ranks  # type: ignore[return-value]


def end_world(ranks: Sequence[multiprocessing.Process]) -> list[int | None]:
    """Their exit codes; whoever does not end is killed."""
    until = time.monotonic() + PATIENCE_S
    try:
        for process in ranks:
            process.join(max(0.0, until - time.monotonic()))
        for process in ranks:
            if process.exitcode is None:
                _show_stacks(process)
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _show_stacks(process: multiprocessing.Process) -> None:
    """Print where a rank stands that does not end, for the report of the test."""
    program = Path(sys.executable).parent / "py-spy"
    command = [str(program), "dump", "--pid", str(process.pid)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    print(said.stdout or said.stderr, file=sys.stderr)


def left_in_shared_memory(pids: Sequence[int | None]) -> list[str]:
    """What these processes left there."""
    names = [path.name for path in Path("/dev/shm").glob("holdfast-*")]
    return [name for name in names if any(f"script-{pid}-" in name for pid in pids)]
