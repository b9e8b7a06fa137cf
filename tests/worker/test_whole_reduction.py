"""Reductions that leave gradients as they were if they fail, and change nothing if they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from torch.nn.parallel import DistributedDataParallel
from worlds import run_world

from holdfast.worker.elastic.whole_reduction import WholeReduction, can_reduce_whole


def gradients(whole: bool, device: str, rank: int) -> list[torch.Tensor]:
    """Three backward passes through DDP, the first of which is not reduced."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=0.005)
    reduction = WholeReduction(model) if whole else None
    torch.manual_seed(rank)
    inputs = torch.randn(3, 8, 32).to(device)
    with model.no_sync():
        model(inputs[0]).square().mean().backward()
    for one in inputs[1:]:
        model(one).square().mean().backward()
    assert reduction is None or not reduction.failed
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def compare(device: str) -> Callable[[int], None]:
    def act(rank: int) -> None:
        plain, whole = (gradients(kind, device, rank) for kind in (False, True))
        assert len(plain) == 8
        assert all(torch.equal(one, other) for one, other in zip(plain, whole, strict=True))
        dist.barrier()

    return act


def test_gradients_are_those_of_ddp_to_the_bit() -> None:
    run_world(3, compare("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_on_a_gpu_are_those_of_ddp_to_the_bit() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    try:
        compare("cuda")(0)
    finally:
        dist.destroy_process_group()


def test_hooks_and_views_of_the_script_are_left_alone(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer = torch.nn.Linear(2, 2)
        assert can_reduce_whole(DistributedDataParallel(layer))
        assert not can_reduce_whole(layer)
        assert not can_reduce_whole(DistributedDataParallel(layer, gradient_as_bucket_view=True))
        hooked = DistributedDataParallel(layer)
        hooked.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
        assert not can_reduce_whole(hooked)
    finally:
        dist.destroy_process_group()
