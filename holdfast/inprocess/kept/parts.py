"""Describes a rank's part of a state, so that another rank can be given the same.

A part is taken from living objects: parameters and optimizer state as they stand, all else as it
was at the last commit. Its contents are encoded without pickle, as checkpoints are; the tensors
stay where they are. Its fingerprint tells which part it is: names, dtypes and shapes of the tensors
of modules, and which region of each this rank has. It can also be taken of objects that were never
trained, so optimizer state, which does not exist there yet, has no place in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import torch
import xxhash
from msgspec import Struct

from holdfast.checkpoint.restore.load import captured_entry, offsets_of
from holdfast.checkpoint.state.capture import flattened
from holdfast.checkpoint.state.parameter_names import ParameterNames, by_name
from holdfast.checkpoint.state.skeleton import Path, dismantle
from holdfast.errors import CheckpointError
from holdfast.inprocess.kept.boundary import Boundary, BufferCopies
from holdfast.inprocess.kept.checksums import checksum

_encoder = msgspec.msgpack.Encoder()


class PieceItem(Struct, frozen=True, array_like=True):
    """A tensor of a part."""

    path: tuple[str | int, ...]
    """Its first path in the state."""
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    sizes: tuple[int, ...]
    """Of this rank's region."""
    device: str
    """Kind of device."""
    placements: tuple[tuple[str, int, int], ...] | None
    """How a DTensor is spread over its mesh; None for a plain tensor."""

    @property
    def size_bytes(self) -> int:
        each: int = torch_dtype(self.dtype).itemsize
        return prod(self.sizes) * each


class PartContents(Struct, frozen=True):
    """Everything about a part but the bytes of its tensors."""

    skeleton: bytes
    items: tuple[PieceItem, ...]
    parameters: dict[str, tuple[str, ...]]
    """Optimizers whose state is under the names of their parameters: these, in their order."""

    def encoded(self) -> bytes:
        return _encoder.encode(self)


def decode_contents(data: bytes) -> PartContents:
    return msgspec.msgpack.decode(data, type=PartContents)


@dataclass(frozen=True)
class StatePart:
    """A rank's part of a state."""

    contents: PartContents
    locals: list[torch.Tensor]
    """This rank's region of each tensor."""
    lasting: list[int]
    """Tensors of modules and optimizers, in the order of their paths."""
    compared: list[int]
    """Those among them that are the same on all ranks that hold the part: not buffers, which each
    rank may change in its own way in a forward pass."""

    def checksum(self) -> int:
        return self._checksum(self.lasting)

    def checksums(self) -> tuple[int, int]:
        """Return that of all, and that of what is compared. Without buffers this is the same, and
        the state is read once."""
        whole = self.checksum()
        alike = self.compared == self.lasting
        return whole, whole if alike else self._checksum(self.compared)

    def _checksum(self, numbers: list[int]) -> int:
        names = [self.contents.items[number] for number in numbers]
        of_names = xxhash.xxh3_64_intdigest(_encoder.encode(names)) >> 1
        return checksum(self.locals[number] for number in numbers) ^ of_names


def take_part(
    state: dict[str, Any], boundary: Boundary | None = None, buffers: BufferCopies | None = None
) -> StatePart:
    """Describe a state: as it was at a boundary, or as it is now."""
    modules = {n: module_tensors(e, n) for n, e in state.items() if _is_module(e)}
    tree = {n: modules[n] if n in modules else _entry(n, e, boundary) for n, e in state.items()}
    order = _name_parameters(state, tree)
    found = dismantle(tree)
    paths = [of_one[0] for of_one in found.paths()]
    items = tuple(map(_item, paths, found.tensors))
    locals_: list[torch.Tensor] = [getattr(t, "_local_tensor", t).detach() for t in found.tensors]
    lasting = sorted(
        (n for n, path in enumerate(paths) if _lasts(state[str(path[0])])),
        key=lambda n: tuple(map(str, paths[n])),
    )
    kept = buffers.by_address() if buffers is not None else {}
    own = _buffer_addresses(state)
    compared = [n for n in lasting if locals_[n].data_ptr() not in own]
    locals_ = [kept.get(one.data_ptr(), one) for one in locals_]
    return StatePart(PartContents(found.skeleton, items, order), locals_, lasting, compared)


def fingerprint(state: dict[str, Any]) -> int:
    """Return a number that two ranks have in common if they have to hold the same part."""
    found: list[Any] = []
    for name, entry in sorted(state.items()):
        if _is_module(entry):
            tensors = sorted(flattened(module_tensors(entry, name)), key=lambda one: str(one[0]))
            found.append((name, [_region(path, t) for path, t in tensors if _is_tensor(t)]))
        else:
            found.append((name, type(entry).__qualname__ if hasattr(entry, "state_dict") else ""))
    names = ParameterNames()
    for name, entry in sorted(state.items()):
        if isinstance(entry, torch.optim.Optimizer):
            order = names.of(state, name)
            groups = [len(group["params"]) for group in entry.param_groups]
            found.append((sorted(order) if order is not None else [], groups))
    return (xxhash.xxh3_64_intdigest(_encoder.encode(found)) >> 1) or 1


def module_tensors(module: torch.nn.Module, name: str) -> dict[str, Any]:
    """Return a module's state dict. Where torch allows it, it has the parameters themselves: of a
    detached DTensor torch may take the mesh from its cache, and that can be one of the entry
    before."""
    if type(module).state_dict is torch.nn.Module.state_dict:
        found: dict[str, Any] = module.state_dict(keep_vars=True)
        return found
    found = captured_entry(module, name)
    return found


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"this torch has no dtype {name}; another rank's has")
    return found


def _entry(name: str, entry: Any, boundary: Boundary | None) -> Any:
    """Return what an entry that is no module held at the boundary."""
    if boundary is not None and name in boundary.values:
        return boundary.values[name]
    found = captured_entry(entry, name)
    groups = boundary.groups.get(name) if boundary is not None else None
    if groups is not None and isinstance(found, dict) and "param_groups" in found:
        pairs = zip(found["param_groups"], groups, strict=True)
        theirs = [{**before, "params": now["params"]} for now, before in pairs]
        found = {**found, "param_groups": theirs}
    return found


def _name_parameters(state: dict[str, Any], tree: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Put names in place of the numbers of optimizers' parameters; return them."""
    found, names = {}, ParameterNames()
    for name, entry in state.items():
        if isinstance(entry, torch.optim.Optimizer):
            order = names.of(state, name)
            named = by_name(tree[name], order)
            if order is not None and named is not tree[name]:
                tree[name], found[name] = named, tuple(order)
    return found


def _item(path: Path, tensor: Any) -> PieceItem:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.layout != torch.strided or local.is_quantized or local.is_nested:
        where = ".".join(map(str, path))
        raise CheckpointError(f"{where}: a {local.layout} tensor cannot be kept; make it dense")
    return PieceItem(
        path=path,
        dtype=str(local.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        sizes=tuple(local.shape),
        device=local.device.type,
        placements=None if local is tensor else tuple(_placement(p) for p in tensor.placements),
    )


def _placement(placement: Any) -> tuple[str, int, int]:
    if placement.is_partial():
        raise CheckpointError("a DTensor of partial sums cannot be kept; redistribute it")
    if placement.is_replicate():
        return "replicate", 0, 1
    return type(placement).__name__, placement.dim, getattr(placement, "split_factor", 1)


def _region(path: Path, tensor: Any) -> tuple[Any, ...]:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    sizes = list(local.shape)
    return path, str(tensor.dtype), list(tensor.shape), list(offsets_of(tensor)), sizes


def _buffer_addresses(state: dict[str, Any]) -> set[int]:
    modules = [entry for entry in state.values() if _is_module(entry)]
    every = (buffer for module in modules for buffer in module.buffers())
    return {getattr(one, "_local_tensor", one).data_ptr() for one in every} - {0}


def _lasts(entry: Any) -> bool:
    return isinstance(entry, torch.nn.Module | torch.optim.Optimizer)


def _is_module(entry: Any) -> bool:
    return isinstance(entry, torch.nn.Module)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
