"""Encodes a state without its tensors: containers, plain values, and references to tensors.

`dismantle` walks a state once and leaves a tree that msgspec can encode. Each tensor becomes a
reference into a list, and a tensor that occurs twice becomes two references to one entry. A dict of
tensors alone, of which there may be thousands, becomes a single reference to all of them. `assemble`
decodes the bytes and asks for each tensor.

Types are kept: a tuple comes back as a tuple, an int key as an int, a float to its last bit, and a
named tuple, a dataclass or a member of an enum as one of its class, if that is imported. Nothing is
pickled. An object of any other type is an error that names its path, unless pickling was allowed;
then a reader must allow it too.

The same walk records paths as DCP flattens a state: a dict is opened, a list or tuple only if it
contains a tensor or a dict. Anything else is a value.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import itertools
import os
import pathlib
import pickle
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec.msgpack import Ext

from holdfast.errors import CheckpointError

Key = str | int
"""A dict's key as a string, or an index."""
Path = tuple[Key, ...]

_TENSOR, _TUPLE, _SET, _FROZENSET, _BIGINT, _COMPLEX = 1, 2, 3, 4, 5, 6
_ARRAY, _SCALAR, _DTYPE, _DEVICE, _SIZE, _ORDERED = 7, 8, 9, 10, 11, 12
_PAIRS, _BYTEARRAY, _COUNTER, _DEQUE, _PATH, _PICKLE = 13, 14, 15, 16, 17, 18
_TENSORS: Final = 19
_OBJECT: Final = 20

_PLAIN: Final = frozenset({str, float, bool, bytes, type(None)})
_KEYS: Final = frozenset({str, int})
_INT64: Final = range(-(1 << 63), 1 << 63)

_encoder = msgspec.msgpack.Encoder()


@dataclass
class Dismantled:
    """A state taken apart."""

    skeleton: bytes = b""
    tensors: list[Any] = field(default_factory=list)
    """Each tensor once, in the order of the walk."""
    structure: list[tuple[Path, Sequence[Key] | None, int]] = field(default_factory=list)
    """Where tensors were: at a path, or under these keys of a dict at a path; and the index of the
    (first) tensor there. States with the same structure have tensors with the same names."""
    values: list[tuple[Path, Any]] = field(default_factory=list)
    """Everything else, as DCP flattens it."""

    def paths(self) -> list[list[Path]]:
        """Return the paths of each tensor; two if it occurs twice."""
        found: list[list[Path]] = [[] for _ in self.tensors]
        for path, keys, first in self.structure:
            if keys is None:
                found[first].append(path)
            else:
                for number, key in enumerate(keys, first):
                    found[number].append((*path, str(key)))
        return found


def dismantle(state: Any, pickling: bool = False) -> Dismantled:
    found = Dismantled()
    walk = _Walk(found, pickling)
    try:
        tree = walk.of(state)
        found.skeleton = _encoder.encode(tree)
    except RecursionError:
        raise CheckpointError(f"{walk.where}: is too deep, or contains itself") from None
    except UnicodeEncodeError:
        # Rare, so the path is looked for only now.
        _Walk(Dismantled(), pickling, texts=True).of(state)
        raise CheckpointError("a string somewhere in the state cannot be encoded") from None
    return found


def tensor_types() -> frozenset[type]:
    """Return the usual classes of tensors; other subclasses are recognised one by one."""
    torch = sys.modules.get("torch")
    return frozenset() if torch is None else frozenset({torch.Tensor, torch.nn.Parameter})


class _Walk:
    def __init__(self, found: Dismantled, pickling: bool, texts: bool = False) -> None:
        self._found = found
        self._pickling = pickling
        self._texts = texts
        """Whether each string is checked to be encodable."""
        self._path: list[Key] = []
        self._seen: dict[int, int] = {}
        self._opened = 0
        """Number of tensors and dicts seen so far."""
        torch = sys.modules.get("torch")
        self._tensor: type = torch.Tensor if torch is not None else _Nothing
        self._tensors = tensor_types()

    @property
    def where(self) -> str:
        path = ".".join(map(str, self._path[:20])) or "the state itself"
        return path.encode(errors="backslashreplace").decode()  # So that it can be printed.

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            if self._texts and kind is str:
                self._check_text(value)
            return self._leaf(value, value)
        if isinstance(value, self._tensor):
            return self._reference(value)
        if kind is dict:
            return self._dict(value)
        if kind is int:
            return self._leaf(value, value if value in _INT64 else _bigint(value))
        if kind is list:
            return self._items(value)
        return self._special(kind, value)

    def _leaf(self, value: Any, encoded: Any) -> Any:
        self._found.values.append((tuple(self._path), value))
        return encoded

    def _check_text(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{self.where}: {text!r} is not valid: {error.reason}") from None

    # ---- tensors ----

    def _reference(self, tensor: Any) -> Ext:
        found = self._found
        number = self._seen.get(id(tensor))
        if number is None:
            number = self._seen[id(tensor)] = len(found.tensors)
            found.tensors.append(tensor)
        self._opened += 1
        found.structure.append((tuple(self._path), None, number))
        return _tensor_at(number)

    def _all_tensors(self, value: dict[Any, Any]) -> Ext | None:
        """Encode a dict of tensors alone, none of which was seen before; else return None."""
        if not self._tensors.issuperset(map(type, value.values())) or self._texts:
            return None
        found, tensors = self._found, list(value.values())
        first = len(found.tensors)
        numbers = dict(zip(map(id, tensors), itertools.count(first), strict=False))
        if len(numbers) < len(tensors) or not self._seen.keys().isdisjoint(numbers):
            return None
        if self._seen:
            self._seen.update(numbers)
        else:
            self._seen = numbers
        self._opened += 1
        keys = tuple(value)
        found.tensors += tensors
        found.structure.append((tuple(self._path), keys, first))
        return Ext(_TENSORS, _encoder.encode((first, keys)))

    # ---- dicts ----

    def _dict(self, value: dict[Any, Any]) -> Any:
        if not value:
            self._opened += 1
            return self._leaf(value, value)
        if not _simple_keys(value):
            return Ext(_PAIRS, _encoder.encode(self._pairs(value)))
        tensors = self._all_tensors(value)
        if tensors is not None:
            return tensors
        path, of = self._path, self.of
        self._opened += 1
        found = {}
        path.append("")
        for key, child in value.items():
            path[-1] = text = str(key)
            if self._texts:
                self._check_text(text)
            found[key] = of(child)
        path.pop()
        return found

    def _pairs(self, value: dict[Any, Any]) -> list[tuple[Any, Any]]:
        self._opened += 1
        if not value:
            self._leaf(value, None)
        if any(isinstance(key, self._tensor) for key in value):
            raise CheckpointError(f"{self.where}: a tensor cannot be the key of a dict")
        self._path.append("")
        pairs = []
        for key, child in value.items():
            pairs.append((self._key(key), self.of(child)))
        self._path.pop()
        return pairs

    def _key(self, key: Any) -> Any:
        self._path[-1] = str(key)
        before = len(self._found.values)
        encoded = self.of(key)
        del self._found.values[before:]
        return encoded

    def _ordered(self, value: OrderedDict[Any, Any]) -> Ext:
        content = self._all_tensors(value) if value and _simple_keys(value) else None
        pairs = self._pairs(value) if content is None else content
        # A module's state dict carries versions beside its items; loading looks at them.
        metadata = getattr(value, "_metadata", None)
        before = len(self._found.values)
        encoded = None if metadata is None else self.of(dict(metadata))
        del self._found.values[before:]
        return Ext(_ORDERED, _encoder.encode((pairs, encoded)))

    # ---- sequences, and sets ----

    def _items(self, value: Iterable[Any]) -> list[Any]:
        if _PLAIN_ITEMS.issuperset(map(type, value)) and not self._texts:
            items = list(value)
            self._leaf(value, None)
            return [one if type(one) is not int or one in _INT64 else _bigint(one) for one in items]
        path, of = self._path, self.of
        values, before = len(self._found.values), self._opened
        found = []
        path.append(0)
        for index, child in enumerate(value):
            path[-1] = index
            found.append(of(child))
        path.pop()
        if self._opened == before:
            del self._found.values[values:]
            self._leaf(value, None)
        return found

    def _special(self, kind: type, value: Any) -> Ext:
        contained = _CONTAINERS.get(kind)
        if contained is not None:
            return Ext(contained, _encoder.encode(self._items(value)))
        if kind is OrderedDict:
            return self._ordered(value)
        if kind is Counter:
            return Ext(_COUNTER, _encoder.encode(self._pairs(value)))
        if kind is deque:
            return Ext(_DEQUE, _encoder.encode((value.maxlen, self._items(value))))
        instance = self._instance(kind, value)
        if instance is not None:
            return instance
        encoded = _of_python(kind, value) or _of_numpy(kind, value) or _of_torch(kind, value)
        return self._leaf(value, encoded or self._pickled(kind, value))  # type: ignore[no-any-return]

    def _instance(self, kind: type, value: Any) -> Ext | None:
        """Encode a member of an enum, a named tuple or a dataclass, by the name of its class."""
        content: Any
        if isinstance(value, enum.Enum):
            content = self._leaf(value.name, value.name)
        elif isinstance(value, tuple) and hasattr(kind, "_fields"):
            content = self._items(list(value))
        elif dataclasses.is_dataclass(kind):
            fields = [one.name for one in dataclasses.fields(kind)]
            content = self._dict({n: getattr(value, n) for n in fields if hasattr(value, n)})
        else:
            return None
        return Ext(_OBJECT, _encoder.encode((kind.__module__, kind.__qualname__, content)))

    def _pickled(self, kind: type, value: Any) -> Ext:
        if not self._pickling:
            raise CheckpointError(
                f"{self.where}: a {kind.__module__}.{kind.__qualname__} cannot be saved. Give plain"
                " values or an object with state_dict(), or allow it with pickling=True"
            )
        try:
            return Ext(_PICKLE, pickle.dumps(value))
        except Exception as error:
            # The edge of the object's own code, which runs when it is pickled.
            raise CheckpointError(f"{self.where}: cannot be pickled either: {error}") from error


def _tensor_at(number: int) -> Ext:
    return Ext(_TENSOR, b"%d" % number)


class _Nothing:
    """The type of no object, where torch was never imported."""


_PLAIN_ITEMS: Final = _PLAIN | {int}
_CONTAINERS: Final[dict[type, int]] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_PATHS: Final = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
}


def _simple_keys(value: dict[Any, Any]) -> bool:
    """Return whether all keys can be keys of a msgpack map."""
    kinds = set(map(type, value))
    return _KEYS.issuperset(kinds) and (
        int not in kinds or all(key in _INT64 for key in value if type(key) is int)
    )


def _bigint(value: int) -> Ext:
    return Ext(_BIGINT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _of_python(kind: type, value: Any) -> Ext | None:
    if kind is complex:
        return Ext(_COMPLEX, _encoder.encode((value.real, value.imag)))
    if kind is bytearray:
        return Ext(_BYTEARRAY, bytes(value))
    if kind in _PATHS.values():
        return Ext(_PATH, _encoder.encode((kind.__name__, os.fsencode(value))))
    return None


def _of_numpy(kind: type, value: Any) -> Ext | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not (kind is numpy.ndarray or issubclass(kind, numpy.generic)):
        return None
    if value.dtype.hasobject:
        return None
    described = repr(numpy.lib.format.dtype_to_descr(value.dtype))
    if _dtype_of(described) != value.dtype:
        return None
    content = [described, list(value.shape), value.tobytes()]
    return Ext(_ARRAY if kind is numpy.ndarray else _SCALAR, _encoder.encode(content))


def _of_torch(kind: type, value: Any) -> Ext | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if kind is torch.dtype:
        return Ext(_DTYPE, str(value).removeprefix("torch.").encode())
    if kind is torch.device:
        return Ext(_DEVICE, str(value).encode())
    if kind is torch.Size:
        return Ext(_SIZE, _encoder.encode(list(value)))
    return None


# ---- decoding -----------------------------------------------------------------------------------


def entries_of(skeleton: bytes) -> dict[Key, bytes | msgspec.Raw]:
    """Return the skeleton of each entry of a state, to be assembled by itself."""
    root = _root.decode(skeleton)
    if isinstance(root, dict):
        return {**root}
    if root.code == _TENSORS:
        first, keys = msgspec.msgpack.decode(root.data)
        numbers = range(first, first + len(keys))
        return {k: _encoder.encode(_tensor_at(n)) for k, n in zip(keys, numbers, strict=True)}
    # Names that are members of an enum.
    return {assemble(key, _no_tensor): entry for key, entry in _pairs.decode(root.data)}


_root: Final = msgspec.msgpack.Decoder(dict[Key, msgspec.Raw] | Ext)
_pairs: Final = msgspec.msgpack.Decoder(list[tuple[msgspec.Raw, msgspec.Raw]])


def _no_tensor(index: int) -> Any:
    raise CheckpointError("a tensor cannot be the name of an entry")


def assemble(
    skeleton: bytes | msgspec.Raw, tensor: Callable[[int], Any], pickling: bool = False
) -> Any:
    """Rebuild the state; `tensor` returns the tensor with an index."""

    def hook(code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            return tensor(int(bytes(data)))
        if code in _LEAVES:
            return _LEAVES[code](bytes(data))
        if code == _TENSORS:
            first, keys = msgspec.msgpack.decode(data)
            return dict(zip(keys, map(tensor, range(first, first + len(keys))), strict=True))
        if code == _PICKLE:
            if not pickling:
                raise CheckpointError(
                    "the state has a pickled object in it; allow it with pickling=True, or with"
                    " --pickle at the command line"
                )
            return _unpickled(data)
        if code not in _COMPOUNDS:
            raise CheckpointError(f"a newer Holdfast wrote this: type {code} is not known here")
        return _COMPOUNDS[code](decoder.decode(data))

    decoder = msgspec.msgpack.Decoder(ext_hook=hook)
    return decoder.decode(skeleton)


def _instance_of(content: Any) -> Any:
    """Rebuild an instance. Nothing is imported and no code of its class is run for that."""
    module, name, fields = content
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if isinstance(kind, type):
        if issubclass(kind, enum.Enum) and fields in kind.__members__:
            return kind.__members__[fields]
        if issubclass(kind, tuple) and hasattr(kind, "_fields") and isinstance(fields, list):
            return tuple.__new__(kind, fields)
        if dataclasses.is_dataclass(kind) and isinstance(fields, dict):
            made = object.__new__(kind)
            for field_name, value in fields.items():
                object.__setattr__(made, field_name, value)
            return made
    raise CheckpointError(
        f"a {module}.{name} was saved, which is not here, or is another class now; import its module"
        " before restore()"
    )


def _unpickled(data: memoryview) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        # The edge of the object's own code, which runs when it is unpickled.
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"a pickled object cannot be unpickled here: {why}") from error


def _ordered(content: Any) -> OrderedDict[Any, Any]:
    pairs, metadata = content
    found: Any = OrderedDict(pairs)
    if metadata is not None:
        found._metadata = OrderedDict(metadata)
    return found  # type: ignore[no-any-return]


def _dtype_of(described: str) -> Any:
    import numpy

    return numpy.lib.format.descr_to_dtype(ast.literal_eval(described))


def _array(content: Any) -> Any:
    import numpy

    described, shape, data = content
    dtype = _dtype_of(described)
    if not data or not dtype.itemsize:  # An empty string has no bytes.
        return numpy.zeros(shape, dtype)
    return numpy.frombuffer(data, dtype).reshape(shape).copy()


def _scalar(content: Any) -> Any:
    return _array(content)[()]


def _dtype(data: bytes) -> Any:
    import torch

    found = getattr(torch, data.decode(), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"this torch has no dtype {data.decode()}")
    return found


def _device(data: bytes) -> Any:
    import torch

    return torch.device(data.decode())


def _size(content: Any) -> Any:
    import torch

    return torch.Size(content)


def _of_path(content: Any) -> Any:
    kind, path = content
    return _PATHS.get(kind, pathlib.Path)(os.fsdecode(path))


_LEAVES: Final[dict[int, Callable[[bytes], Any]]] = {
    _BIGINT: lambda data: int.from_bytes(data, "little", signed=True),
    _BYTEARRAY: bytearray,
    _DTYPE: _dtype,
    _DEVICE: _device,
}
_COMPOUNDS: Final[dict[int, Callable[[Any], Any]]] = {
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _COMPLEX: lambda parts: complex(*parts),
    _ARRAY: _array,
    _SCALAR: _scalar,
    _SIZE: _size,
    _PATH: _of_path,
    _ORDERED: _ordered,
    _PAIRS: dict,
    _COUNTER: lambda pairs: Counter(dict(pairs)),
    _DEQUE: lambda content: deque(content[1], maxlen=content[0]),
    _OBJECT: _instance_of,
}
