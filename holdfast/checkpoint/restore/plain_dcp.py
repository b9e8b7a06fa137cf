"""Restores checkpoints that plain `torch.distributed.checkpoint` saved, for jobs that come from there.

Such a checkpoint has no digests, so nothing in it can be verified: whatever restores it has to say so.
Its `.metadata` is read without unpickling (`dcp.foreign`), its tensors and values with torch's
`weights_only` reader; objects of other classes need `pickling=True`.

As for `dcp.load`, the live state is the template: each of its tensors and values is looked up by its
dotted name, and a region of a sharded tensor is put together from all chunks that overlap it. All names
and shapes are checked before the first byte is changed. What is spread over ranks (`state.spread`) has
no template: all that is stored under its name is one part, as DCP keeps the values of one rank only.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from holdfast.checkpoint.dcp.foreign import (
    Chunk,
    FileRange,
    ForeignCheckpoint,
    ForeignTensor,
    PlainCheckpoint,
    newest_plain,
)
from holdfast.checkpoint.restore.load import (
    captured_entry,
    copy_overlap,
    give_back,
    load,
    make_optimizer_state,
    merge,
    offsets_of,
    overlap,
)
from holdfast.checkpoint.restore.sources import open_files
from holdfast.checkpoint.state.parameter_names import (
    ParameterNames,
    by_name,
    by_number,
    is_named,
    unwrapped,
    unwrapped_keys,
)
from holdfast.checkpoint.state.spread import is_merged_by, is_spread, spread_names
from holdfast.checkpoint.storage.backends import Readable
from holdfast.checkpoint.storage.manifest import steps
from holdfast.checkpoint.storage.plain_directory import open_either
from holdfast.errors import CheckpointError

# ---- into a living state ------------------------------------------------------------------------


class Started(NamedTuple):
    """What a new job began with."""

    step: int
    verified: bool
    message: str


def load_start(
    where: str, state: dict[str, Any], rank: int, threads: Executor | None, pickling: bool
) -> Started | None:
    """Load the newest checkpoint of another job, or of none, from a directory or URL."""
    storage = open_either(where)
    complete = [one.step for one in steps(storage) if one.state == "complete"]
    if complete:
        with ExitStack() as until:
            load(state, open_files(storage, complete[0], until), rank, threads, pickling)
        return Started(complete[0], True, f"started from step {complete[0]} in {where}, verified")
    plain = newest_plain(storage)
    if plain is None:
        _refuse_links(storage)
        return None
    load_plain(state, plain, threads, pickling, rank)
    counted = "" if plain.step is not None else "; its name has no step, so steps count from 0"
    what = f"started from {plain.where}, which torch.distributed.checkpoint saved: NOT VERIFIED"
    return Started(plain.step or 0, False, f"{what}, as it has no digests{counted}{_alone(state)}")


def _alone(state: dict[str, Any]) -> str:
    """Say that parts of other ranks may be missing: DCP keeps the values of one rank only."""
    names = sorted(spread_names(state))
    return f"; {_some(names)}: it has the part of one rank only" if names else ""


def _refuse_links(storage: Readable) -> None:
    """Refuse to find nothing where links may lead to checkpoints: they are not followed."""
    links = [entry.name for entry in storage.entries("") if entry.kind == "other"]
    if links:
        raise CheckpointError(
            f"{storage.where(links[0])} is a symbolic link, which is not followed, and there is no"
            " other checkpoint; name the directory itself with start_from"
        )


def load_plain(
    state: dict[str, Any],
    checkpoint: PlainCheckpoint,
    threads: Executor | None = None,
    pickling: bool = False,
    rank: int = 0,
) -> None:
    """Make the state what a plain checkpoint holds; nothing of that is verified."""
    stored = checkpoint.metadata()
    for name, entry in state.items():
        saved = any(tensor.startswith(f"{name}.state.") for tensor in stored.tensors)
        if saved and isinstance(entry, torch.optim.Optimizer):
            make_optimizer_state(entry, name)
    spread = {name: entry for name, entry in state.items() if is_spread(entry)}
    live = {name: captured_entry(e, name) for name, e in state.items() if name not in spread}
    numbered, orders = dict(live), _orders(state, stored)
    for name, order in orders.items():
        live[name] = by_name(live[name], order)
    filling = _Filling(checkpoint, stored, pickling, _wrapped_otherwise(state, live, stored))
    tree = {name: filling.of((name,), entry) for name, entry in live.items()}
    parts = {name: filling.whole(name) for name in spread}
    filling.check(state)
    for name, entry in spread.items():
        # It is not known whose part it is, so it is no other rank's own.
        tree[name] = merge(name, entry, [parts[name]]) if is_merged_by(rank, entry) else None
    for name, order in orders.items():
        if is_named(tree[name]):
            tree[name] = by_number(tree[name], order, numbered[name], name)
    filling.fill(threads)
    give_back(state, tree, rank)


def _orders(state: dict[str, Any], stored: ForeignCheckpoint) -> dict[str, list[str]]:
    """Return the names of the parameters of each optimizer whose state is stored under them, in the
    order in which it has them here."""
    found, names = {}, ParameterNames()
    for name, entry in state.items():
        order = names.of(state, name) if isinstance(entry, torch.optim.Optimizer) else None
        prefix = f"{name}.state."
        first = next((one for one in stored.tensors if one.startswith(prefix)), "")
        if any(first.startswith(f"{prefix}{parameter}.") for parameter in order or ()):
            found[name] = order or []
    return found


def _wrapped_otherwise(
    state: dict[str, Any], live: dict[str, Any], stored: ForeignCheckpoint
) -> dict[str, str]:
    """Return the names of what modules have here that is stored under a name that differs by wrappers,
    and that name."""
    found = {}
    known = [*stored.tensors, *stored.values]
    for name, entry in state.items():
        if isinstance(entry, torch.nn.Module) and isinstance(live[name], dict):
            prefix = f"{name}."
            there = unwrapped_keys(n.removeprefix(prefix) for n in known if n.startswith(prefix))
            for key in live[name]:
                other = there.get(unwrapped(key))
                if other is not None:
                    found[f"{prefix}{key}"] = f"{prefix}{other}"
    return found


class _Filling:
    """The walk through a live state, and the chunks that are to be copied into it."""

    def __init__(
        self,
        checkpoint: PlainCheckpoint,
        stored: ForeignCheckpoint,
        pickling: bool,
        also: dict[str, str],
    ) -> None:
        self._reader = _ChunkReader(checkpoint, pickling)
        self._stored = stored
        self._also = also
        """Names under which something may be stored, if it is not under its own."""
        self._where = checkpoint.where
        self._used: set[str] = set()
        self._absent: list[str] = []
        self._copies: list[tuple[str, Chunk, torch.Tensor, tuple[int, ...]]] = []

    def of(self, path: tuple[str | int, ...], live: Any) -> Any:
        """Return what was stored at a path; tensors are those of the live state, filled later."""
        name = ".".join(map(str, path))
        if name not in self._stored.tensors and name not in self._stored.values:
            name = self._also.get(name, name)
        if name in self._stored.tensors:
            self._used.add(name)
            return self._tensor(name, self._stored.tensors[name], live)
        if name in self._stored.values:
            self._used.add(name)
            return self._reader.value(name, self._stored.values[name])
        if isinstance(live, dict):
            filled = copy.copy(live)
            for key, child in live.items():
                filled[key] = self.of((*path, str(key)), child)
            return filled
        if isinstance(live, list) and live:
            return [self.of((*path, index), child) for index, child in enumerate(live)]
        self._absent.append(name)
        return live

    def whole(self, entry: str) -> Any:
        """Return all that was stored under the name of an entry."""
        known = (*self._stored.tensors, *self._stored.values)
        names = [name for name in known if _path(name, self._stored)[0] == entry]
        if not names:
            self._absent.append(entry)
            return None
        return _tree(self._stored, self._reader, names)[entry]

    def _tensor(self, name: str, stored: ForeignTensor, live: Any) -> Any:
        if not isinstance(live, torch.Tensor):
            live = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        if is_lazy(live) or tuple(live.shape) != stored.shape:
            here = "no shape yet" if is_lazy(live) else f"shape {list(live.shape)}"
            raise CheckpointError(f"{name}: saved with shape {list(stored.shape)}, has {here} here")
        local: torch.Tensor = getattr(live, "_local_tensor", live)
        offsets, sizes = offsets_of(live), tuple(local.shape)
        missing = prod(sizes)
        for chunk in stored.chunks:
            region = overlap(chunk.offsets, chunk.sizes, offsets, sizes)
            if region is not None:
                self._copies.append((name, chunk, local, offsets))
                missing -= prod(stop - start for start, stop in region)
        if missing > 0:
            raise CheckpointError(f"{name}: {missing} of {prod(sizes)} elements are not stored")
        return live

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a state of which something is not stored, or that lacks something stored."""
        known = [*self._stored.tensors, *self._stored.values]
        if self._absent:
            entries = sorted({name.partition(".")[0] for name in known})
            raise CheckpointError(
                f"{self._where} has no {_some(self._absent)}; its entries are {_some(entries, 20)}"
            )
        fixed = torch.nn.Module | torch.optim.Optimizer
        prefixes = tuple(f"{name}." for name, entry in state.items() if isinstance(entry, fixed))
        unknown = [n for n in known if n.startswith(prefixes) and n not in self._used]
        if unknown:
            raise CheckpointError(f"{self._where} has {_some(unknown)}, which the state here lacks")

    def fill(self, threads: Executor | None) -> None:
        # One chunk may overlap the parts of several tensors only if they are tied: no order matters.
        for _ in (threads.map if threads is not None else map)(self._fill_one, self._copies):
            pass

    def _fill_one(self, copying: tuple[str, Chunk, torch.Tensor, tuple[int, ...]]) -> None:
        name, chunk, local, offsets = copying
        copy_overlap(self._reader.tensor(name, chunk), chunk.offsets, local, offsets)


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


class _ChunkReader:
    """Reads objects that `torch.save` wrote out of a checkpoint's files."""

    def __init__(self, checkpoint: PlainCheckpoint, pickling: bool) -> None:
        self._checkpoint = checkpoint
        self._pickling = pickling

    def tensor(self, name: str, chunk: Chunk) -> torch.Tensor:
        found = self._object(name, chunk.place, weights_only=True)
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != chunk.sizes:
            raise CheckpointError(f"{name}: {chunk.place.path} holds something else than its chunk")
        return found

    def value(self, name: str, place: FileRange) -> Any:
        return self._object(name, place, weights_only=not self._pickling)

    def _object(self, name: str, place: FileRange, weights_only: bool) -> Any:
        where = f"{name}: {self._checkpoint.storage.where(self._checkpoint.path(place.path))}"
        if place.transforms:
            raise CheckpointError(
                f"{where}: it is compressed ({place.transforms[0]}); save it without"
            )
        data = bytearray(place.size)
        with self._checkpoint.storage.open(self._checkpoint.path(place.path)) as file:
            file.read_into(place.at, [memoryview(data)])
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{where}: cannot be read as plain data ({str(error).splitlines()[0]:.200}); if you"
                " trust it, allow objects with pickling=True, or --pickle at the command line"
            ) from None
        except Exception as error:
            # The edge of torch's readers, which raise anything for damaged files.
            raise CheckpointError(
                f"{where}: is damaged: torch cannot read it; copy it again from where it was whole, or"
                " take another checkpoint"
            ) from error


# ---- as a tree ----------------------------------------------------------------------------------


class _Node(dict[str | int, Any]):
    """A dict or list of the state, as opposed to a value that happens to be a dict."""


def plain_state(checkpoint: PlainCheckpoint, pickling: bool = False) -> dict[str, Any]:
    """Read all of a plain checkpoint as nested dicts and lists, by the paths that it recorded."""
    stored = checkpoint.metadata()
    names = [*stored.tensors, *stored.values]
    return _tree(stored, _ChunkReader(checkpoint, pickling), names)


def _tree(stored: ForeignCheckpoint, reader: _ChunkReader, names: Sequence[str]) -> dict[str, Any]:
    tree = _Node()
    for name in names:
        *above, last = _path(name, stored)
        node = tree
        for key in above:
            node = node.setdefault(key, _Node())
        node[last] = _whole(name, stored, reader)
    return {str(key): _with_lists(child) for key, child in tree.items()}


def _path(name: str, stored: ForeignCheckpoint) -> tuple[str | int, ...]:
    return stored.paths.get(name) or (name,)


def _whole(name: str, stored: ForeignCheckpoint, reader: _ChunkReader) -> Any:
    """Read a tensor with all its chunks, or a value."""
    tensor = stored.tensors.get(name)
    if tensor is None:
        return reader.value(name, stored.values[name])
    whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    for chunk in tensor.chunks:
        if 0 not in chunk.sizes:
            copy_overlap(reader.tensor(name, chunk), chunk.offsets, whole, (0,) * whole.dim())
    return whole


def _with_lists(node: Any) -> Any:
    """Turn nodes into what they were: lists have integers for keys, dicts have strings."""
    if not isinstance(node, _Node):
        return node
    filled = {key: _with_lists(child) for key, child in node.items()}
    is_list = all(isinstance(key, int) for key in filled)
    return [child for _, child in sorted(filled.items())] if is_list else filled
