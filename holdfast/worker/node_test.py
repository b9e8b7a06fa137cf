"""Tests the node that it runs on: does it compute correctly, and can it talk to another node?

The solo test multiplies matrices whose product is known, on every accelerator or else on the CPU. The
pair test runs collectives with the other node of its group, whose result is known too. Results are
compared, not only timed: a device that computes wrongly is worse than one that fails.

Each time is the best of several and of one thread: other load on a machine only makes times longer, and
threads that wait for each other on busy cores make them a hundred times longer.

The test runs in a standby, which has torch loaded, so it takes a fraction of a second. Without torch
there is nothing to test with, which is reported as such and not as a fault of the node.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from holdfast.messages.local import Test, Tested

SIDE = 384
PRODUCTS = 10
GATHERED = 1 << 18
GATHERS = 10


def run(test: Test, fds: list[int], tell: Callable[[Tested], object]) -> Tested:
    """Run both tests and return the result; failures are reported, never raised.

    The solo result is sent with `tell` before the pair test, in which the other node may hang.
    """
    try:
        import torch
    except ImportError as error:
        return Tested(detail=f"torch cannot be imported: {error}")
    torch.set_num_threads(1)
    fault = _simulated_fault()
    solo = _solo(fault)
    if not solo.solo_passed or test.size == 1:
        return solo
    tell(replace(solo, over=False))
    while "hold" in fault and os.path.exists(fault["hold"]):
        time.sleep(0.01)
    try:
        if "pair" in fault:
            raise RuntimeError(fault["pair"])
        passed, seconds = _gather(test, fds)
    except Exception as error:  # Hardware and drivers are what is tested: they may raise anything.
        return replace(solo, passed=False, detail=f"{type(error).__name__}: {error}")
    detail = "" if passed else "the other node's data arrived damaged"
    seconds *= fault.get("slow", 1.0)
    return replace(solo, passed=passed, seconds=seconds, detail=detail)


def _simulated_fault() -> dict[str, Any]:
    """Return the fault that a test of ours wants this node to have (see `holdfast.health`)."""
    fake = os.environ.get("HOLDFAST_FAKE_NODE")
    path = os.path.join(fake, "selftest.json") if fake else ""
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        found: dict[str, Any] = json.load(file)
        return found


def _solo(fault: dict[str, Any]) -> Tested:
    try:
        if "solo" in fault:
            raise RuntimeError(fault["solo"])
        passed, seconds = _multiply()
    except Exception as error:  # As above.
        return Tested(solo_passed=False, detail=f"{type(error).__name__}: {error}")
    detail = "" if passed else "it computed a wrong result"
    return Tested(solo_passed=passed, solo_s=seconds, detail=detail)


def _devices() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cuda:{index}" for index in range(count)] or ["cpu"]


def _multiply() -> tuple[bool, float]:
    """Multiply matrices of small integers, which every number format represents exactly.

    Returns whether the products are right, and the best time of the slowest device.
    """
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


def _gather(test: Test, fds: list[int]) -> tuple[bool, float]:
    """Gather data with the other node; return whether it is right, and the best time."""
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=test.limit_s)
    listening = {"master_listen_fd": fds[0]} if test.rank == 0 and fds else {}
    store = dist.TCPStore(
        test.address,
        test.port,
        test.size,
        is_master=test.rank == 0,
        timeout=limit,
        wait_for_workers=False,
        **listening,
    )
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore(test.name, store),
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
    with contextlib.suppress(Exception):  # The result is known; the other node may be gone already.
        dist.barrier()
    return True, min(taken)
