"""Where checkpoints are kept: the few operations they need, each safe to die in.

A file appears under its name only when all of it is durable. `publish` creates one that was not there
before, whole or not at all, and never replaces: of two that try, one is told that it came second. So
whoever sees a manifest may trust that what it names was written, whatever became of the writer.

On a disk that is a temporary name in the same directory, fsync, rename (or link, to publish), fsync of
the directory. In an object store it is a multipart upload, which is visible only once it is complete,
and a conditional put.

Paths are relative to the storage's root: `name` or `directory/name`. There is no operation that
removes a directory with anything in it, and none follows a link out of the root to change something.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from holdfast.checkpoint.storage import names
from holdfast.checkpoint.storage.disk import Disk, told
from holdfast.errors import StorageError

Buffer = bytes | memoryview


class Entry(NamedTuple):
    name: str
    kind: Literal["file", "directory", "other"]
    """A link is "other", wherever it leads."""


class Reader(Protocol):
    size: int

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        """Fill the views, one after the other, from that byte on; an error when there is less."""


class Readable(Protocol):
    def where(self, path: str) -> str:
        """The path as a person would write it."""

    def open(self, path: str) -> AbstractContextManager[Reader]: ...

    def entries(self, directory: str) -> list[Entry]:
        """What is in a directory, by name; nothing when there is no such directory."""


class Storage(Readable, Protocol):
    def write(self, path: str, pieces: Iterable[Buffer]) -> int:
        """Write a file; its size. It replaces what had that name."""

    def publish(self, path: str, data: bytes) -> bool:
        """Create a file; False, and nothing has changed, when there is one of that name."""

    def remove(self, directory: str, files: Iterable[str]) -> None:
        """Remove files, for good when this returns; those that are gone already are no error."""

    def make_directory(self, directory: str) -> None: ...

    def remove_directory(self, directory: str) -> bool:
        """Remove a directory if it is empty; whether it is gone."""

    def set_aside(self, path: str, why: str) -> str:
        """Give a file the name `<path>.<why>`, or one with a number after it; its new path."""


def open_storage(where: str | os.PathLike[str]) -> Storage:
    """A directory, or what a URL like `s3://bucket/prefix` names."""
    text = os.fspath(where)
    if text.startswith("file://"):
        return PosixStorage(text.removeprefix("file://"))
    if "://" not in text:
        return PosixStorage(text)
    from holdfast.checkpoint.storage.remote import connect

    return connect(text)


def read_whole(storage: Readable, path: str, most_bytes: int) -> bytes:
    """A small file."""
    with storage.open(path) as file:
        if file.size > most_bytes:
            raise StorageError(f"{storage.where(path)}: {file.size} bytes are too many for it")
        data = bytearray(file.size)
        file.read_into(0, [memoryview(data)])
        return bytes(data)


_VECTORS: Final = 1000
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class PosixStorage:
    def __init__(self, root: str | os.PathLike[str], disk: Disk | None = None) -> None:
        self._root = Path(root).absolute()
        self._disk = disk or Disk()

    def where(self, path: str) -> str:
        return str(self._root / path)

    def write(self, path: str, pieces: Iterable[Buffer]) -> int:
        with told(self.where(path), "written"), self._parent_of(path) as (parent, name):
            with self._partial(name, parent, pieces) as (partial, size):
                self._disk.rename(partial, name, parent)
            self._disk.sync_directory(parent)
            return size

    def publish(self, path: str, data: bytes) -> bool:
        with told(self.where(path), "published"), self._parent_of(path) as (parent, name):
            try:
                with self._partial(name, parent, [data]) as (partial, _):
                    self._disk.link(partial, name, parent)
                    self._disk.unlink(partial, parent)
            except FileExistsError:
                return False
            except FileNotFoundError:
                # Whoever published first may tidy up what others had begun.
                if name in os.listdir(parent):
                    return False
                raise
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._publish_without_link(name, parent, data)
            self._disk.sync_directory(parent)
            return True

    def _publish_without_link(self, name: str, parent: int, data: bytes) -> bool:
        """Where there are no links. A death in the middle leaves half a manifest; its digest tells."""
        try:
            self._write_new(name, parent, [data])
        except FileExistsError:
            return False
        self._disk.sync_directory(parent)
        return True

    @contextmanager
    def _partial(
        self, name: str, parent: int, pieces: Iterable[Buffer]
    ) -> Iterator[tuple[str, int]]:
        """A new file under a temporary name, durable; gone if it is not used in the end."""
        partial = names.partial(name)
        with ExitStack() as undo:
            undo.callback(self._forget, partial, parent)
            yield partial, self._write_new(partial, parent, pieces)
            undo.pop_all()

    def _forget(self, partial: str, parent: int) -> None:
        with suppress(OSError):  # Its name says what it is; whoever tidies up next removes it.
            self._disk.unlink(partial, parent)

    def _write_new(self, name: str, parent: int, pieces: Iterable[Buffer]) -> int:
        size = 0
        fd = self._disk.create(name, parent)
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    written = self._disk.write(fd, rest)
                    size, rest = size + written, rest[written:]
                self._disk.settle(fd, size)
            self._disk.sync(fd)
        finally:
            os.close(fd)
        return size

    @contextmanager
    def open(self, path: str) -> Iterator[Reader]:
        with told(self.where(path), "read"):
            fd = os.open(self._root / path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield _PosixReader(self.where(path), fd)
        finally:
            os.close(fd)

    def entries(self, directory: str) -> list[Entry]:
        with told(self.where(directory), "listed"):
            try:
                with os.scandir(self._root / directory) as found:
                    return sorted(Entry(one.name, _kind(one)) for one in found)
            except FileNotFoundError:
                return []

    def remove(self, directory: str, files: Iterable[str]) -> None:
        with (
            told(self.where(directory), "tidied"),
            suppress(FileNotFoundError),
            self._directory(directory) as parent,
        ):
            for name in files:
                with suppress(FileNotFoundError):
                    self._disk.unlink(name, parent)
            self._disk.sync_directory(parent)

    def make_directory(self, directory: str) -> None:
        path = self._root / directory
        lacking = takewhile(lambda above: not above.exists(), self._root.parents)
        with told(str(path), "made"):
            for one in [*reversed(list(lacking)), self._root, path]:
                self._make(one)

    def _make(self, path: Path) -> None:
        """Make a directory durable, whether it is new or somebody made it and died before it was."""
        try:
            with _opened(path.parent) as parent:
                if not path.is_dir():
                    with suppress(FileExistsError):
                        self._disk.make_directory(path.name, parent)
                self._disk.sync_directory(parent)
        except OSError as error:
            # What lies above the root may be closed to us; if the root was there before, so be it.
            if error.errno not in (errno.EACCES, errno.EROFS) or not path.is_dir():
                raise

    def remove_directory(self, directory: str) -> bool:
        with told(self.where(directory), "removed"), self._directory("") as root:
            try:
                self._disk.remove_directory(directory, root)
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    return False
                raise
            self._disk.sync_directory(root)
            return True

    def set_aside(self, path: str, why: str) -> str:
        with told(self.where(path), "set aside"), self._parent_of(path) as (parent, name):
            new = names.aside(name, why, set(os.listdir(parent)))
            self._disk.rename(name, new, parent)
            self._disk.sync_directory(parent)
            return path.removesuffix(name) + new

    @contextmanager
    def _parent_of(self, path: str) -> Iterator[tuple[int, str]]:
        """The open directory that a file is in, and the file's name there."""
        directory, _, name = path.rpartition("/")
        with self._directory(directory) as parent:
            yield parent, name

    def _directory(self, directory: str) -> AbstractContextManager[int]:
        return _opened(self._root / directory, os.O_NOFOLLOW if directory else 0)


@contextmanager
def _opened(directory: Path, flags: int = 0) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _kind(entry: os.DirEntry[str]) -> Literal["file", "directory", "other"]:
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


class _PosixReader:
    def __init__(self, where: str, fd: int) -> None:
        self._where = where
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        with told(self._where, "read"):
            for first in range(0, len(views), _VECTORS):
                at = self._fill(at, views[first : first + _VECTORS])

    def _fill(self, at: int, views: Sequence[memoryview]) -> int:
        """Fill some views; where the next ones begin."""
        got = os.preadv(self._fd, views, at)
        for view in views:
            # The kernel may give less than asked for; what is then left is read view by view.
            while got < len(view):
                more = os.preadv(self._fd, [view[got:]], at + got)
                if more == 0:
                    raise StorageError(f"{self._where}: ends at byte {at + got}, before it should")
                got += more
            at, got = at + len(view), got - len(view)
        return at
