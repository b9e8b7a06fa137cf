"""Tests the node it runs on: can it compute, and can it talk to another?

Alone: matrix products whose result is known beforehand, on every accelerator if there are any, else on
the CPU. Then, with the other of its group: collectives whose result is known too. What is computed is
compared, not only timed: a device that computes wrongly is worse than one that fails.

Times are the best of several, and of one thread: what else runs on a machine makes the others longer,
and threads that wait for each other on busy cores a hundred times as long.

It runs in a standby, which has torch loaded; so a test takes a fraction of a second. Without torch
there is nothing to test with, which is told as that and not as a fault of the node.
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
    """Both tests; what fails is told, never raised. What the first has shown is told before the
    second, in which the other may keep it waiting."""
    try:
        import torch
    except ImportError as error:
        return Tested(detail=f"nothing to test with: {error}")
    torch.set_num_threads(1)
    fault = _feigned()
    alone = _solo(fault)
    if not alone.solo_passed or test.size == 1:
        return alone
    tell(replace(alone, over=False))
    _hold(fault)
    try:
        if "pair" in fault:
            raise RuntimeError(fault["pair"])
        passed, seconds = _together(test, fds)
    except Exception as error:  # Whatever the hardware or its drivers do: that is what is tested.
        return replace(alone, passed=False, detail=f"{type(error).__name__}: {error}")
    detail = "" if passed else "the other's data arrived wrong"
    seconds *= fault.get("slow", 1.0)
    return replace(alone, passed=passed, seconds=seconds, detail=detail)


def _solo(fault: dict[str, Any]) -> Tested:
    try:
        if "solo" in fault:
            raise RuntimeError(fault["solo"])
        passed, seconds = _alone()
    except Exception as error:  # As above.
        return Tested(solo_passed=False, detail=f"{type(error).__name__}: {error}")
    detail = "" if passed else "it computed a wrong result"
    return Tested(solo_passed=passed, solo_s=seconds, detail=detail)


# ---- what tests of ours want this node to suffer from (see `holdfast.health`) --------------------


def _feigned() -> dict[str, Any]:
    fake = os.environ.get("HOLDFAST_FAKE_NODE")
    path = os.path.join(fake, "selftest.json") if fake else ""
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        found: dict[str, Any] = json.load(file)
        return found


def _hold(fault: dict[str, Any]) -> None:
    """Stay in the middle of the test while there is a file of that name."""
    while "hold" in fault and os.path.exists(fault["hold"]):
        time.sleep(0.01)


# ---- tests -------------------------------------------------------------------------------------


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
    meeting = dist.TCPStore(
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
        store=dist.PrefixStore(test.name, meeting),
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
    with contextlib.suppress(Exception):  # All is proven; who is done first may be gone first.
        dist.barrier()
    return True, min(taken)


def _listening(test: Test, fds: list[int]) -> dict[str, Any]:
    return {"master_listen_fd": fds[0]} if test.rank == 0 and fds else {}
