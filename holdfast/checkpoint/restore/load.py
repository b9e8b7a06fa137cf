"""Loads stored bytes into a living state.

All bytes are read through verified blocks (`verified_read`), from an image in memory or a file on
storage, of this rank or of another. A tensor that the state already has is filled in place. One that it
lacks is created, and so is one of another shape, or of a dtype that would lose precision, unless it
belongs to a module or an optimizer. Nothing restored ever shares memory with an image.

Names are those that were saved, but for two differences. The state of an optimizer may be saved under
the names of its parameters, or under numbers, as older checkpoints have it. And a module may be wrapped
here that was not when it was saved, or the other way round: see `state.parameter_names`.

A rank's region of a tensor and the stored parts need not be cut the same way: each region is assembled
from all parts that overlap it. That is how a state is loaded into a world of another size. What was a
rank's own (values, generators) comes from the same rank, modulo the size of the world that saved it.
Only what is spread over ranks is merged from what all of them saved: see `state.spread`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from holdfast.checkpoint.memory.copying import raw
from holdfast.checkpoint.restore.stored import StoredState, briefly_open
from holdfast.checkpoint.restore.verified_read import PIECE_BYTES, Piece, Source, Want, read
from holdfast.checkpoint.state.capture import flattened, unique_names
from holdfast.checkpoint.state.layout import ByteSpan, Contents, TensorItem
from holdfast.checkpoint.state.parameter_names import (
    ParameterNames,
    by_name,
    by_number,
    rewrapped,
    unwrapped,
    unwrapped_keys,
)
from holdfast.checkpoint.state.skeleton import assemble, entries_of, tensor_types
from holdfast.checkpoint.state.spread import is_merged_by, is_spread
from holdfast.errors import CheckpointError, HoldfastError


def load(
    state: dict[str, Any],
    stored: Sequence[StoredState],
    rank: int,
    threads: Executor | None = None,
    pickling: bool = False,
) -> None:
    """Make the state what was stored; `Unusable` if that does not verify, which leaves it mixed.

    All other errors are raised before the first byte is changed, except those of an entry's own
    `load_state_dict` and `load_part`.
    """
    mine = stored[rank % len(stored)]
    tree = _spread(state, stored, mine, rank, threads, pickling)
    ordinary = {name: entry for name, entry in state.items() if name not in tree}
    tree |= _ordinary(ordinary, stored, mine, threads, pickling, frozenset(tree))
    give_back(state, tree, rank)


def _ordinary(
    state: dict[str, Any],
    stored: Sequence[StoredState],
    mine: StoredState,
    threads: Executor | None,
    pickling: bool,
    spread: frozenset[str],
) -> dict[str, Any]:
    """Return what was stored of entries that are not spread over ranks; their tensors are filled."""
    for name, entry in state.items():
        saved = any(item.name.startswith(f"{name}.state.") for item in mine.contents.items)
        if saved and isinstance(entry, torch.optim.Optimizer) and _is_sharded(entry):
            make_optimizer_state(entry, name)
    live = {name: captured_entry(entry, name) for name, entry in state.items()}
    numbered, orders = dict(live), _orders(state, mine.contents.parameters)
    for name, order in orders.items():
        live[name] = by_name(live[name], order)
    loose = {name for name, entry in state.items() if not isinstance(entry, _OF_FIXED_SHAPES)}
    tensors, replaceable = _by_name(live, loose)
    tensors |= _wrapped_otherwise(state, live, tensors, mine.contents)
    loading = _Loading(tensors, replaceable, stored, mine)
    tree = _tree(mine.skeleton, loading.tensor, pickling, spread)
    _check_names(state, live, tree)
    for name, order in orders.items():
        tree[name] = by_number(tree[name], order, numbered[name], name)
    for reading in loading.readings.values():
        read(reading.source, reading.wants, threads, reading.pieces)
    return tree


def _tree(
    skeleton: bytes, tensor: Callable[[int], Any], pickling: bool, spread: frozenset[str]
) -> dict[str, Any]:
    """Assemble all entries but those that are spread over ranks."""
    if not spread:
        whole: dict[str, Any] = assemble(skeleton, tensor, pickling)
        return whole
    entries = entries_of(skeleton).items()
    return {
        str(name): assemble(entry, tensor, pickling)
        for name, entry in entries
        if name not in spread
    }


def give_back(state: dict[str, Any], tree: dict[str, Any], rank: int) -> None:
    """Hand each entry of a state what was restored for it."""
    for name, entry in state.items():
        if is_spread(entry) and not is_merged_by(rank, entry):
            _called(name, "load_part", partial(entry.load_part, tree[name]))
        elif hasattr(entry, "load_state_dict"):
            _called(name, "load_state_dict", partial(entry.load_state_dict, tree[name]))
            if isinstance(entry, torch.optim.Optimizer):
                _keep_dtypes(entry, tree[name])
        else:
            state[name] = tree[name]


def captured_entry(entry: Any, name: str) -> Any:
    """Return an entry of a state as it would be saved."""
    return _called(name, "state_dict", entry.state_dict) if hasattr(entry, "state_dict") else entry


def captured_state(
    state: dict[str, Any], names: ParameterNames
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return a state as it is saved, and for each optimizer whose parameters have names in it, these
    names in the optimizer's order."""
    found, orders = {}, {}
    for name, entry in state.items():
        found[name] = captured_entry(entry, name)
        if isinstance(entry, torch.optim.Optimizer):
            order = names.of(state, name)
            named = by_name(found[name], order)
            if order is not None and named is not found[name]:
                found[name], orders[name] = named, order
    return found, orders


def _orders(state: dict[str, Any], saved: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the names of the parameters of each optimizer that was saved with names, in the order in
    which it has them here. Where their module is not at hand, it is the order in which they were."""
    found, names = {}, ParameterNames()
    for name, entry in state.items():
        if name not in saved or not isinstance(entry, torch.optim.Optimizer):
            continue
        order = names.of(state, name) or list(saved[name])
        missing, unknown = set(order) - set(saved[name]), set(saved[name]) - set(order)
        if missing or unknown or len(order) != len(_parameters(entry)):
            raise CheckpointError(
                f"{name!r} has other parameters than the optimizer that was saved: that one lacks"
                f" {_some(sorted(missing))}, and has {_some(sorted(unknown))}, which this one lacks;"
                f" it had {len(saved[name])}, this one has {len(_parameters(entry))}"
            )
        found[name] = order
    return found


def _called(name: str, method: str, call: Callable[[], Any]) -> Any:
    """Call a method of the script's object; whatever it raises is reported with the object's name."""
    try:
        return call()
    except HoldfastError:
        raise
    except Exception as error:
        what = f"{name!r}: its {method}() failed: {type(error).__name__}: {error}"
        raise CheckpointError(what) from error


# ---- what is spread over ranks ------------------------------------------------------------------


def _spread(
    state: dict[str, Any],
    stored: Sequence[StoredState],
    mine: StoredState,
    rank: int,
    threads: Executor | None,
    pickling: bool,
) -> dict[str, Any]:
    """Return what entries that are spread over ranks are to load: all ranks' parts, merged, or this
    rank's part. Of other ranks nothing else is read."""
    spread = {name: entry for name, entry in state.items() if is_spread(entry)}
    merged = {name: entry for name, entry in spread.items() if is_merged_by(rank, entry)}
    own = [name for name in spread if name not in merged]
    found: dict[str, Any] = dict.fromkeys(own)
    if own and mine.contents.rank == rank:
        found = _part(stored, mine, own, pickling)
    if merged:
        if len(stored) != mine.contents.world_size:
            raise CheckpointError(
                f"{_some(list(merged))} cannot be merged: {mine.contents.world_size} ranks saved parts"
                f" of it, and {len(stored)} are at hand"
            )
        parts = _parts(stored, list(merged), threads, pickling)
        for name, entry in merged.items():
            found[name] = merge(name, entry, [part[name] for part in parts])
    return found


def _parts(
    stored: Sequence[StoredState], names: list[str], threads: Executor | None, pickling: bool
) -> list[dict[str, Any]]:
    """Return what each rank saved under these names."""

    def of(rank: int) -> dict[str, Any]:
        with briefly_open(stored, rank) as one:
            return _part(stored, one, names, pickling)

    return list((threads.map if threads is not None else map)(of, range(len(stored))))


def _part(
    stored: Sequence[StoredState], one: StoredState, names: Sequence[str], pickling: bool
) -> dict[str, Any]:
    """Return what one rank saved under these names; none of it is shared with the living state."""
    entries = entries_of(one.skeleton)
    absent = [name for name in names if name not in entries]
    if absent:
        raise CheckpointError(
            f"the saved state of rank {one.contents.rank} has no {_some(absent)}; it has"
            f" {', '.join(map(repr, entries))}"
        )
    loading = _Loading({}, frozenset(), stored, one)
    tree = {name: assemble(entries[name], loading.tensor, pickling) for name in names}
    for reading in loading.readings.values():
        read(reading.source, reading.wants, None, reading.pieces)
    return tree


def merge(name: str, entry: Any, parts: list[Any]) -> Any:
    """Return the state of which ranks saved these parts."""
    return _called(name, "merge_state_dicts", partial(entry.merge_state_dicts, parts))


# ---- tensors by name ----------------------------------------------------------------------------

_OF_FIXED_SHAPES = (torch.nn.Module, torch.optim.Optimizer)


def _by_name(
    live: dict[str, Any], loose: set[str]
) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Return the tensors of a state by the names they would be saved under, and the names of those
    that may be replaced by a tensor of any shape and dtype."""
    found = [
        (path, value)
        for path, value in flattened(live)
        if isinstance(value, torch.Tensor) and not is_lazy(value)
    ]
    names = unique_names([path for path, _ in found])
    tensors = {name: value for name, (_, value) in zip(names, found, strict=True)}
    replaceable = (
        name
        for name, (path, value) in zip(names, found, strict=True)
        if path[0] in loose and not hasattr(value, "_local_tensor")
    )
    return tensors, frozenset(replaceable)


def _wrapped_otherwise(
    state: dict[str, Any],
    live: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    saved: Contents,
) -> dict[str, torch.Tensor]:
    """Return the tensors of modules by names that were saved and differ from those here by wrappers."""
    found = {}
    items = [name for item in saved.items for name in (item.name, *item.also)]
    for name, entry in state.items():
        if isinstance(entry, torch.nn.Module) and isinstance(live[name], dict):
            here = unwrapped_keys(live[name])
            prefix = f"{name}."
            for full in items:
                if full.startswith(prefix) and full not in tensors:
                    key = here.get(unwrapped(full.removeprefix(prefix)))
                    tensor = tensors.get(f"{prefix}{key}")
                    if tensor is not None:
                        found[full] = tensor
    return found


def _check_names(state: dict[str, Any], live: dict[str, Any], tree: dict[str, Any]) -> None:
    """Refuse a tree that lacks something of the state, or has more; undo differences of wrappers."""
    absent = [name for name in state if name not in tree]
    if absent:
        raise CheckpointError(
            f"the saved state has no {', '.join(map(repr, absent))}; it has"
            f" {', '.join(map(repr, tree))}"
        )
    for name, entry in state.items():
        if not isinstance(entry, torch.nn.Module) or not isinstance(tree[name], dict):
            continue
        if type(entry).load_state_dict is not torch.nn.Module.load_state_dict:
            continue  # Its own method may accept other keys.
        tree[name] = rewrapped(tree[name], live[name])
        missing = sorted(live[name].keys() - tree[name].keys())
        unknown = sorted(tree[name].keys() - live[name].keys())
        if missing or unknown:
            raise CheckpointError(
                f"{name!r} is another module than the one that was saved: the saved one lacks"
                f" {_some(missing)}, and has {_some(unknown)}, which this one lacks"
            )


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return (", ".join(map(repr, keys[:3])) or "nothing") + more


# ---- sources and targets ------------------------------------------------------------------------


@dataclass
class _SourceReads:
    """Everything to read from one source."""

    source: Source
    wants: list[Want]
    pieces: list[Piece]


class _Loading:
    def __init__(
        self,
        live: dict[str, torch.Tensor],
        replaceable: frozenset[str],
        stored: Sequence[StoredState],
        mine: StoredState,
    ) -> None:
        self.readings: dict[int, _SourceReads] = {}
        self._live = live
        self._replaceable = replaceable
        self._types = tensor_types()
        self._stored = stored
        self._mine = mine
        self._made: dict[int, torch.Tensor] = {}
        self._by_name: dict[str, list[tuple[StoredState, TensorItem]]] | None = None

    def tensor(self, reference: int) -> torch.Tensor:
        """Return the tensor that the skeleton refers to; it is filled later."""
        references = self._mine.contents.references
        index = references[reference] if references else reference
        made = self._made.get(index)
        if made is None:
            made = self._made[index] = self._target(self._mine.contents.items[index])
        return made

    def _target(self, item: TensorItem) -> torch.Tensor:
        live = self._live.get(item.name)
        if live is not None and not item.also and self._put(item, live):
            return live
        names = (item.name, *item.also)
        here = [live for name in names if (live := self._here(name, item)) is not None]
        targets: list[torch.Tensor] = here or [self._made_anew(item, names)]
        filled = set()
        for target in targets:  # Several, if they were tied and are not any more.
            local: torch.Tensor = getattr(target, "_local_tensor", target)
            if len(targets) == 1 or local.data_ptr() not in filled:
                filled.add(local.data_ptr())
                self._fill(item, local, offsets_of(target))
        return targets[0]

    def _put(self, item: TensorItem, live: torch.Tensor) -> bool:
        """Handle the usual case quickly: a small plain tensor of the same shape and dtype."""
        span = item.raw
        whole = live.shape == item.sizes == item.shape and live.dtype is _dtype(item.dtype)
        if span.size >= PIECE_BYTES or not whole or not raw(live) or type(live) not in self._types:
            return False
        where = self._mine.at(span)
        if where is None:
            return False
        self._reading(self._mine).pieces.append((where.at, where.size, live.data_ptr()))
        return True

    def _reading(self, stored: StoredState) -> _SourceReads:
        reading = self.readings.get(id(stored))
        if reading is None:
            reading = self.readings[id(stored)] = _SourceReads(stored.source, [], [])
        return reading

    def _made_anew(self, item: TensorItem, names: tuple[str, ...]) -> torch.Tensor:
        """Create a tensor, on the device of the one that it replaces."""
        replaced = [self._live[name] for name in names if name in self._live]
        return _make(item, replaced[0].device if replaced else torch.device("cpu"))

    def _here(self, name: str, item: TensorItem) -> torch.Tensor | None:
        """Return the live tensor of that name if it can be filled."""
        live = self._live.get(name)
        if live is None:
            return None
        if name in self._replaceable and not _can_hold(live, item):
            return None
        if live.shape != item.shape:
            raise CheckpointError(
                f"{name}: saved with shape {list(item.shape)}, but is {list(live.shape)} here"
            )
        # A tensor with overlapping elements cannot be written to; it is replaced.
        overlapping = not live.is_contiguous() and _overlapping(live)
        return None if overlapping else live

    def _fill(self, item: TensorItem, local: torch.Tensor, offsets: tuple[int, ...]) -> None:
        if item.sizes == local.shape and item.offsets == offsets:
            whole = self._mine.at(item.raw)
            if whole is not None:
                self._want(self._mine, whole, item, local, offsets)
                return
        sizes = tuple(local.shape)
        missing = prod(sizes)
        seen = set()
        for stored, part in self._parts(item.name):
            where = stored.at(part.raw)
            shared = overlap(part.offsets, part.sizes, offsets, sizes)
            if where is not None and shared is not None and part.offsets not in seen:
                seen.add(part.offsets)
                self._want(stored, where, part, local, offsets)
                missing -= prod(stop - start for start, stop in shared)
        if missing:
            what = f"{missing} of {prod(sizes)} elements are not stored"
            raise CheckpointError(f"{item.name}: {what}")

    def _parts(self, name: str) -> list[tuple[StoredState, TensorItem]]:
        if self._by_name is None:
            self._by_name = {}
            for stored in self._stored:
                for item in stored.contents.items:
                    for one in (item.name, *item.also):
                        self._by_name.setdefault(one, []).append((stored, item))
        return self._by_name.get(name, [])

    def _want(
        self,
        stored: StoredState,
        where: ByteSpan,
        part: TensorItem,
        local: torch.Tensor,
        offsets: tuple[int, ...],
    ) -> None:
        reading = self._reading(stored)
        same = part.sizes == local.shape and part.offsets == offsets
        if not same or local.dtype is not _dtype(part.dtype) or not raw(local):
            reading.wants.append(_indirect(where, part, local, offsets))
        elif where.size < PIECE_BYTES:
            reading.pieces.append((where.at, where.size, local.data_ptr()))
        else:
            reading.wants.append(Want(where, lambda: _memory(local)))


def _can_hold(live: torch.Tensor, item: TensorItem) -> bool:
    """Return whether a tensor can hold what was saved, to the last bit."""
    saved = _dtype(item.dtype)
    if tuple(live.shape) != item.shape:
        return False
    if live.dtype is saved:
        return True
    try:
        return bool(torch.promote_types(saved, live.dtype) is live.dtype)
    except RuntimeError:  # Some dtypes have no promotion.
        return False


def _overlapping(tensor: torch.Tensor) -> bool:
    """Return whether elements may share memory, as in an expanded tensor."""
    end = 0  # Highest offset reached by the dimensions so far, shortest strides first.
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= end:
            return True
        end += stride * (size - 1)
    return False


@cache
def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"this torch has no dtype {name}; a newer one saved it")
    return found


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes for writing."""
    raw = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(raw).cast("B")


def _indirect(
    where: ByteSpan, part: TensorItem, local: torch.Tensor, offsets: tuple[int, ...]
) -> Want:
    """Read a part into a buffer, then copy the wanted region."""
    held: list[torch.Tensor] = []

    def make() -> memoryview:
        pinned = local.device.type == "cuda"
        held.append(torch.empty(part.sizes, dtype=_dtype(part.dtype), pin_memory=pinned))
        return _memory(held[0])

    def copy() -> None:
        copy_overlap(held.pop(), part.offsets, local, offsets)

    return Want(where, make, copy)


def copy_overlap(
    source: torch.Tensor,
    source_at: tuple[int, ...],
    target: torch.Tensor,
    target_at: tuple[int, ...],
) -> None:
    """Copy the region that two parts of one tensor have in common; each is given with its offsets."""
    target = target.detach()
    region = overlap(source_at, tuple(source.shape), target_at, tuple(target.shape))
    assert region is not None
    for axis, (start, stop) in enumerate(region):
        target = target.narrow(axis, start - target_at[axis], stop - start)
        source = source.narrow(axis, start - source_at[axis], stop - start)
    target.copy_(source)


def overlap(
    at: tuple[int, ...], sizes: tuple[int, ...], to: tuple[int, ...], wanted: tuple[int, ...]
) -> list[tuple[int, int]] | None:
    """Return the overlap of two regions, axis by axis; None if it is empty.

    Two scalars overlap in their only element, along no axis.
    """
    axes = [
        (max(a, b), min(a + m, b + n)) for a, m, b, n in zip(at, sizes, to, wanted, strict=True)
    ]
    return axes if all(start < stop for start, stop in axes) else None


def _make(item: TensorItem, device: torch.device) -> torch.Tensor:
    dtype = _dtype(item.dtype)
    if item.strides is not None and item.sizes == item.shape:
        return torch.empty_strided(item.shape, item.strides, dtype=dtype, device=device)
    return torch.empty(item.shape, dtype=dtype, device=device)


def offsets_of(live: Any) -> tuple[int, ...]:
    if not hasattr(live, "_local_tensor"):
        return (0,) * len(live.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        live.shape, live.device_mesh, live.placements
    )
    return tuple(offsets)


# ---- optimizers ---------------------------------------------------------------------------------


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(hasattr(parameter, "_local_tensor") for parameter in _parameters(optimizer))


def _keep_dtypes(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Undo the casts of `load_state_dict`: it makes a parameter's state of the parameter's dtype, and
    so ruins float32 masters of bfloat16 parameters."""
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        return  # An optimizer with a state_dict of its own.
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, _parameters(optimizer), strict=False):
        live = optimizer.state.get(parameter)
        for key, value in saved["state"].get(number, {}).items() if live else ():
            now = live.get(key)
            both = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
            if both and now.dtype != value.dtype:
                live[key] = value.to(now.device)


def make_optimizer_state(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Have an optimizer that took no step yet create the state that is about to be filled.

    Only the optimizer knows how the state of a sharded parameter is sharded. So it takes a step with
    gradients and a learning rate of zero, which changes no parameter; they are restored next anyway.
    """
    if optimizer.state:
        return
    parameters = _parameters(optimizer)
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            is_tensor = isinstance(group["lr"], torch.Tensor)
            group["lr"] = torch.zeros_like(group["lr"]) if is_tensor else 0.0
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    # Without the hooks: this step is not counted, and nothing runs before or after it.
    step: Any = type(optimizer).step
    _called(name, "step", partial(step.__wrapped__ if hasattr(step, "hooked") else step, optimizer))
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate
