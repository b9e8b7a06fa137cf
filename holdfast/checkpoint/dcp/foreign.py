"""What is where in a checkpoint that somebody else saved with `torch.distributed.checkpoint`.

Its `.metadata` is a pickle, and a pickle from elsewhere is never given to Python's unpickler. It is
read as data (`unpickling`), and then checked until it says what it should: each tensor with its
chunks, each value, and for each the bytes of a file of that directory. No torch is needed.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import PurePosixPath, PureWindowsPath
from typing import Final

from msgspec import Struct

from holdfast.checkpoint.dcp.records import ELEMENT_BYTES
from holdfast.checkpoint.dcp.unpickling import Named, Record, unpickled
from holdfast.errors import CheckpointError

Sizes = tuple[int, ...]
Path = tuple[str | int, ...]
Places = dict[object, object]

LIMIT_BYTES: Final = 256 << 20
"""Of the file: about a million chunks, for which torch itself needs some gigabytes of memory."""

# No real file comes near these, and without them a small one could ask for much work: what it has
# once, it can refer to from everywhere.
_MOST_DIMENSIONS: Final = 64
_MOST_KEYS: Final = 256
_MOST_TRANSFORMS: Final = 16


class Place(Struct, frozen=True):
    """Bytes of a file in the checkpoint's directory, as `torch.load` wants to see them."""

    path: str
    at: int
    size: int
    transforms: tuple[str, ...] = ()
    """What was done to the bytes before they were written (compression), as torch names it."""


class Chunk(Struct, frozen=True):
    """A part of a tensor."""

    offsets: Sizes
    sizes: Sizes
    place: Place


class StoredTensor(Struct, frozen=True):
    dtype: str
    shape: Sizes
    chunks: tuple[Chunk, ...]


class Stored(Struct, frozen=True):
    """All that a checkpoint holds, by name."""

    tensors: dict[str, StoredTensor]
    values: dict[str, Place]
    paths: dict[str, Path]
    """Where the thing of a name was in the state; empty when the saver did not say."""


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
"""The classes, and their fields in the order in which their constructors take them."""

_CLASSES: Final = {
    **{f"{_CHECKPOINT}.metadata.{kind}": kind for kind in _FIELDS},
    f"{_CHECKPOINT}.filesystem._StorageInfo": "_StorageInfo",
    f"{_SHARDED}.TensorProperties": "TensorProperties",  # where older torch has it
}

_OF_NO_INTEREST: Final = (
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
    **{name: Named(partial(Record, kind)) for name, kind in _CLASSES.items()},
    **{name: Named(lambda arguments: None) for name in _OF_NO_INTEREST},
    **{f"torch.{dtype}": dtype for dtype in ELEMENT_BYTES},
    "torch.Size": Named(lambda arguments: _sizes(*arguments)),
}


def read_metadata(data: bytes, limit_bytes: int = LIMIT_BYTES) -> Stored:
    """What a `.metadata` file says; a `CheckpointError` if it says anything it should not."""
    if len(data) > limit_bytes:
        raise CheckpointError(
            f".metadata has {len(data)} bytes, {limit_bytes} are allowed: refused"
        )
    try:
        return _stored(_record(unpickled(data, _TABLE, _key), "Metadata"))
    except CheckpointError as error:
        raise CheckpointError(f".metadata cannot be used: {error}") from error


def _stored(root: Record) -> Stored:
    places = _dict(_field(root, "storage_data"))
    stored = Stored({}, {}, _paths(_field(root, "planner_data")))
    left = len(places)
    for key, described in _dict(_field(root, "state_dict_metadata")).items():
        name = _string(key)
        if type(described) is Record and described.kind == "BytesStorageMetadata":
            stored.values[name] = _place(places, name, None)
        else:
            stored.tensors[name] = tensor = _tensor(name, described, places, left)
            left -= len(tensor.chunks)
    return stored


def _tensor(name: str, described: object, places: Places, most_chunks: int) -> StoredTensor:
    tensor = _record(described, "TensorStorageMetadata")
    dtype = _string(_field(_record(_field(tensor, "properties"), "TensorProperties"), "dtype"))
    if dtype not in ELEMENT_BYTES:
        raise CheckpointError(f"{name!r:.200} is of no dtype known here")
    chunks = _field(tensor, "chunks")
    if type(chunks) is not list or len(chunks) > most_chunks:
        raise CheckpointError(f"{name!r:.200} has no chunks, or more than are stored")
    shape = _sizes(_field(tensor, "size"))
    return StoredTensor(dtype, shape, tuple(_chunk(name, shape, each, places) for each in chunks))


def _chunk(name: str, shape: Sizes, described: object, places: Places) -> Chunk:
    chunk = _record(described, "ChunkStorageMetadata")
    offsets, sizes = _sizes(_field(chunk, "offsets")), _sizes(_field(chunk, "sizes"))
    inside = len(offsets) == len(sizes) == len(shape) and all(
        at + size <= whole for at, size, whole in zip(offsets, sizes, shape, strict=True)
    )
    if not inside:
        raise CheckpointError(f"a chunk of {name!r:.200} is not inside of it")
    return Chunk(offsets, sizes, _place(places, name, offsets))


def _place(places: Places, name: str, offsets: Sizes | None) -> Place:
    if (name, offsets) not in places:
        raise CheckpointError(f"{name!r:.200} is listed, but not where it is")
    info = _record(places[name, offsets], "_StorageInfo")
    path = _string(_field(info, "relative_path"))
    if not _is_inside(path):
        raise CheckpointError(f"{path!r:.200} is outside of the checkpoint's directory")
    at, size = _sizes((_field(info, "offset"), _field(info, "length")))
    transforms = _field(info, "transform_descriptors") or ()
    if not isinstance(transforms, list | tuple) or len(transforms) > _MOST_TRANSFORMS:
        raise CheckpointError(f"what was done to the bytes of {name!r:.200} is no list")
    return Place(path, at, size, tuple(map(_string, transforms)))


@lru_cache(maxsize=1 << 10)
def _is_inside(path: str) -> bool:
    """Whether that path, followed from a directory, stays in it, on any system."""
    kinds = PurePosixPath(path), PureWindowsPath(path)
    return bool(path) and "\0" not in path and not any(k.anchor or ".." in k.parts for k in kinds)


def _paths(mapping: object) -> dict[str, Path]:
    """`planner_data`: torch's own planner puts each name's path there; others may put anything."""
    return {_string(n): _path(p) for n, p in mapping.items()} if type(mapping) is dict else {}


def _path(value: object) -> Path:
    if type(value) is not tuple or not 0 < len(value) <= _MOST_KEYS:
        raise CheckpointError("the path of a name is no tuple")
    if not all(type(key) in (str, int) for key in value):
        raise CheckpointError("the path of a name has more than strings and numbers")
    return value


# ---- what a pickle may hold in one place ----


def _record(value: object, kind: str) -> Record:
    if type(value) is not Record or value.kind != kind:
        raise CheckpointError(f"where a {kind} should be is something else")
    return value


def _field(record: Record, name: str) -> object:
    if type(record.state) is dict and name in record.state:
        return record.state[name]
    given = record.state if type(record.state) is tuple else record.arguments
    at = _FIELDS[record.kind].index(name)
    return given[at] if at < len(given) else None


def _key(value: object) -> tuple[str, Sizes | None]:
    """What is asked for in `storage_data`: a name, and where the chunk begins if it is a tensor's."""
    index = _record(value, "MetadataIndex")
    offset = _field(index, "offset")
    return _string(_field(index, "fqn")), None if offset is None else _sizes(offset)


def _sizes(value: object) -> Sizes:
    if type(value) is not tuple or len(value) > _MOST_DIMENSIONS:
        raise CheckpointError("sizes or offsets are no tuple")
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        raise CheckpointError("sizes or offsets are no whole numbers")
    return value


def _string(value: object) -> str:
    if type(value) is not str:
        raise CheckpointError("where a string should be is something else")
    return value


def _dict(value: object) -> dict[object, object]:
    if type(value) is not dict:
        raise CheckpointError("where a dict should be is something else")
    return value
