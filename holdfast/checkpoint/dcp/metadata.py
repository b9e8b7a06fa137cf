"""Writes the `.metadata` file of a checkpoint, which `torch.distributed.checkpoint` reads.

The file is a pickle of torch's `Metadata`, written without torch. It lists each tensor with its dtype,
shape and chunks, each value, and for each of these a range of bytes in a file. A reader with another
number of ranks takes from the chunks what it needs.

Objects are built by calling their class with the arguments that it has had since torch 2.3, never by
setting fields: fields that a newer torch has added get that torch's defaults, and nothing that an older
one lacks is named. What repeats (names, sizes) is written once and then taken from the memo.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from typing import Final, NamedTuple

from holdfast.checkpoint.dcp import records as op
from holdfast.checkpoint.state.layout import (
    ByteSpan,
    Contents,
    Extent,
    Kind,
    TensorItem,
    offset_in_file,
)
from holdfast.errors import CheckpointError

File = tuple[str, Contents, Sequence[Extent]]
"""Path in the checkpoint's directory, contents of the body, and the extents of it in the file."""

Sizes = tuple[int, ...]
Path = tuple[str | int, ...]

FORMAT_VERSION: Final = "1.0.0"
"""Torch's version of the format."""
_BATCH: Final = 1000
"""Entries per SETITEMS, as in pickle itself."""

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_CLASSES: Final = (
    op.named(_MODULE, "Metadata"),
    op.named(_MODULE, "TensorStorageMetadata"),
    op.named(_MODULE, "TensorProperties"),
    op.named(_MODULE, "ChunkStorageMetadata"),
    op.named(_MODULE, "BytesStorageMetadata"),
    op.named(_MODULE, "MetadataIndex"),
    op.named("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    op.named("torch", "Size"),
)
_PREPARED: Final = b"".join(c + op.put(number) + op.DROP for number, c in enumerate(_CLASSES))
_METADATA, _TENSOR, _PROPERTIES, _CHUNK, _BYTES, _INDEX, _INFO, _SIZE = map(
    op.get, range(len(_CLASSES))
)


class _Chunk(NamedTuple):
    """A part of a tensor, and where it is stored."""

    offsets: Sizes
    sizes: Sizes
    path: str
    at: int
    size: int


class _Tensor:
    """A tensor with the chunks found so far. Of several with the same offsets the first counts."""

    def __init__(self, item: TensorItem) -> None:
        op.element_bytes(item.dtype)
        self.kind: Kind = item.kind
        self.dtype = item.dtype
        self.shape = item.shape
        self.chunks: dict[Sizes, _Chunk] = {}

    def add(self, name: str, item: TensorItem, path: str, at: int) -> None:
        if self.chunks and not self.kind == item.kind == "shard":
            return
        if item.shape != self.shape or item.dtype != self.dtype:
            raise CheckpointError(
                f"{name} is {self.dtype} {list(self.shape)} on one rank and "
                f"{item.dtype} {list(item.shape)} on another: they are not parts of one tensor"
            )
        if 0 in item.sizes and 0 not in item.shape:
            return  # An empty shard, whose offsets mean nothing.
        if item.offsets not in self.chunks:
            chunk = _Chunk(item.offsets, item.sizes, path, at, item.framed.size)
            self.chunks[item.offsets] = chunk

    def has_gaps(self) -> bool:
        if 0 in self.shape:
            return not self.chunks
        return sum(prod(chunk.sizes) for chunk in self.chunks.values()) < prod(self.shape)


class _Found(NamedTuple):
    """What the files hold. Of what several ranks have, the lowest rank's counts."""

    tensors: dict[str, _Tensor]
    values: dict[str, tuple[str, ByteSpan]]
    paths: dict[str, Path]


def metadata(contents: Sequence[File]) -> bytes:
    """Encode the `.metadata` of a checkpoint that consists of these files.

    Refuses what no reader could assemble: a value or a part of a tensor that is in no file, and parts
    that do not belong to one tensor.
    """
    files = sorted(contents, key=lambda file: file[1].rank)
    found = _found(files)
    values = (value.name for _, lowest, _ in files[:1] for value in lowest.values)
    lacking = [name for name, tensor in found.tensors.items() if tensor.has_gaps()]
    lacking += [name for name in values if name not in found.values]
    if lacking:
        raise CheckpointError(
            f"{lacking[0]} is incomplete (and {len(lacking) - 1} others): some of it is in none of"
            " the checkpoint's files"
        )
    return _Pickle().of(found)


def _found(files: Sequence[File]) -> _Found:
    found = _Found({}, {}, {})
    for path, contents, extents in files:
        if contents.rank == files[0][1].rank:
            _find_values(found, path, contents, extents)
    for path, contents, extents in files:
        _find_tensors(found, path, contents, extents)
    return found


def _find_values(found: _Found, path: str, contents: Contents, extents: Sequence[Extent]) -> None:
    for value in contents.values:
        at = offset_in_file(value.framed, extents)
        if at is not None:
            found.values.setdefault(value.name, (path, ByteSpan(at, value.framed.size)))


def _find_tensors(found: _Found, path: str, contents: Contents, extents: Sequence[Extent]) -> None:
    for name, its_path in contents.paths:
        found.paths.setdefault(name, its_path)
    for item in contents.items:
        at = offset_in_file(item.framed, extents)
        for name in (item.name, *item.also):
            if name in found.values:
                continue
            tensor = found.tensors.get(name)
            if tensor is None:
                tensor = found.tensors[name] = _Tensor(item)
            if at is not None:
                tensor.add(name, item, path, at)


def _entries(entries: Iterable[bytes]) -> Iterator[bytes]:
    """Push a dict of entries."""
    yield op.EMPTY_DICT
    remaining = iter(entries)
    while batch := b"".join(islice(remaining, _BATCH)):
        yield op.MARK + batch + op.SETITEMS


class _Pickle:
    """A pickle being written; `_known` maps what is in it already to its memo reference.

    So the pieces must be written in the order in which they were requested.
    """

    def __init__(self) -> None:
        self._known: dict[object, bytes] = {}

    def of(self, found: _Found) -> bytes:
        # `version` is younger than the other fields; a torch without it ignores the attribute.
        version = op.dict_of(("version", op.text(FORMAT_VERSION))) + op.BUILD
        return b"".join(
            (
                op.BEGIN + _PREPARED + _METADATA,
                *_entries(self._described(found)),
                *_entries(self._flattened(found)),
                *_entries(self._stored(found)),
                op.TUPLE_3 + op.CALL + version + op.END,
            )
        )

    def _described(self, found: _Found) -> Iterator[bytes]:
        """Encode `state_dict_metadata`: each name and what it stands for."""
        for name, tensor in found.tensors.items():
            chunks = tensor.chunks.values()
            yield b"".join(
                (
                    self._text(name) + _TENSOR,
                    op.call(_PROPERTIES, self._dtype(tensor.dtype)) + self._size(tensor.shape),
                    op.list_of(*[self._chunk(chunk.offsets, chunk.sizes) for chunk in chunks]),
                    op.TUPLE_3 + op.CALL,
                )
            )
        for name in found.values:
            yield self._text(name) + op.call(_BYTES)

    def _flattened(self, found: _Found) -> Iterator[bytes]:
        """Encode `planner_data`: each name and its path in the state."""
        for name in (*found.tensors, *found.values):
            path = found.paths.get(name) or name.split(".")
            keys = [op.whole(key) if isinstance(key, int) else self._text(key) for key in path]
            yield self._text(name) + op.tuple_of(*keys)

    def _stored(self, found: _Found) -> Iterator[bytes]:
        """Encode `storage_data`: where each chunk and value is stored."""
        for name, tensor in found.tensors.items():
            for number, (offsets, _, path, at, size) in enumerate(tensor.chunks.values()):
                part = self._text(name) + self._size(offsets) + op.whole(number) + op.TUPLE_3
                yield _INDEX + part + op.CALL + self._place(path, at, size)
        for name, (path, span) in found.values.items():
            yield op.call(_INDEX, self._text(name)) + self._place(path, span.at, span.size)

    def _chunk(self, offsets: Sizes, sizes: Sizes) -> bytes:
        return _CHUNK + self._size(offsets) + self._size(sizes) + op.TUPLE_2 + op.CALL

    def _place(self, path: str, at: int, size: int) -> bytes:
        return _INFO + self._text(path) + op.whole(at) + op.whole(size) + op.TUPLE_3 + op.CALL

    def _text(self, string: str) -> bytes:
        return self._known.get(string) or self._remember(string, op.text(string))

    def _size(self, sizes: Sizes) -> bytes:
        known = self._known.get(sizes)
        if known is None:
            program = op.call(_SIZE, op.tuple_of(*map(op.whole, sizes)))
            known = self._remember(sizes, program)
        return known

    def _dtype(self, dtype: str) -> bytes:
        key = "torch", dtype
        return self._known.get(key) or self._remember(key, op.named(*key))

    def _remember(self, key: object, program: bytes) -> bytes:
        number = len(_CLASSES) + len(self._known)
        self._known[key] = op.get(number)
        return program + op.put(number)
