"""Reads tar files in which a sample is several members in a row, as WebDataset lays them out.

`shard/000.jpg` and `shard/000.cls` are one sample: the key is a member's name up to the first dot of
its last part, the field is what follows. The index keeps the offset of each sample; the members of one
are read in one piece.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.data.readers.byte_reader import ByteReader
from holdfast.data.readers.files import (
    OpenFile,
    Paths,
    read_all_of,
)
from holdfast.data.readers.index import Block, FileBlocks
from holdfast.data.readers.progress import IndexProgress
from holdfast.errors import DataError

_KEY_AND_FIELD = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)

BLOCK = tarfile.BLOCKSIZE

Decoder = Callable[[bytes], Any]


def _numpy_array(data: bytes) -> Any:
    import numpy

    return numpy.load(io.BytesIO(data), allow_pickle=False)


TAR_DECODERS: Mapping[str, Decoder] = {
    "json": json.loads,
    "txt": bytes.decode,
    "text": bytes.decode,
    "cls": int,
    "npy": _numpy_array,
}
"""Decoders for common extensions. None of them unpickles."""


class TarReader(ByteReader[bytes]):
    """Samples of tar files: dicts of `__key__` and each field's bytes.

    `decoders` turns bytes into values by extension, the last part of a field's name: `TAR_DECODERS` has
    the common ones.
    """

    SUFFIXES = (".tar",)

    def __init__(
        self,
        paths: Paths,
        *,
        decoders: Mapping[str, Decoder] | None = None,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        self._decoders = dict(decoders or {})
        super().__init__(paths, index=index, blocks=0)

    def _find_blocks(self, opened: OpenFile, progress: IndexProgress) -> FileBlocks:
        places = array("Q")
        key = None
        end = 0
        for member, following in _members(opened, progress):
            end = following
            named = _key_and_field(member.name) if member.isreg() else None
            if named is not None and named[0] != key:
                key = named[0]
                places.append(member.offset)
        opened.check()
        return FileBlocks(places, array("Q", range(len(places))), len(places), end)

    def _load(self, handle: OpenFile, block: Block) -> bytes:
        handle.check()
        return read_all_of(handle, block.place, block.stop)

    def _decode(self, loaded: bytes, block: Block, rows: Sequence[int]) -> list[Any]:
        sample = self._sample(loaded, block)
        return [sample, *(self._sample(loaded, block) for _ in rows[1:])]

    def _sample(self, loaded: bytes, block: Block) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        for name, start, stop in self._fields(loaded, block):
            if named := _key_and_field(name):
                sample.setdefault("__key__", named[0])
                self._add(sample, named[1], loaded[start:stop], block)
        return sample

    def _fields(self, loaded: bytes, block: Block) -> list[tuple[str, int, int]]:
        """Find the regular files of a sample: names, and where their bytes are in it."""
        plain = _plain_files(loaded)
        if plain is not None:
            return plain
        try:
            with tarfile.open(fileobj=io.BytesIO(loaded), mode="r:") as archive:
                members = archive.getmembers()
                whole = archive.offset == len(loaded)
        except (tarfile.TarError, OSError) as error:
            raise self._corrupt(block, error) from error
        if not whole:
            # `tarfile` takes a broken header for the end of the archive.
            raise self._corrupt(block, "a member's header is broken")
        return [(m.name, m.offset_data, m.offset_data + m.size) for m in members if m.isreg()]

    def _add(self, sample: dict[str, Any], field: str, data: bytes, block: Block) -> None:
        if field in sample:
            why = f"sample {sample['__key__']} has two fields {field}. Rename one"
            raise self._broken(block, why)
        decode = self._decoders.get(field.rpartition(".")[2])
        try:
            sample[field] = data if decode is None else decode(data)
        except Exception as error:
            # A decoder is the user's code, and may raise anything.
            why = f"sample {sample['__key__']}, field {field}: {type(error).__name__}: {error}"
            raise self._broken(block, f"{why}. Repair the field, or its decoder") from error

    def _broken(self, block: Block, why: str) -> DataError:
        return DataError(
            f"{self._file_of(block).path}, {self._place(block)}, {self._range(block)}: {why}"
        )


def _key_and_field(name: str) -> tuple[str, str] | None:
    """Split a file's name; None if it is no part of a sample."""
    match = _KEY_AND_FIELD.fullmatch(name)
    return (match[1], match[2].lower()) if match else None


def _plain_files(data: bytes) -> list[tuple[str, int, int]] | None:
    """Find regular files with short names, which need no more than their own header.

    Several times as fast as `tarfile`, which has to be asked if the answer is None: there is a longer
    name, a folder, a link, or something broken.
    """
    found = []
    at = 0
    try:
        while at < len(data):
            header = data[at : at + BLOCK]
            checksum = sum(header) + 8 * ord(" ") - sum(header[148:156])
            size = _octal(header[124:136])
            if header[156:157] not in b"0\0" or checksum != _octal(header[148:156]) or size < 0:
                return None
            name = header[:100].partition(b"\0")[0]
            prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
            path = (prefix + b"/" + name if prefix else name).decode()
            found.append((path, at + BLOCK, at + BLOCK + size))
            at += BLOCK + (size + BLOCK - 1) // BLOCK * BLOCK
    except ValueError:
        return None
    return found if at == len(data) else None


def _octal(digits: bytes) -> int:
    return int(digits.strip(b" \0"), 8)


def _members(opened: OpenFile, progress: IndexProgress) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Go through an archive's members, each with the offset of what follows it; check its end."""
    path = opened.file.path
    if not opened.file.size:
        raise DataError(f"{path} is empty, not a tar file. Write it again, or leave it out")
    at = begin = 0
    try:
        with opened.stream() as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            while (member := archive.next()) is not None:
                # The list of all members would grow with the archive.
                archive.members = []  # type: ignore[attr-defined]
                progress.advance(archive.offset - at)
                begin, at = member.offset, archive.offset
                yield member, at
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"{path}, bytes {begin} to {opened.file.size}: {error}. Write the file again, or leave it"
            f" out"
        ) from error
    _check_end(opened, at)


def _check_end(opened: OpenFile, at: int) -> None:
    """Raise unless an archive ends with zeros: `tarfile` takes a broken header for the end."""
    path, size = opened.file.path, opened.file.size
    if at >= size:
        raise DataError(
            f"{path} ends at byte {size} without an end-of-archive mark: it was cut off. Write it again"
        )
    while at < size:
        stop = min(at + (1 << 20), size)
        if opened.read(at, stop).strip(b"\0"):
            raise DataError(
                f"{path}: bytes {at} to {stop} are neither a member nor the end of the archive. It is"
                f" corrupt there, or several archives in one file: write it again"
            )
        at = stop
