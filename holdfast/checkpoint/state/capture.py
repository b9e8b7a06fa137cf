"""Captures a state: finds its tensors and computes where each goes in the body of an image.

A layout names and places all tensors. It is computed once and reused while the state keeps its
structure; a tensor that is new, gone, or of another shape, dtype or device needs another layout.

Who owns a tensor decides where it goes (see `layout`). A shard of a DTensor is this rank's own, unless
another rank holds the same shard and writes it. A large plain tensor is assumed to be the same on all
ranks (the keepers compare digests before they rely on it); a small one, like the state of a random
generator, is this rank's own, and so is every plain tensor of an entry that is spread over ranks.

A state may have tens of thousands of tensors, and training waits while it is captured. So all work per
tensor and save is done by list operations in C, not by a line of Python for each tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch.nn.parameter import is_lazy

from holdfast.checkpoint.dcp import records as dcp
from holdfast.checkpoint.state.layout import ByteSpan, Kind, TensorItem, ValueItem, aligned
from holdfast.checkpoint.state.signature import Signature
from holdfast.checkpoint.state.skeleton import Dismantled, Path, dismantle, tensor_types
from holdfast.errors import CheckpointError

SMALL_BYTES = 64 << 10
"""Plain tensors smaller than this are saved by each rank: they may differ, and cost little."""

_TAIL_ALIGNMENT = 4096

_encoder = msgspec.msgpack.Encoder()
_NONE: Final[Mapping[str, Sequence[str]]] = {}


@dataclass(frozen=True)
class Position:
    """The step, round and rank that a state belongs to."""

    step: int
    round: int
    rank: int
    world_size: int


@dataclass
class Placed:
    """One tensor of the state, with this rank's part of it."""

    kind: Kind
    duplicate: bool
    """Whether another rank has the same shard and writes it."""
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: torch.Tensor


class Encoded(NamedTuple):
    """Concatenated encoded objects."""

    number: int
    data: bytes


@dataclass
class Layout:
    """Where each part of a state goes."""

    structure: list[Any]
    signature: Signature
    items: tuple[TensorItem, ...]
    item_of: list[int]
    """Item of each tensor of the state; tied tensors share one."""
    first_of: list[int]
    """First tensor of each item."""
    addresses: list[int]
    """Addresses of the tensors at the last capture."""
    odd_paths: Encoded
    """The tensors' part of `Contents.paths`."""
    headers: dict[int, bytes]
    """Constant bytes, by their offset in the body."""
    own: ByteSpan
    shared: ByteSpan
    tail_at: int
    names: frozenset[str] = field(init=False)
    encoded_items: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(n for item in self.items for n in (item.name, *item.also))
        self.encoded_items = _encoder.encode(self.items)


@dataclass
class Captured:
    """A state at one moment: what is to be copied, and the layout."""

    layout: Layout
    wholes: list[torch.Tensor]
    """The tensor of each item: the DTensor itself, of which `locals` has this rank's part."""
    locals: list[torch.Tensor]
    """This rank's part of each item."""
    addresses: list[int]
    """Addresses of these parts."""
    tail: bytes
    contents: ByteSpan


def capture(
    state: Any,
    before: Layout | None,
    position: Position,
    pickling: bool = False,
    parameters: Mapping[str, Sequence[str]] = _NONE,
    spread: frozenset[str] = frozenset(),
) -> Captured:
    """Dismantle a state; reuse the last layout if it still fits. `parameters` becomes that of the
    contents; `spread` names the entries that are spread over ranks."""
    parts = dismantle(state, pickling)
    layout = before
    try:
        locals_ = _locals(parts.tensors)
        addresses = _fitting(layout, parts, locals_) if layout is not None else None
        if layout is None or addresses is None:
            addresses = list(map(torch.Tensor.data_ptr, locals_))
            layout = _lay_out(parts, Signature.of(parts.tensors, locals_), addresses, spread)
    except (RuntimeError, ValueError) as error:
        # Sparse and nested tensors have no address, nor has a lazy module's before its first forward.
        _check_tensors(parts)
        raise CheckpointError(f"a tensor cannot be saved: {error}") from error
    wholes = parts.tensors
    if len(layout.items) < len(locals_):
        wholes = [wholes[number] for number in layout.first_of]
        locals_ = [locals_[number] for number in layout.first_of]
        addresses = [addresses[number] for number in layout.first_of]
    if 0 in addresses:
        _check_memory(layout, locals_, addresses)
    tail, contents = _tail(layout, parts, position, parameters)
    return Captured(layout, wholes, locals_, addresses, tail, contents)


def _locals(tensors: list[Any]) -> list[torch.Tensor]:
    """Return this rank's part of each tensor."""
    if tensor_types().issuperset(map(type, tensors)):
        return tensors
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def _fitting(layout: Layout, parts: Dismantled, locals_: list[torch.Tensor]) -> list[int] | None:
    """Return the tensors' addresses if the layout fits them, else None."""
    same = layout.structure == parts.structure
    addresses = layout.signature.addresses(parts.tensors, locals_) if same else None
    if addresses is None or addresses == layout.addresses:
        return addresses
    before, layout.addresses = layout.addresses, addresses
    # No more tensors are tied than before, and those still are: each is where its first one is.
    tied = [addresses[layout.first_of[item]] for item in layout.item_of]
    return addresses if len(set(addresses)) == len(set(before)) and addresses == tied else None


def _check_memory(layout: Layout, locals_: list[torch.Tensor], addresses: list[int]) -> None:
    for item, local, address in zip(layout.items, locals_, addresses, strict=True):
        if not address and local.numel():
            raise CheckpointError(
                f"{item.name}: the tensor's memory was freed; nothing can be saved"
            )


# ---- layout -------------------------------------------------------------------------------------


def _lay_out(
    parts: Dismantled, signature: Signature, addresses: list[int], spread: frozenset[str]
) -> Layout:
    paths = parts.paths()
    every = [path for of_one in paths for path in of_one]
    all_names = unique_names(every)
    remaining = iter(all_names)
    named = [[next(remaining) for _ in of_one] for of_one in paths]
    placed = [_place(tensor, names[0]) for tensor, names in zip(parts.tensors, named, strict=True)]
    for one, of_one in zip(placed, paths, strict=True):
        if one.kind == "shared" and of_one[0][0] in spread:
            one.kind = "own"
    item_of, first_of = _tied(placed)
    names_of: list[list[str]] = [[] for _ in first_of]
    for item, names in zip(item_of, named, strict=True):
        names_of[item] += names
    items, headers, spans = _arrange([placed[number] for number in first_of], names_of)
    return Layout(
        structure=parts.structure,
        signature=signature,
        items=items,
        item_of=item_of,
        first_of=first_of,
        addresses=addresses,
        odd_paths=_odd_paths(all_names, every),
        headers=headers,
        own=spans[0],
        shared=spans[1],
        tail_at=spans[2].end,
    )


def _arrange(
    chosen: list[Placed], names_of: list[list[str]]
) -> tuple[tuple[TensorItem, ...], dict[int, bytes], list[ByteSpan]]:
    """Return the items, their headers, and the parts of the body: own, shared, not persisted."""
    at = 0
    items: dict[int, TensorItem] = {}
    headers = {}
    spans = []
    for part in (0, 1, 2):
        start = at
        for index, placed in enumerate(chosen):
            if _part_of(placed) != part:
                continue
            item, header = _item(placed, names_of[index], at)
            items[index] = item
            headers[item.framed.at] = header
            at = item.raw.end
        at = aligned(at)
        spans.append(ByteSpan(start, at - start))
    return tuple(items[index] for index in range(len(chosen))), headers, spans


def _item(placed: Placed, names: list[str], at: int) -> tuple[TensorItem, bytes]:
    sizes = tuple(placed.local.shape)
    dtype = str(placed.local.dtype).removeprefix("torch.")
    try:
        header = dcp.tensor_header(dtype, sizes)
    except CheckpointError as error:
        raise CheckpointError(f"{names[0]}: {error}") from None
    raw = ByteSpan(aligned(at + len(header)), placed.local.nbytes)
    item = TensorItem(
        name=names[0],
        kind=placed.kind,
        dtype=dtype,
        shape=placed.shape,
        offsets=placed.offsets,
        sizes=sizes,
        framed=ByteSpan(raw.at - len(header), len(header) + raw.size),
        raw=raw,
        also=tuple(names[1:]),
        strides=_dense_strides(placed.local),
    )
    return item, header


def _part_of(placed: Placed) -> int:
    """Return the part of the body: 0 own, 1 shared, 2 never persisted."""
    if placed.duplicate:
        return 2
    return 1 if placed.kind == "shared" else 0


def _dense_strides(local: torch.Tensor) -> tuple[int, ...] | None:
    if local.is_contiguous():
        return None
    strides = local.stride()
    order = sorted(range(local.dim()), key=lambda d: strides[d], reverse=True)
    return tuple(strides) if local.permute(order).is_contiguous() else None


def _tied(placed: list[Placed]) -> tuple[list[int], list[int]]:
    """Find tensors that are the same view of the same memory: the item of each tensor, and the first
    tensor of each item."""
    known: dict[Any, int] = {}
    item_of: list[int] = []
    first_of: list[int] = []
    for number, one in enumerate(placed):
        local = one.local
        seen = local.shape, local.stride(), local.dtype, local.is_conj(), local.is_neg()
        key = local.data_ptr(), local.device, seen
        index = known.get(key) if local.numel() else None
        if index is None:
            index = known[key] = len(first_of)
            first_of.append(number)
        item_of.append(index)
    return item_of, first_of


def _check_tensors(parts: Dismantled) -> None:
    for tensor, paths in zip(parts.tensors, parts.paths(), strict=True):
        _place(tensor, ".".join(map(str, paths[0])))


def _place(tensor: torch.Tensor, name: str) -> Placed:
    if is_lazy(tensor):
        raise CheckpointError(f"{name}: has no shape yet; save after the first forward pass")
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    plain = local.layout == torch.strided and not (local.is_quantized or local.is_nested)
    if not plain or local.device.type == "meta" or hasattr(local, "__tensor_flatten__"):
        kind = "nested" if local.is_nested else str(local.layout)
        raise CheckpointError(
            f"{name}: a {type(local).__name__} ({kind}, {local.dtype}, on {local.device}) cannot be"
            " saved; make it a dense tensor"
        )
    if local is not tensor:
        return _place_sharded(tensor, name)
    return Placed(_kind(tensor), False, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def _place_sharded(tensor: Any, name: str) -> Placed:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local: torch.Tensor = tensor._local_tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(f"{name}: a DTensor of partial sums cannot be saved; redistribute it")
    shape = tuple(tensor.shape)
    if all(placement.is_replicate() for placement in placements):
        return Placed(_kind(local), False, shape, (0,) * len(shape), local)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    copies = (
        c for c, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()
    )
    return Placed("shard", any(copies), shape, tuple(offsets), local)


def _kind(local: torch.Tensor) -> Kind:
    return "own" if local.nbytes < SMALL_BYTES else "shared"


# ---- names and values ---------------------------------------------------------------------------


def flattened(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every tensor and plain value with its path, as DCP flattens a state: a dict is opened, a
    list or tuple only if it contains a tensor or a dict."""
    if isinstance(state, dict) and state:
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield (*path, str(key)), value
            else:
                yield from flattened(value, (*path, str(key)))
    elif isinstance(state, _SEQUENCES) and _opened(state):
        for index, value in enumerate(state):
            yield from flattened(value, (*path, index))
    else:
        yield path, state


_SEQUENCES: Final = (list, tuple, deque, set, frozenset)


def _opened(value: Any) -> bool:
    if isinstance(value, _SEQUENCES):
        return any(_opened(child) for child in value)
    return isinstance(value, dict | torch.Tensor)


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return dotted paths. If two collide ({"a.b": 1, "a": {"b": 2}}), which one gets another name
    does not depend on their order."""
    names = [".".join(map(str, path)) for path in paths]
    if len(set(names)) < len(names):
        used: set[str] = set()
        for number in sorted(range(len(paths)), key=lambda n: (names[n], repr(paths[n]))):
            while names[number] in used:
                names[number] += "'"
            used.add(names[number])
    return names


def _odd_paths(names: Iterable[str], paths: Iterable[Path]) -> Encoded:
    """Encode the names whose path is not the name split at its dots, with that path."""
    odd = [
        _encoder.encode((name, path))
        for name, path in zip(names, paths, strict=True)
        if tuple(name.split(".")) != path
    ]
    return Encoded(len(odd), b"".join(odd))


def _list_of(one: Encoded, other: Encoded) -> bytes:
    """Encode a list of objects that are encoded already."""
    return b"".join((b"\xdd", (one.number + other.number).to_bytes(4, "big"), one.data, other.data))


# ---- the tail -----------------------------------------------------------------------------------


class _Contents(Struct, frozen=True):
    """`layout.Contents` without its two large fields, which come last and are encoded before."""

    step: int
    round: int
    rank: int
    world_size: int
    own: ByteSpan
    shared: ByteSpan
    tail: ByteSpan
    skeleton: ByteSpan
    values: list[ValueItem]
    references: list[int]
    parameters: Mapping[str, Sequence[str]]
    items: tuple[()] = ()
    paths: tuple[()] = ()


_ITEMS: Final = _encoder.encode("items")
_PATHS: Final = _encoder.encode("paths")
_NO_ITEMS_NO_PATHS: Final = _ITEMS + b"\x90" + _PATHS + b"\x90"
"""How the encoded `_Contents` ends."""


def _tail(
    layout: Layout, parts: Dismantled, position: Position, parameters: Mapping[str, Sequence[str]]
) -> tuple[bytes, ByteSpan]:
    """Return the tail, and where the contents are in the body."""
    pieces, values, odd_paths = _values(layout, parts)
    at = layout.tail_at + sum(map(len, pieces))
    contents = _Contents(
        step=position.step,
        round=position.round,
        rank=position.rank,
        world_size=position.world_size,
        own=layout.own,
        shared=layout.shared,
        tail=ByteSpan(layout.tail_at, 0),
        skeleton=ByteSpan(at, len(parts.skeleton)),
        values=values,
        references=layout.item_of if len(layout.items) < len(layout.item_of) else [],
        parameters=parameters,
    )
    at += len(parts.skeleton)
    items, paths = layout.encoded_items, _list_of(layout.odd_paths, odd_paths)
    # The contents are part of the tail whose size they state: its end is rounded up to make room.
    size = len(_encoder.encode(contents)) + len(items) + len(paths) + 16
    end = aligned(at + size, _TAIL_ALIGNMENT)
    whole = _encoder.encode(replace(contents, tail=ByteSpan(layout.tail_at, end - layout.tail_at)))
    encoded = (whole.removesuffix(_NO_ITEMS_NO_PATHS), _ITEMS, items, _PATHS, paths)
    size = sum(map(len, encoded))
    pieces += [parts.skeleton, *encoded, bytes(end - at - size)]
    return b"".join(pieces), ByteSpan(at, size)


def _values(layout: Layout, parts: Dismantled) -> tuple[list[bytes], list[ValueItem], Encoded]:
    """Encode all values for readers other than Holdfast: bytes, items and odd paths."""
    pieces, values = [], []
    used: set[str] = set()
    at = layout.tail_at
    for path, value in parts.values:
        name = ".".join(map(str, path))
        while name in layout.names or name in used:
            name += "'"
        used.add(name)
        try:
            data = dcp.value_bytes(value)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
        pieces.append(data)
        values.append(ValueItem(name, ByteSpan(at, len(data))))
        at += len(data)
    paths = (path for path, _ in parts.values)
    return pieces, values, _odd_paths((value.name for value in values), paths)
