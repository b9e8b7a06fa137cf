"""Finds checkpoints that plain `torch.distributed.checkpoint` saved, and reads their `.metadata`.

It needs no torch. The file is a pickle, a pickle is a program, and Python's unpickler imports and calls
whatever the program names. This reader imports nothing: names are looked up in a table, calling a name
builds a `_Pickled` (the arguments and the state that the pickle has for an object), and opcodes without
use here are refused. What comes out is then checked field by field: each tensor with its chunks, each
value, and for each the bytes of a file inside the checkpoint's directory.

A small file cannot cost much either. The memo is a dict, not an array that one large index would blow
up; only what `_key` returns is ever hashed (hashing a deeply nested tuple overflows the C stack); and a
tensor cannot list more chunks than the file stores.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, Final

from msgspec import Struct

from holdfast.checkpoint.dcp.records import ELEMENT_BYTES
from holdfast.checkpoint.storage.backends import MANIFEST, METADATA, Readable, read_whole
from holdfast.errors import CheckpointError

Sizes = tuple[int, ...]
Path = tuple[str | int, ...]
_Places = dict[object, object]

LIMIT_BYTES: Final = 256 << 20
"""Largest file read: about a million chunks, for which torch itself needs gigabytes of memory."""

# Real files stay far below these. Without them a small file could ask for much work, because a pickle
# can refer to one object from many places.
_MOST_DIMENSIONS: Final = 64
_MOST_KEYS: Final = 256
_MOST_TRANSFORMS: Final = 16


class FileRange(Struct, frozen=True):
    """Bytes of a file in the checkpoint's directory, readable by `torch.load`."""

    path: str
    at: int
    size: int
    transforms: tuple[str, ...] = ()
    """What was done to the bytes before they were written (compression), as torch names it."""


class Chunk(Struct, frozen=True):
    """A part of a tensor."""

    offsets: Sizes
    sizes: Sizes
    place: FileRange


class ForeignTensor(Struct, frozen=True):
    """A tensor and the chunks it consists of."""

    dtype: str
    shape: Sizes
    chunks: tuple[Chunk, ...]


class ForeignCheckpoint(Struct, frozen=True):
    """Everything a checkpoint holds, by name."""

    tensors: dict[str, ForeignTensor]
    values: dict[str, FileRange]
    paths: dict[str, Path]
    """Path of each name in the state; empty if the saver recorded none."""


def read_metadata(data: bytes, limit_bytes: int = LIMIT_BYTES) -> ForeignCheckpoint:
    """Decode a `.metadata` file; raise `CheckpointError` if it holds anything it should not."""
    if len(data) > limit_bytes:
        raise CheckpointError(
            f".metadata has {len(data)} bytes, {limit_bytes} are allowed: refused"
        )
    try:
        return _checkpoint(_object(_unpickled(data), "Metadata"))
    except CheckpointError as error:
        raise CheckpointError(f".metadata cannot be used: {error}") from error


# ---- where they are ------------------------------------------------------------------------------

_STEP: Final = re.compile(r"(?:.*step|checkpoint|ckpt)?[-_=]?([0-9]{1,18})", re.IGNORECASE)
"""Directory names that have a step's number: `500`, `step-500`, `global_step500`, `checkpoint-500`."""


@dataclass(frozen=True)
class PlainCheckpoint:
    """A directory that plain `torch.distributed.checkpoint` wrote."""

    storage: Readable
    directory: str
    """Its path in the storage; empty if it is the storage's root."""
    step: int | None
    """The number that its name ends in; None if it ends in none."""

    @property
    def where(self) -> str:
        return self.storage.where(self.directory)

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}" if self.directory else name

    def metadata(self) -> ForeignCheckpoint:
        try:
            return read_metadata(read_whole(self.storage, self.path(METADATA), LIMIT_BYTES))
        except CheckpointError as error:
            raise CheckpointError(f"{self.where}: {error}") from None

    def size(self) -> int:
        """Bytes of all tensors and values."""
        found = self.metadata()
        places = [chunk.place for tensor in found.tensors.values() for chunk in tensor.chunks]
        return sum(place.size for place in (*places, *found.values.values()))


def find_plain(storage: Readable) -> list[PlainCheckpoint]:
    """List the plain checkpoints in a directory, newest first: itself, or its subdirectories.

    What has a manifest is not among them, whole or not: `restore` has other ways to it. What Holdfast
    wrote and has lost its manifest is: it cannot be verified any more, but it can be read.
    """
    entries = storage.entries("")
    names = [entry.name for entry in entries]
    if METADATA in names:
        return [] if _is_ours(names) else [_plain(storage, "")]
    found = []
    for entry in entries:
        if entry.kind == "directory":
            inside = [one.name for one in storage.entries(entry.name)]
            if METADATA in inside and not _is_ours(inside):
                found.append(_plain(storage, entry.name))
    return sorted(found, key=lambda one: -1 if one.step is None else one.step, reverse=True)


def newest_plain(storage: Readable) -> PlainCheckpoint | None:
    """Return the plain checkpoint to start from; refuse to guess among several without a number."""
    found = find_plain(storage)
    if len(found) > 1 and found[0].step is None:
        listed = ", ".join(one.where for one in found[:4])
        raise CheckpointError(
            f"several checkpoints, none with a step in its name: {listed}; name one"
        )
    return found[0] if found else None


def _is_ours(names: list[str]) -> bool:
    """Return whether it has a manifest, or had one: then the manifest says whether it may be used. The
    name says nothing: others number their steps as Holdfast does."""
    return any(name.startswith(MANIFEST) for name in names)


def _plain(storage: Readable, directory: str) -> PlainCheckpoint:
    match = _STEP.fullmatch(storage.where(directory).rstrip("/").rpartition("/")[2])
    return PlainCheckpoint(storage, directory, int(match[1]) if match else None)


# ---- the pickle ---------------------------------------------------------------------------------


class _Pickled:
    """An object of a foreign class as the pickle describes it."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, *arguments: object) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: object = None


_CHECKPOINT: Final = "torch.distributed.checkpoint"
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"

_FIELDS: Final = {
    "Metadata": ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    "TensorStorageMetadata": ("properties", "size", "chunks"),
    "TensorProperties": ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "BytesStorageMetadata": (),
    "MetadataIndex": ("fqn", "offset", "index"),
    "StorageMeta": ("checkpoint_id", "save_id", "load_id", "modules"),
    "_StorageInfo": ("relative_path", "offset", "length", "transform_descriptors"),
}
"""The classes, with their fields in the order of their constructors' arguments."""

_CLASSES: Final = {
    **{f"{_CHECKPOINT}.metadata.{kind}": kind for kind in _FIELDS},
    f"{_CHECKPOINT}.filesystem._StorageInfo": "_StorageInfo",
    f"{_SHARDED}.TensorProperties": "TensorProperties",  # where older torch has it
}

_IGNORED: Final = (
    f"{_CHECKPOINT}.metadata._MEM_FORMAT_ENCODING",
    f"{_SHARDED}.MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
    "builtins.getattr",  # early Python 3.11 pickled the members of an enum so
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
)

_TABLE: Final[dict[str, object]] = {
    **{name: partial(_Pickled, kind) for name, kind in _CLASSES.items()},
    **{name: lambda *arguments: None for name in _IGNORED},
    **{f"torch.{dtype}": dtype for dtype in ELEMENT_BYTES},
    "torch.Size": lambda sizes: _sizes(sizes),
}

# PROTO FRAME MARK POP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 SHORT_BINUNICODE BINUNICODE
# EMPTY_TUPLE EMPTY_LIST EMPTY_DICT TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS GLOBAL STACK_GLOBAL REDUCE
# MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET STOP
_ALLOWED: Final = b"\x80\x95(0N\x88\x89JKM\x8a\x8cX)]}t\x85\x86\x87aec\x93R\x94qrhj."
_DISPATCH: Final[dict[int, Any]] = dict(pickle._Unpickler.dispatch)


class _MetadataReader(pickle._Unpickler):
    """The standard library's unpickler in Python, limited to building data."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module:.200}.{name:.200}"
        if full not in _TABLE:
            raise CheckpointError(f"it names {full!r}, which has no place here: refused")
        return _TABLE[full]

    def set_items(self) -> None:
        self._set(self.pop_mark())

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise TypeError("no dict to set items of")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key if type(key) is str else _key(key)] = value

    def build(self) -> None:
        state, built = self.stack.pop(), self.stack[-1]
        if type(built) is not _Pickled:
            raise TypeError("state for an object that has none")
        built.state = state

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: _DISPATCH[code] for code in _ALLOWED},
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
        pickle.NEWOBJ[0]: _DISPATCH[pickle.REDUCE[0]],
        pickle.BUILD[0]: build,
    }


_DAMAGED: Final = (
    "it is damaged, cut off, or not from torch.distributed.checkpoint; copy it again from where it was"
    " whole, or take another checkpoint"
)
_BROKEN: Final = (
    *(AttributeError, EOFError, LookupError, TypeError, ValueError),
    *(pickle.PickleError, struct.error),
)


def _unpickled(data: bytes) -> object:
    try:
        return _MetadataReader(io.BytesIO(data)).load()
    except _BROKEN as error:
        raise CheckpointError(_DAMAGED) from error


# ---- what it says -------------------------------------------------------------------------------


def _checkpoint(root: _Pickled) -> ForeignCheckpoint:
    places = _dict(_field(root, "storage_data"))
    found = ForeignCheckpoint({}, {}, _paths(_field(root, "planner_data")))
    left = len(places)
    for key, described in _dict(_field(root, "state_dict_metadata")).items():
        name = _string(key)
        if type(described) is _Pickled and described.kind == "BytesStorageMetadata":
            found.values[name] = _place(places, name, None)
        else:
            found.tensors[name] = tensor = _tensor(name, described, places, left)
            left -= len(tensor.chunks)
    return found


def _tensor(name: str, described: object, places: _Places, most_chunks: int) -> ForeignTensor:
    tensor = _object(described, "TensorStorageMetadata")
    dtype = _string(_field(_object(_field(tensor, "properties"), "TensorProperties"), "dtype"))
    if dtype not in ELEMENT_BYTES:
        raise CheckpointError(f"{name!r:.200} has an unknown dtype")
    chunks = _field(tensor, "chunks")
    if type(chunks) is not list or len(chunks) > most_chunks:
        raise CheckpointError(f"{name!r:.200} has no chunks, or more than are stored")
    shape = _sizes(_field(tensor, "size"))
    return ForeignTensor(dtype, shape, tuple(_chunk(name, shape, each, places) for each in chunks))


def _chunk(name: str, shape: Sizes, described: object, places: _Places) -> Chunk:
    chunk = _object(described, "ChunkStorageMetadata")
    offsets, sizes = _sizes(_field(chunk, "offsets")), _sizes(_field(chunk, "sizes"))
    inside = len(offsets) == len(sizes) == len(shape) and all(
        at + size <= whole for at, size, whole in zip(offsets, sizes, shape, strict=True)
    )
    if not inside:
        raise CheckpointError(f"a chunk of {name!r:.200} exceeds the tensor's shape")
    return Chunk(offsets, sizes, _place(places, name, offsets))


def _place(places: _Places, name: str, offsets: Sizes | None) -> FileRange:
    if (name, offsets) not in places:
        raise CheckpointError(f"{name!r:.200} is listed without a place in a file")
    info = _object(places[name, offsets], "_StorageInfo")
    path = _string(_field(info, "relative_path"))
    if not _is_inside(path):
        raise CheckpointError(f"{path!r:.200} is outside of the checkpoint's directory")
    at, size = _sizes((_field(info, "offset"), _field(info, "length")))
    transforms = _field(info, "transform_descriptors") or ()
    if not isinstance(transforms, list | tuple) or len(transforms) > _MOST_TRANSFORMS:
        raise CheckpointError(f"the transforms of {name!r:.200} are not a list")
    return FileRange(path, at, size, tuple(map(_string, transforms)))


@lru_cache(maxsize=1 << 10)
def _is_inside(path: str) -> bool:
    """Return whether a relative path stays inside its directory, on any system."""
    kinds = PurePosixPath(path), PureWindowsPath(path)
    return bool(path) and "\0" not in path and not any(k.anchor or ".." in k.parts for k in kinds)


def _paths(mapping: object) -> dict[str, Path]:
    """Decode `planner_data`: torch's planner puts each name's path there, others put anything."""
    return {_string(n): _path(p) for n, p in mapping.items()} if type(mapping) is dict else {}


def _path(value: object) -> Path:
    if type(value) is not tuple or not 0 < len(value) <= _MOST_KEYS:
        raise CheckpointError("the path of a name is not a tuple")
    if not all(type(key) in (str, int) for key in value):
        raise CheckpointError("the path of a name holds more than strings and integers")
    return value


def _object(value: object, kind: str) -> _Pickled:
    if type(value) is not _Pickled or value.kind != kind:
        raise CheckpointError(f"a {kind} is expected, and something else is there")
    return value


def _field(pickled: _Pickled, name: str) -> object:
    if type(pickled.state) is dict and name in pickled.state:
        return pickled.state[name]
    given = pickled.state if type(pickled.state) is tuple else pickled.arguments
    at = _FIELDS[pickled.kind].index(name)
    return given[at] if at < len(given) else None


def _key(value: object) -> tuple[str, Sizes | None]:
    """Turn a key of `storage_data` into a name and, for a tensor, the offsets of the chunk."""
    index = _object(value, "MetadataIndex")
    offset = _field(index, "offset")
    return _string(_field(index, "fqn")), None if offset is None else _sizes(offset)


def _sizes(value: object) -> Sizes:
    if type(value) is not tuple or len(value) > _MOST_DIMENSIONS:
        raise CheckpointError("sizes or offsets are not a tuple")
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        raise CheckpointError("sizes or offsets are not integers")
    return value


def _string(value: object) -> str:
    if type(value) is not str:
        raise CheckpointError("a string is expected, and something else is there")
    return value


def _dict(value: object) -> dict[object, object]:
    if type(value) is not dict:
        raise CheckpointError("a dict is expected, and something else is there")
    return value
