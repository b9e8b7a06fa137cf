"""From stored bytes to a living state.

Everything is read through verified blocks (`reading`), whether it comes from an image in memory or
from a file on storage, of this rank or of another. A tensor that the state has already is filled
where it is; one that it has not is made. Nothing restored ever shares memory with an image.

What a rank wants of a tensor and what the stored parts hold need not be cut the same way: each wanted
region is put together from all parts that overlap it. That is how a state is loaded into a world of
another size. What was a rank's own (values, generators) comes from the rank of the same number, or,
in a larger world, of that number modulo the old size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import torch

from holdfast.checkpoint.capture import flattened
from holdfast.checkpoint.layout import Contents, Extent, Span, TensorItem
from holdfast.checkpoint.reading import Source, Want, read
from holdfast.checkpoint.skeleton import assemble
from holdfast.errors import CheckpointError, Refused

_contents = msgspec.msgpack.Decoder(Contents)


@dataclass
class Stored:
    """One rank's state, or some extents of it, in memory or on storage."""

    source: Source
    contents: Contents
    extents: tuple[Extent, ...]

    def at(self, span: Span) -> Span | None:
        """Where a stretch of the body is in the source; None when it is not there."""
        for extent in self.extents:
            if extent.body_at <= span.at and span.end <= extent.body_at + extent.size:
                return Span(span.at - extent.body_at + extent.file_at, span.size)
        return None


def open_stored(source: Source, contents: Span, extents: tuple[Extent, ...]) -> Stored:
    """Read what a source holds."""
    found = Stored(source, _NOTHING, extents)
    try:
        found.contents = _contents.decode(_bytes(found, contents))
    except msgspec.DecodeError as error:
        raise Refused(f"{source.name}: its contents cannot be read: {error}") from None
    return found


_NOTHING = Contents(0, 0, 0, 0, Span(0, 0), Span(0, 0), Span(0, 0), Span(0, 0), (), ())


def _bytes(stored: Stored, span: Span) -> bytes:
    where = stored.at(span)
    if where is None:
        raise Refused(f"{stored.source.name} does not hold what it should")
    data = bytearray(span.size)
    read(stored.source, [Want(where, lambda: memoryview(data))])
    return bytes(data)


def load(
    state: dict[str, Any],
    stored: Sequence[Stored],
    rank: int,
    threads: Executor | None = None,
    pickling: bool = False,
) -> None:
    """Make the state what was stored; `Refused` if that does not verify, and then it is neither."""
    mine = stored[rank % len(stored)]
    for name, entry in state.items():
        if isinstance(entry, torch.optim.Optimizer):
            _ready_optimizer(entry, name, mine.contents)
    loading = _Loading(_current(state), stored, mine)
    tree = assemble(_bytes(mine, mine.contents.skeleton), loading.tensor, pickling)
    _check_names(state, tree)
    for source, wants in loading.wants.values():
        read(source, wants, threads)
    for name, entry in state.items():
        _install(state, name, entry, tree[name], loading)


def _current(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that the state has now, by name."""
    live = {name: captured_entry(entry) for name, entry in state.items()}
    return {
        ".".join(map(str, path)): value
        for path, value in flattened(live)
        if isinstance(value, torch.Tensor)
    }


def captured_entry(entry: Any) -> Any:
    """An entry of a state as it would be saved."""
    return entry.state_dict() if hasattr(entry, "state_dict") else entry


def _check_names(state: dict[str, Any], tree: Any) -> None:
    missing = [name for name in state if name not in tree]
    if missing:
        raise CheckpointError(
            f"what was saved has no {', '.join(map(repr, missing))}; it has"
            f" {', '.join(map(repr, tree))}"
        )


# ---- which bytes go where -----------------------------------------------------------------------


class _Loading:
    def __init__(
        self, live: dict[str, torch.Tensor], stored: Sequence[Stored], mine: Stored
    ) -> None:
        self.wants: dict[int, tuple[Source, list[Want]]] = {}
        self.in_place: set[int] = set()
        """Tensors of the state that are being filled where they are."""
        self._live = live
        self._stored = stored
        self._mine = mine
        self._made: dict[int, torch.Tensor] = {}
        self._by_name: dict[str, list[tuple[Stored, TensorItem]]] | None = None

    def tensor(self, reference: int) -> torch.Tensor:
        """The tensor that the skeleton refers to; it will be filled."""
        references = self._mine.contents.references
        index = references[reference] if references else reference
        if index not in self._made:
            item = self._mine.contents.items[index]
            self._made[index] = self._target(item)
        return self._made[index]

    def _target(self, item: TensorItem) -> torch.Tensor:
        live = self._live.get(item.name)
        if live is None:
            made = _make(item)
            self._fill(item, made, (0,) * len(item.shape))
            return made
        if tuple(live.shape) != item.shape:
            raise CheckpointError(
                f"{item.name}: saved with shape {list(item.shape)}, but is {list(live.shape)} here"
            )
        self.in_place.add(id(live))
        local: torch.Tensor = getattr(live, "_local_tensor", live)
        self._fill(item, local, _offsets(live))
        return live

    def _fill(self, item: TensorItem, local: torch.Tensor, offsets: tuple[int, ...]) -> None:
        sizes = tuple(local.shape)
        whole = self._mine.at(item.raw)
        if whole is not None and (item.offsets, item.sizes) == (offsets, sizes):
            self._want(self._mine, whole, item, local, offsets)
            return
        missing = prod(sizes)
        seen = set()
        for stored, part in self._parts(item.name):
            where = stored.at(part.raw)
            overlap = _overlap(part.offsets, part.sizes, offsets, sizes)
            if where is not None and overlap and part.offsets not in seen:
                seen.add(part.offsets)
                self._want(stored, where, part, local, offsets)
                missing -= prod(stop - start for start, stop in overlap)
        if missing:
            raise Refused(f"{item.name}: {missing} of {prod(sizes)} elements are stored nowhere")

    def _parts(self, name: str) -> list[tuple[Stored, TensorItem]]:
        if self._by_name is None:
            self._by_name = {}
            for stored in self._stored:
                for item in stored.contents.items:
                    for one in (item.name, *item.also):
                        self._by_name.setdefault(one, []).append((stored, item))
        return self._by_name.get(name, [])

    def _want(
        self,
        stored: Stored,
        where: Span,
        part: TensorItem,
        local: torch.Tensor,
        offsets: tuple[int, ...],
    ) -> None:
        _, wants = self.wants.setdefault(id(stored), (stored.source, []))
        same = (part.offsets, part.sizes) == (offsets, tuple(local.shape))
        plain = local.device.type == "cpu" and local.is_contiguous()
        if same and plain and str(local.dtype) == f"torch.{part.dtype}":
            wants.append(Want(where, lambda: _memory(local)))
        else:
            wants.append(_indirect(where, part, local, offsets))


def _memory(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, to be written."""
    raw = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(raw).cast("B")


def _indirect(where: Span, part: TensorItem, local: torch.Tensor, offsets: tuple[int, ...]) -> Want:
    """Read a part into memory of its own, then copy what is wanted of it."""
    held: list[torch.Tensor] = []

    def make() -> memoryview:
        pinned = local.device.type == "cuda"
        dtype = getattr(torch, part.dtype)
        held.append(torch.empty(part.sizes, dtype=dtype, pin_memory=pinned))
        return _memory(held[0])

    def copy() -> None:
        source = held.pop()
        overlap = _overlap(part.offsets, part.sizes, offsets, tuple(local.shape))
        target = local.detach()
        for axis, (start, stop) in enumerate(overlap):
            target = target.narrow(axis, start - offsets[axis], stop - start)
            source = source.narrow(axis, start - part.offsets[axis], stop - start)
        target.copy_(source)

    return Want(where, make, copy)


def _overlap(
    at: tuple[int, ...], sizes: tuple[int, ...], to: tuple[int, ...], wanted: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Where two regions meet, axis by axis; empty when they do not, or have nothing in them.

    Two scalars meet in their only element, which is a list with no axis: that is told apart by the
    callers, for which both regions are then the same.
    """
    axes = [
        (max(a, b), min(a + m, b + n)) for a, m, b, n in zip(at, sizes, to, wanted, strict=True)
    ]
    return axes if all(start < stop for start, stop in axes) else []


def _make(item: TensorItem) -> torch.Tensor:
    dtype = getattr(torch, item.dtype)
    if item.strides is not None and item.sizes == item.shape:
        return torch.empty_strided(item.shape, item.strides, dtype=dtype)
    return torch.empty(item.shape, dtype=dtype)


def _offsets(live: Any) -> tuple[int, ...]:
    if not hasattr(live, "_local_tensor"):
        return (0,) * len(live.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        live.shape, live.device_mesh, live.placements
    )
    return tuple(offsets)


# ---- putting it into the objects ----------------------------------------------------------------


def _ready_optimizer(optimizer: torch.optim.Optimizer, name: str, contents: Contents) -> None:
    """Have an optimizer that took no step yet make the state that is about to be filled.

    Only it knows how the state of a sharded parameter is sharded. So it takes a step with gradients
    and a learning rate of zero, which changes no parameter; they are about to be restored anyway.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = any(hasattr(p, "_local_tensor") for p in parameters)
    saved = any(item.name.startswith(f"{name}.state.") for item in contents.items)
    if optimizer.state or not sharded or not saved:
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            is_tensor = isinstance(group["lr"], torch.Tensor)
            group["lr"] = torch.zeros_like(group["lr"]) if is_tensor else 0.0
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate


def _install(
    state: dict[str, Any], name: str, entry: Any, restored: Any, loading: _Loading
) -> None:
    if isinstance(entry, torch.nn.Module) and _filled(entry, restored, name, loading):
        return
    if hasattr(entry, "load_state_dict"):
        entry.load_state_dict(restored)
    else:
        state[name] = restored


def _filled(module: torch.nn.Module, restored: Any, name: str, loading: _Loading) -> bool:
    """Whether all of a module is tensors that were filled where they are."""
    current = module.state_dict()
    missing, unknown = current.keys() - restored.keys(), restored.keys() - current.keys()
    if missing or unknown:
        raise CheckpointError(
            f"{name!r} is another module than the one that was saved: "
            f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"
        )
    return all(isinstance(value, torch.Tensor) for value in restored.values())
