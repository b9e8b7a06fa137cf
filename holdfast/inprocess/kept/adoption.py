"""Gives the objects of this entry the state that a part describes.

A tensor that the objects already have is filled in place. One that they lack, such as the state of
an optimizer that took no step yet, is made, or taken over from the objects of the entry before.
Values are handed to `load_state_dict`, as a restore from a checkpoint does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.checkpoint.restore.load import give_back
from holdfast.checkpoint.state.capture import flattened
from holdfast.checkpoint.state.parameter_names import ParameterNames, by_name, by_number
from holdfast.checkpoint.state.skeleton import Path, assemble
from holdfast.errors import CheckpointError
from holdfast.inprocess.kept.parts import PartContents, PieceItem, module_tensors, torch_dtype


class Adoption:
    """Takes a part over into a state."""

    def __init__(
        self,
        state: dict[str, Any],
        contents: PartContents,
        own: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Find or make all tensors. `own` are those of the entry before, if the part is this
        rank's: what the state lacks is taken from there, and the rest is copied."""
        self._state, self._contents = state, contents
        self._numbered: dict[str, Any] = {}
        self._orders: dict[str, list[str]] = {}
        self._parameters: dict[str, dict[str, torch.Tensor]] = {}
        self._live = self._find_live()
        self._wholes: list[Any] = []
        self.targets: list[torch.Tensor] = []
        """This rank's region of each tensor, to be filled."""
        for number, item in enumerate(contents.items):
            live = self._live.get(item.path)
            fits = live is not None and _fits(live, item)
            taken = own[number] if own is not None and not fits else None
            whole: Any = live if fits else self._make(item, taken)
            self._wholes.append(whole)
            self.targets.append(getattr(whole, "_local_tensor", whole).detach())

    def copy_from(self, own: Sequence[torch.Tensor]) -> None:
        """Fill the tensors with those of the entry before, where they are not the same."""
        for target, source in zip(self.targets, own, strict=True):
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)

    def finish(self, rank: int) -> None:
        """Hand all entries their state, now that the tensors are filled."""
        tree: dict[str, Any] = assemble(self._contents.skeleton, self._wholes.__getitem__)
        for name, order in self._orders.items():
            if name in self._contents.parameters:
                tree[name] = by_number(tree[name], order, self._numbered[name], name)
        give_back(self._state, tree, rank)

    # ---- tensors ----

    def _find_live(self) -> dict[Path, torch.Tensor]:
        live: dict[str, Any] = {}
        for name, entry in self._state.items():
            if isinstance(entry, torch.nn.Module):
                live[name] = module_tensors(entry, name)
        for name, entry in self._state.items():
            if isinstance(entry, torch.optim.Optimizer):
                live[name] = self._optimizer(name, entry)
            elif not hasattr(entry, "state_dict"):
                live[name] = entry
        found = flattened(live)
        return {path: value for path, value in found if isinstance(value, torch.Tensor)}

    def _optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbered = self._numbered[name] = optimizer.state_dict()
        named = self._contents.parameters.get(name)
        if named is None:
            self._parameters[name] = {str(n): p for n, p in enumerate(parameters)}
            return numbered
        order = ParameterNames().of(self._state, name)
        if order is None or set(order) != set(named):
            raise CheckpointError(
                f"{name!r} has other parameters here than on the rank that its state comes from"
            )
        self._orders[name] = order
        self._parameters[name] = dict(zip(order, parameters, strict=True))
        return by_name(numbered, order)

    def _make(self, item: PieceItem, taken: torch.Tensor | None) -> torch.Tensor:
        if self._is_modules(item):
            raise CheckpointError(
                f"{_name(item)}: has shape {list(item.shape)} and dtype {item.dtype} where its state"
                " comes from, and is another tensor here"
            )
        local = taken
        if local is None:
            device = _device(item.device)
            local = torch.empty(item.sizes, dtype=torch_dtype(item.dtype), device=device)
        return local if item.placements is None else self._sharded(item, local)

    def _is_modules(self, item: PieceItem) -> bool:
        return isinstance(self._state[str(item.path[0])], torch.nn.Module)

    def _sharded(self, item: PieceItem, local: torch.Tensor) -> torch.Tensor:
        """Make a DTensor of an optimizer's state, on the mesh of its parameter."""
        from torch.distributed.tensor import DTensor

        parameters = self._parameters.get(str(item.path[0]), {})
        parameter: Any = parameters.get(str(item.path[2])) if len(item.path) > 2 else None
        if parameter is None or not hasattr(parameter, "device_mesh"):
            raise CheckpointError(f"{_name(item)}: is a DTensor, and its mesh is not known here")
        assert item.placements is not None
        spread = tuple(_placement(*one) for one in item.placements)
        if len(spread) != parameter.device_mesh.ndim:
            raise CheckpointError(f"{_name(item)}: is spread over a mesh of another form")
        whole = torch.empty(item.shape, dtype=local.dtype, device="meta")
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            spread,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )


def _fits(live: Any, item: PieceItem) -> bool:
    local: torch.Tensor = getattr(live, "_local_tensor", live)
    sharded = item.placements is not None
    return (
        (local is not live) == sharded
        and tuple(live.shape) == item.shape
        and tuple(local.shape) == item.sizes
        and local.dtype == torch_dtype(item.dtype)
    )


def _placement(kind: str, dim: int, split_factor: int) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if kind == "replicate":
        return Replicate()
    return _StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _name(item: PieceItem) -> str:
    return ".".join(map(str, item.path))
