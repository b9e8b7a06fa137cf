"""Handles gradients of models on one rank or many: when they are reduced, their norm, their scale.

Wrappers are known by what they can do, not by their class: DDP and FSDP 1 have `no_sync`, modules of
`fully_shard` (FSDP 2) have `set_requires_gradient_sync`. Gradients of sharded models are DTensors; a
factor is applied to each rank's own part, a norm is computed over all parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import UsageError


class GradientSync:
    """Lets backward passes reduce gradients over the ranks, or not."""

    def __init__(self, model: Any, world: int) -> None:
        self._wrappers = list(_outermost(model))
        if world > 1 and not self._wrappers:
            raise UsageError(
                f"ElasticTrainer: nothing averages the gradients of {type(model).__name__} over the"
                f" {world} ranks; wrap it in DistributedDataParallel, or shard it with fully_shard"
            )
        for module in self._wrappers:
            if isinstance(module, DistributedDataParallel):
                size = torch.distributed.get_world_size(module.process_group)
                if size != world:
                    raise UsageError(
                        f"ElasticTrainer: the model averages gradients over {size} ranks, but its"
                        f" steps are shared by {world}; pass the model's process group as `group`"
                    )

    @property
    def is_wrapped(self) -> bool:
        """Whether something in the model exchanges gradients, or could."""
        return bool(self._wrappers)

    def release(self) -> None:
        """Let go of the model, when its function was left."""
        self._wrappers = []

    @contextmanager
    def off(self) -> Iterator[None]:
        """Keep gradients on this rank, where they add up."""
        with ExitStack() as stack:
            for module in self._wrappers:
                if hasattr(module, "set_requires_gradient_sync"):
                    module.set_requires_gradient_sync(False)
                    stack.callback(module.set_requires_gradient_sync, True)
                else:
                    stack.enter_context(module.no_sync())
            yield


def _outermost(module: Any) -> Iterator[Any]:
    if hasattr(module, "no_sync") or hasattr(module, "set_requires_gradient_sync"):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def gradients(optimizers: Iterable[Any]) -> list[Any]:
    """Return the gradients of all parameters that these optimizers update."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


@torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
def multiply(tensors: Sequence[Any], factor: Any) -> None:
    """Multiply tensors in place by a number or a tensor of one element."""
    by_device: dict[Any, list[Any]] = {}
    for each in tensors:
        own = each.to_local() if hasattr(each, "to_local") else each
        by_device.setdefault(own.device, []).append(own)
    for device, own_parts in by_device.items():
        here = factor.to(device) if isinstance(factor, torch.Tensor) else factor
        torch._foreach_mul_(own_parts, here)


@torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
def clip(model: Any, tensors: Sequence[Any], max_norm: float) -> Any:
    """Scale gradients down to a norm of at most `max_norm`, and return the norm they had."""
    if hasattr(model, "clip_grad_norm_"):  # FSDP 1: its gradients are parts, but do not say so.
        return model.clip_grad_norm_(max_norm)
    norm = total_norm(tensors)
    multiply(tensors, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def total_norm(tensors: Sequence[Any]) -> Any:
    """Return the norm of tensors as of one vector, whichever meshes and devices they lie on."""
    alike: dict[Any, list[Any]] = {}
    for each in tensors:
        alike.setdefault((getattr(each, "device_mesh", None), each.device), []).append(each)
    norms = []
    for group in alike.values():
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(group)))
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


@contextmanager
def scaled_rates(optimizers: Iterable[Any], factor: float) -> Iterator[None]:
    """Multiply learning rates for the time of a step.

    Outside of it optimizers have the rates that the script and its schedulers gave them: so do saved
    states, and no factor is ever applied to what has one already.
    """
    if factor == 1.0:
        yield
        return
    before = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        rate = group["lr"]
        if isinstance(rate, torch.Tensor):  # Compiled steps hold on to this very tensor.
            before.append((group, rate.clone()))
            rate.mul_(factor)
        else:
            before.append((group, rate))
            group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in before:
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
