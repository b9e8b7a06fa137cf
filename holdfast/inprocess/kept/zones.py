"""Guards the time in which kept state is between two steps.

The zone begins when an optimizer is about to change the state and ends with `commit`. Leaving a
function waits for the end of a zone, because a state that is left in the middle of one is
worthless.

On CUDA the host runs ahead of the device. An all-reduce that is aborted lets go the optimizer's
kernels that are queued behind it, and they would run on garbage although the host has long been
elsewhere. So a zone begins only once the device has done all that is queued and the process group
reports no error. What the step queues after that depends on no other rank. The price is that the
host no longer runs ahead of the device over an optimizer's step: once a step, the device waits for
the launch of the first kernels of that step, which takes some tens of microseconds, and longer
where the optimizer is not fused.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist


def before_steps(
    optimizers: Iterable[torch.optim.Optimizer], begin: Callable[[], None]
) -> Callable[[], None]:
    """Call `begin`, a method, before each step of these optimizers; return what ends that."""
    weak = weakref.WeakMethod(begin)
    uncompiled: list[Callable[[], None]] = []

    def begin_if_there() -> None:
        act = weak()
        if act is not None:
            act()

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not uncompiled:
            # A script may compile its optimizer's step. To exempt a function takes some 10 µs, so it is
            # done once.
            dynamo = sys.modules.get("torch._dynamo")
            if dynamo is None:
                begin_if_there()
                return
            uncompiled.append(dynamo.disable(begin_if_there))
        uncompiled[0]()

    before_step._torchdynamo_disable = True  # type: ignore[attr-defined]
    handles = [optimizer.register_step_pre_hook(before_step) for optimizer in optimizers]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def await_device() -> None:
    """Wait until the CUDA device has done what is queued; raise if the process group has an error."""
    if not torch.cuda.is_initialized():
        return
    torch.cuda.current_stream().synchronize()
    if not dist.is_initialized():
        return
    group: Any = dist.distributed_c10d._get_default_group()
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # It has none for CUDA.
        return
    error = backend.get_error() if hasattr(backend, "get_error") else None
    if error is not None and error.name != "SUCCESS":
        raise dist.DistBackendError(
            f"the process group reports {error.name}; the optimizer's step was not begun, because its"
            " gradients may be wrong"
        )
