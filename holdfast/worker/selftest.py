"""Tests the node it runs on: can it compute, and can it talk to another?

Alone: matrix products whose result is known beforehand, on every accelerator if there are any, else on
the CPU. Then, with the other of its group: collectives whose result is known too. What is computed is
compared, not only timed: a device that computes wrongly is worse than one that fails.

Times are the best of several: what else runs on a machine makes the others longer.

It runs in a standby, which has torch loaded; so a test takes a fraction of a second.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from holdfast.messages.local import Test, Tested

SIDE = 384
PRODUCTS = 10
GATHERED = 1 << 18
GATHERS = 10


def run(test: Test, fds: list[int]) -> Tested:
    """Both tests; what fails is told, never raised."""
    solo_passed: bool | None = None
    solo_s: float | None = None
    try:
        solo_passed, solo_s = _alone()
        if not solo_passed:
            return Tested(solo_passed=False, solo_s=solo_s, detail="it computed a wrong result")
        if test.size == 1:
            return Tested(solo_passed=True, solo_s=solo_s)
        passed, seconds = _together(test, fds)
    except Exception as error:  # Whatever the hardware or its drivers do: that is what is tested.
        detail = f"{type(error).__name__}: {error}"
        if solo_passed is None:
            return Tested(solo_passed=False, detail=detail)
        return Tested(solo_passed=True, solo_s=solo_s, passed=False, detail=detail)
    detail = "" if passed else "the other's data arrived wrong"
    return Tested(solo_passed=True, solo_s=solo_s, passed=passed, seconds=seconds, detail=detail)


def _devices() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cuda:{index}" for index in range(count)] or ["cpu"]


def _alone() -> tuple[bool, float]:
    """Products of matrices of small whole numbers, which every format holds exactly: whether they
    are right, and how long the quickest takes on the slowest device."""
    import torch

    slowest_s = 0.0
    for device in _devices():
        row = torch.arange(SIDE, device=device, dtype=torch.float32) % 7
        matrix = row.repeat(SIDE, 1)
        expected = float(row.sum()) * row
        taken = []
        for _ in range(PRODUCTS):
            began = time.monotonic()
            right = torch.equal((matrix @ matrix)[0], expected)
            taken.append(time.monotonic() - began)
            if not right:
                return False, min(taken)
        slowest_s = max(slowest_s, min(taken))
    return True, slowest_s


def _together(test: Test, fds: list[int]) -> tuple[bool, float]:
    """Whether what was gathered is right, and how long gathering takes once both are there."""
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=test.limit_s)
    store = dist.TCPStore(
        test.address,
        test.port,
        test.size,
        is_master=test.rank == 0,
        timeout=limit,
        wait_for_workers=False,
        **_listening(test, fds),
    )
    on_gpu = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=test.rank,
        world_size=test.size,
        timeout=limit,
    )
    dist.barrier()
    taken = []
    mine = torch.full((GATHERED,), float(test.rank + 1), device=_devices()[0])
    for _ in range(GATHERS):
        began = time.monotonic()
        parts = [torch.empty_like(mine) for _ in range(test.size)]
        dist.all_gather(parts, mine)
        if any(not bool((part == rank + 1).all()) for rank, part in enumerate(parts)):
            return False, time.monotonic() - began
        taken.append(time.monotonic() - began)
    dist.barrier()
    return True, min(taken)


def _listening(test: Test, fds: list[int]) -> dict[str, Any]:
    return {"master_listen_fd": fds[0]} if test.rank == 0 and fds else {}
