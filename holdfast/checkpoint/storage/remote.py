"""Keeps checkpoints in an object store, or on any file system of fsspec: `s3://bucket/prefix`, ...

An object store shows an upload only once it is complete, so a file needs no temporary name there. On
other file systems of fsspec a temporary file is renamed; how durable that is depends on them.

Publishing is a conditional put (if-none-match). Where a server does not support that, existence is
checked first; then only the coordinator, which lets no two rounds commit, keeps a step from being
committed twice.

Options (endpoint, credentials) are found where fsspec and the store's own tools look for them:
`AWS_ENDPOINT_URL`, `AWS_PROFILE`, `FSSPEC_S3_...`, fsspec's configuration files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from holdfast.checkpoint.storage.backends import (
    Buffer,
    Reader,
    StorageEntry,
    aside_name,
    partial_name,
)
from holdfast.checkpoint.storage.posix import storage_error
from holdfast.errors import HoldfastError, StorageError, UsageError

OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"})
"""Protocols with which an object is visible only when it is complete."""

PART_BYTES: Final = 64 << 20
"""S3 takes at most 10,000 parts, so this allows 640 GB a file."""

_EXTRAS: Final = {"s3": "holdfast[s3]", "s3a": "holdfast[s3]"}


def connect(url: str) -> RemoteStorage:
    protocol = url.partition("://")[0]
    package = _EXTRAS.get(protocol, "fsspec")
    try:
        import fsspec.core

        filesystem, root = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True
        )
    except ImportError as error:
        raise UsageError(f"{url}: {error}; try `pip install '{package}'`") from None
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from None
    return RemoteStorage(url, filesystem, root.rstrip("/"), protocol in OBJECT_STORES)


@contextmanager
def _as_storage_errors(where: str, doing: str) -> Iterator[None]:
    try:
        yield
    except HoldfastError:
        raise
    except OSError as error:
        raise storage_error(where, doing, error) from error
    except Exception as error:
        # The edge of fsspec's file systems, which raise anything (botocore's errors are no OSError).
        raise StorageError(
            f"{where}: cannot be {doing}: {type(error).__name__}: {error};"
            " check that the store can be reached and that the credentials are right"
        ) from error


class RemoteStorage:
    def __init__(self, url: str, filesystem: Any, root: str, appears_whole: bool) -> None:
        self._url = url.rstrip("/")
        self._fs = filesystem
        self._root = root
        self._appears_whole = appears_whole

    def where(self, path: str) -> str:
        return f"{self._url}/{path}" if path else self._url

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def write(self, path: str, pieces: Iterable[Buffer]) -> int:
        with _as_storage_errors(self.where(path), "written"):
            if self._appears_whole:
                return self._upload(self._full(path), pieces)
            directory, _, name = path.rpartition("/")
            partial = self._full(f"{directory}/{partial_name(name)}".lstrip("/"))
            with ExitStack() as undo:
                undo.callback(self._forget, partial)
                size = self._upload(partial, pieces)
                self._fs.mv(partial, self._full(path))
                undo.pop_all()
            return size

    def _upload(self, full: str, pieces: Iterable[Buffer]) -> int:
        size = 0
        file = self._fs.open(full, "wb", block_size=PART_BYTES, autocommit=False)
        with ExitStack() as undo:
            undo.callback(_give_up, file)
            for piece in pieces:
                size += file.write(piece)
            file.close()
            file.commit()
            undo.pop_all()
        return size

    def _forget(self, full: str) -> None:
        with suppress(Exception):  # The first error is the one to report.
            self._fs.rm_file(full)

    def publish(self, path: str, data: bytes) -> bool:
        full = self._full(path)
        with _as_storage_errors(self.where(path), "published"):
            if self._fs.exists(full):
                return False
            try:
                self._fs.pipe_file(full, data, mode="create")
            except OSError:
                # Stores report a failed condition in different ways; look whether the name is taken.
                if self._fs.exists(full):
                    return False
                raise
            return True

    @contextmanager
    def open(self, path: str) -> Iterator[Reader]:
        with _as_storage_errors(self.where(path), "read"):
            reader = _RemoteReader(self.where(path), self._fs, self._full(path))
        yield reader

    def entries(self, directory: str) -> list[StorageEntry]:
        full = self._full(directory)
        with _as_storage_errors(self.where(directory), "listed"):
            try:
                found = self._fs.ls(full, detail=True)
            except FileNotFoundError:
                return []
        below = full.strip("/") + "/"
        return sorted(
            StorageEntry(name.removeprefix(below), _kind(one["type"]))
            for one in found
            if (name := one["name"].strip("/")).startswith(below)
        )

    def remove(self, directory: str, files: Iterable[str]) -> None:
        with _as_storage_errors(self.where(directory), "tidied"):
            for name in files:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(self._full(f"{directory}/{name}"))

    def make_directory(self, directory: str) -> None:
        """Create a directory, except in an object store, where that could create a bucket."""
        if not self._appears_whole:
            with _as_storage_errors(self.where(directory), "made"):
                self._fs.makedirs(self._full(directory), exist_ok=True)

    def remove_directory(self, directory: str) -> bool:
        if self.entries(directory):
            return False
        if not self._appears_whole:
            with _as_storage_errors(self.where(directory), "removed"), suppress(FileNotFoundError):
                self._fs.rmdir(self._full(directory))
        return True

    def set_aside(self, path: str, why: str) -> str:
        """Rename by copying first: a crash in between leaves both, and the file still counts."""
        directory, _, name = path.rpartition("/")
        taken = {entry.name for entry in self.entries(directory)}
        new = path.removesuffix(name) + aside_name(name, why, taken)
        with _as_storage_errors(self.where(path), "set aside"):
            self._fs.cp_file(self._full(path), self._full(new))
            self._fs.rm_file(self._full(path))
        return new


def _give_up(file: Any) -> None:
    with suppress(Exception):  # The first error is the one to report.
        file.discard()
    with suppress(AttributeError):  # A buffer in memory has no such attribute.
        file.closed = True  # Else the upload is completed when the object is collected.


def _kind(kind: str) -> Any:
    return kind if kind in ("file", "directory") else "other"


class _RemoteReader:
    def __init__(self, where: str, filesystem: Any, full: str) -> None:
        self._where = where
        self._fs = filesystem
        self._full = full
        self.size = int(filesystem.info(full)["size"])

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        wanted = sum(map(len, views))
        if not wanted:
            return
        with _as_storage_errors(self._where, "read"):
            data = memoryview(self._fs.cat_file(self._full, start=at, end=at + wanted))
        if len(data) != wanted:
            raise StorageError(f"{self._where}: is cut off at byte {at + len(data)}")
        for view in views:
            view[:] = data[: len(view)]
            data = data[len(view) :]
