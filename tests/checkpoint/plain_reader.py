"""A program that reads a checkpoint with torch alone, in a world of its own; holdfast is shut out.

    plain_reader.py DIRECTORY EXPECTED WORLD_SIZE...

EXPECTED is the whole state, as one `torch.save` file, and which dimension each tensor is to be
sharded over. For each world size that many processes are forked (torch is imported once), and each
checks what it got. The exit code is 0 if all of them got what they should.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

Shards = dict[str, int]


def bits(tensor: torch.Tensor) -> list[int]:
    """Comparable also where `==` is not there for a dtype."""
    values: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return values


def blank(value: Any) -> Any:
    """The same structure, with nothing in it yet."""
    if isinstance(value, DTensor):
        return DTensor.from_local(
            torch.zeros_like(value.to_local()),
            value.device_mesh,
            value.placements,
            shape=value.shape,
            stride=value.stride(),
        )
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(child) for key, child in value.items()}
    if isinstance(value, list):
        return [blank(child) for child in value]
    return None


def check(got: Any, want: Any, where: str = "") -> None:
    assert type(got) is type(want), (where, type(got), type(want))
    if isinstance(want, DTensor):
        check(got.to_local(), want.to_local(), where)
    elif isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        assert bits(got) == bits(want), where
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            check(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for at, child in enumerate(want):
            check(got[at], child, f"{where}.{at}")
    else:
        assert got == want, (where, got, want)


def sharded(state: Any, shards: Shards, mesh: Any, where: str = "") -> Any:
    if isinstance(state, dict):
        return {k: sharded(v, shards, mesh, f"{where}{k}.") for k, v in state.items()}
    if where[:-1] in shards:
        return distribute_tensor(state, mesh, [Shard(shards[where[:-1]])], src_data_rank=None)
    return state


def read_alone(directory: Path, expected: Any) -> None:
    state = blank(expected)
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    check(state, expected)
    whole = directory.parent / "whole.pt"
    dcp_to_torch_save(directory, whole)
    check(torch.load(whole, weights_only=False), expected)


def read_as_rank(
    rank: int, world_size: int, directory: Path, expected: Any, shards: Shards
) -> None:
    store = dist.FileStore(str(directory.parent / f"store{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    want = sharded(expected, shards, mesh)
    state = blank(want)
    dcp.load(state, checkpoint_id=directory)
    check(state, want)
    dist.destroy_process_group()


def forked(rank: int, *arguments: Any) -> int:
    """The id of a process that reads as that rank and ends."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            read_as_rank(rank, *arguments)
            code = 0
        except BaseException:  # the edge of a process: what happened goes to stderr
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def main() -> int:
    sys.modules["holdfast"] = None  # type: ignore[assignment]  # whoever imports it now fails
    directory = Path(sys.argv[1])
    expected, shards = torch.load(sys.argv[2], weights_only=False)
    torch.set_num_threads(1)
    failed = 0
    for world_size in map(int, sys.argv[3:]):
        if world_size == 1:
            read_alone(directory, expected)
            continue
        arguments = world_size, directory, expected, shards
        pids = [forked(rank, *arguments) for rank in range(world_size)]
        failed += sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    return failed


if __name__ == "__main__":
    sys.exit(main())
