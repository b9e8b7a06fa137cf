"""States to save. What is in a tensor makes no difference here, so it is whatever is quick to make."""

from __future__ import annotations

import torch
from torch import nn

ROW = 1024
FLOAT_BYTES = 4
MOMENTS = 2
"""AdamW keeps as many tensors for each parameter."""


def tensors(size: int, count: int) -> dict[str, torch.Tensor]:
    """So many tensors, of so many bytes together."""
    return {f"t{i}": torch.full((_floats(size, count),), float(i)) for i in range(count)}


class Weights(nn.Module):
    """So many parameters, of so many bytes together."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        shape = (_rows(size, count), ROW)
        self.weights = nn.ParameterList([torch.full(shape, float(i)) for i in range(count)])


def trained(size: int, count: int) -> tuple[Weights, torch.optim.AdamW]:
    """A model and its optimizer, that together have so many tensors and bytes.

    A first step is yet to be taken, with `step`.
    """
    model = Weights(size // (1 + MOMENTS), max(1, count // (1 + MOMENTS)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(optimizer: torch.optim.Optimizer) -> None:
    """One step, without a forward and backward before it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def bytes_of(*held: nn.Module | torch.optim.Optimizer) -> int:
    """What is in them, as it is."""
    total = 0
    for one in held:
        if isinstance(one, nn.Module):
            total += sum(value.nbytes for value in one.state_dict().values())
        else:
            states = one.state.values()
            total += sum(v.nbytes for s in states for v in s.values() if torch.is_tensor(v))
    return total


def bytes_of_weights(size: int, count: int) -> int:
    """What is in `Weights` that were asked to have so many bytes."""
    return _rows(size, count) * ROW * count * FLOAT_BYTES


def _rows(size: int, count: int) -> int:
    return max(1, _floats(size, count) // ROW)


def _floats(size: int, count: int) -> int:
    return size // count // FLOAT_BYTES
