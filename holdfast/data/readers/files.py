"""Finds the files of a data set, and reads byte ranges of them.

A reader knows each file as it was when it was indexed: path, size and time of change. A file that is
different when it is opened or read later is an error that names it, because record numbers of the index
would then lead to other records. Reads carry their own offset (pread), so that processes that share a
file descriptor do not move each other's position.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

from holdfast.errors import DataError

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A file, a folder, a pattern or a URL that fsspec knows, or several of them."""

COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
"""First bytes of files that have to be decompressed from their beginning."""


class DataFile(Struct, frozen=True):
    """A file as it was when it was indexed."""

    path: str
    size: int
    stamp: str
    """Time of change, or what a remote store has in its place; empty if it has nothing."""

    def changed(self, now: DataFile) -> DataError | None:
        """Compare with the file's state now; an error for the reader's user if it is different."""
        if now.size == self.size and now.stamp == self.stamp:
            return None
        size = f"{self.size} to {now.size} bytes" if now.size != self.size else "same size"
        change = "shrank" if now.size < self.size else "grew" if now.size > self.size else "changed"
        return DataError(
            f"{self.path} {change} since its records were counted ({size}): record numbers no longer"
            f" lead to the same records. Restore the file, or build a new reader and start a new epoch"
        )


# ---- finding ------------------------------------------------------------------------------------


def find_files(paths: Paths, suffixes: tuple[str, ...]) -> list[DataFile]:
    """List the files that paths name, sorted; of a folder those with one of the suffixes."""
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found = sorted(file for path in named for file in _expand(os.fspath(path), suffixes))
    for first, second in pairwise(found):
        if first == second:
            raise DataError(f"{first} is named twice: name each file of a data set once")
    if not found:
        raise DataError(f"no files at {', '.join(map(str, named)) or 'an empty list of paths'}")
    return [state_of(path) for path in found]


def is_remote(path: str) -> bool:
    return "://" in path


def _expand(path: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    if is_remote(path):
        yield from _expand_remote(path, suffixes)
    elif os.path.isdir(path):
        yield from _within(Path(path), suffixes)
    elif glob.has_magic(path) and not os.path.exists(path):
        matches = [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
        if not matches:
            raise DataError(f"no file matches {path}")
        yield from map(os.path.abspath, matches)
    else:
        yield os.path.abspath(path)


def _within(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """List a folder's files at any depth; names that begin with "." or "_" are not data."""
    found = []
    for root, folders, names in os.walk(folder.absolute()):
        folders[:] = [name for name in folders if name[0] not in "._"]
        found += [os.path.join(root, n) for n in names if n[0] not in "._" and n.endswith(suffixes)]
    if not found:
        raise DataError(f"no {' or '.join(suffixes)} files in {folder}")
    return found


def _expand_remote(url: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    fs, path = _file_system(url)
    if glob.has_magic(path):
        matches = [match for match in fs.glob(path) if fs.isfile(match)]
    elif fs.isdir(path):
        names = {found: os.path.basename(found) for found in fs.find(path)}
        matches = [
            f for f, name in names.items() if name[0] not in "._" and name.endswith(suffixes)
        ]
    else:
        matches = [path]
    if not matches:
        raise DataError(f"no file matches {url}")
    yield from (fs.unstrip_protocol(match) for match in matches)


def _file_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise DataError(
            f"{url} needs fsspec: pip install fsspec, and its library for the store"
        ) from error
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"fsspec cannot open {url}: {error}") from error
    return fs, path


# ---- reading ------------------------------------------------------------------------------------


def state_of(path: str) -> DataFile:
    """Look at a file's size and time of change."""
    try:
        if not is_remote(path):
            status = os.stat(path)
            return DataFile(path, status.st_size, str(status.st_mtime_ns))
        fs, within = _file_system(path)
        fs.invalidate_cache()
        info = fs.info(within)
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is not there: restore it, or build the reader without it"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    stamps = (
        info.get(name) for name in ("ETag", "etag", "LastModified", "mtime", "updated", "created")
    )
    return DataFile(path, int(info["size"]), str(next((s for s in stamps if s is not None), "")))


class LocalFile:
    """A file of this machine, open in one process."""

    def __init__(self, file: DataFile) -> None:
        self.file = file
        self._fd = -1
        try:
            self._fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            state_of(file.path)
            raise DataError(f"{file.path} cannot be read: {error}") from error
        self._changed_at = int(file.stamp)
        self.check()

    def check(self) -> None:
        """Raise if the file is no longer the one that was indexed."""
        status = os.fstat(self._fd)
        if status.st_mtime_ns != self._changed_at or status.st_size != self.file.size:
            now = DataFile(self.file.path, status.st_size, str(status.st_mtime_ns))
            if error := self.file.changed(now):
                raise error

    def read(self, start: int, stop: int) -> bytes:
        """Read the bytes from start to stop; shorter only if the file shrank meanwhile."""
        try:
            data = os.pread(self._fd, stop - start, start)
            if len(data) == stop - start:
                return data
            while len(data) < stop - start:
                more = os.pread(self._fd, stop - start - len(data), start + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise DataError(f"{self.file.path}, bytes {start} to {stop}: {error}") from error
        return data

    def stream(self) -> IO[bytes]:
        """Open the file once more, for a library that wants a file object."""
        return open(self.file.path, "rb")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


class RemoteFile:
    """A file that fsspec reads. Its size and stamp are compared when it is opened, not at each read."""

    def __init__(self, file: DataFile) -> None:
        self.file = file
        if error := file.changed(state_of(file.path)):
            raise error
        self._fs, self._path = _file_system(file.path)

    def check(self) -> None:
        pass

    def read(self, start: int, stop: int) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._path, start=start, end=stop))
        except OSError as error:
            raise DataError(f"{self.file.path}, bytes {start} to {stop}: {error}") from error

    def stream(self) -> IO[bytes]:
        opened: IO[bytes] = self._fs.open(self._path, "rb")
        return opened

    def close(self) -> None:
        pass


OpenFile = LocalFile | RemoteFile


def open_file(file: DataFile) -> OpenFile:
    return RemoteFile(file) if is_remote(file.path) else LocalFile(file)


def read_all_of(opened: OpenFile, start: int, stop: int) -> bytes:
    """Read the bytes from start to stop, or raise if the file has fewer."""
    data = opened.read(start, stop)
    if len(data) < stop - start:
        raise DataError(
            f"{opened.file.path} ends at byte {start + len(data)}, within bytes {start} to {stop} that"
            f" were there when it was indexed: restore the file"
        )
    return data


def refuse_compressed(opened: OpenFile) -> None:
    """Raise for a file that would have to be decompressed from its beginning for each record."""
    head = opened.read(0, min(8, opened.file.size))
    for magic, name in COMPRESSED.items():
        if head.startswith(magic):
            raise DataError(
                f"{opened.file.path} is compressed ({name}), so that no record can be read without all"
                f" before it: decompress it, or convert it to Parquet"
            )
