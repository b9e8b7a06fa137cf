"""Keeps checkpoints in a directory of a POSIX file system.

`PosixStorage` changes the disk only through the calls of `Disk`, so that a test can number them, make
each of them fail, or die in its place. Names are relative to an open directory: a directory that is
replaced by a symbolic link meanwhile leads nowhere.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal

from holdfast.checkpoint.state.layout import BLOCK_BYTES
from holdfast.checkpoint.storage.backends import (
    Buffer,
    Reader,
    StorageEntry,
    aside_name,
    partial_name,
)
from holdfast.errors import NotThere, StorageError

_VECTORS: Final = 1000
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class PosixStorage:
    def __init__(self, root: str | os.PathLike[str], disk: Disk | None = None) -> None:
        self._root = Path(root).absolute()
        self._disk = disk or Disk()

    def where(self, path: str) -> str:
        return str(self._root / path)

    def write(self, path: str, pieces: Iterable[Buffer]) -> int:
        with (
            as_storage_errors(self.where(path), "written"),
            self._parent_of(path) as (parent, name),
        ):
            with self._partial(name, parent, pieces) as (partial, size):
                self._disk.rename(partial, name, parent)
            self._disk.sync_directory(parent)
            return size

    def publish(self, path: str, data: bytes) -> bool:
        with (
            as_storage_errors(self.where(path), "published"),
            self._parent_of(path) as (parent, name),
        ):
            try:
                with self._partial(name, parent, [data]) as (partial, _):
                    self._disk.link(partial, name, parent)
                    self._disk.unlink(partial, parent)
            except FileExistsError:
                return False
            except FileNotFoundError:
                # The writer that published first may have tidied up this one's partial file.
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
        """Publish without hard links. A crash leaves a torn manifest, which its digest shows."""
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
        """Write a durable file under a temporary name, removed again if the caller raises."""
        partial = partial_name(name)
        with ExitStack() as undo:
            undo.callback(self._forget, partial, parent)
            yield partial, self._write_new(partial, parent, pieces)
            undo.pop_all()

    def _forget(self, partial: str, parent: int) -> None:
        with suppress(OSError):  # Its name marks it as partial; the next commit removes it.
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
        with as_storage_errors(self.where(path), "read"):
            fd = os.open(self._root / path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield _PosixReader(self.where(path), fd)
        finally:
            os.close(fd)

    def entries(self, directory: str) -> list[StorageEntry]:
        with as_storage_errors(self.where(directory), "listed"):
            try:
                with os.scandir(self._root / directory) as found:
                    return sorted(StorageEntry(one.name, _kind(one)) for one in found)
            except FileNotFoundError:
                return []

    def remove(self, directory: str, files: Iterable[str]) -> None:
        with (
            as_storage_errors(self.where(directory), "tidied"),
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
        with as_storage_errors(str(path), "made"):
            for one in [*reversed(list(lacking)), self._root, path]:
                self._make(one)

    def _make(self, path: Path) -> None:
        """Make a directory durable, even if another process created it and died before its fsync."""
        try:
            with _opened(path.parent) as parent:
                if not path.is_dir():
                    with suppress(FileExistsError):
                        self._disk.make_directory(path.name, parent)
                self._disk.sync_directory(parent)
        except OSError as error:
            # Directories above the root may not be ours to change; that is fine if they exist.
            if error.errno not in (errno.EACCES, errno.EROFS) or not path.is_dir():
                raise

    def remove_directory(self, directory: str) -> bool:
        with as_storage_errors(self.where(directory), "removed"), self._directory("") as root:
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
        with (
            as_storage_errors(self.where(path), "set aside"),
            self._parent_of(path) as (parent, name),
        ):
            new = aside_name(name, why, set(os.listdir(parent)))
            self._disk.rename(name, new, parent)
            self._disk.sync_directory(parent)
            return path.removesuffix(name) + new

    @contextmanager
    def _parent_of(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the directory of a file; yield it with the file's name."""
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
        with as_storage_errors(self._where, "read"):
            for first in range(0, len(views), _VECTORS):
                at = self._fill(at, views[first : first + _VECTORS])

    def _fill(self, at: int, views: Sequence[memoryview]) -> int:
        """Fill some views; return the offset of the next ones."""
        got = os.preadv(self._fd, views, at)
        for view in views:
            # The kernel may return less than requested; the rest is read view by view.
            while got < len(view):
                more = os.preadv(self._fd, [view[got:]], at + got)
                if more == 0:
                    raise StorageError(f"{self._where}: is cut off at byte {at + got}")
                got += more
            at, got = at + len(view), got - len(view)
        return at


# ---- system calls --------------------------------------------------------------------------------

_BEHIND: Final = 8 * BLOCK_BYTES

_ADVICE: Final = {
    errno.ENOSPC: "free some space, keep fewer checkpoints, or save elsewhere",
    errno.EDQUOT: "the quota is used up: keep fewer checkpoints, or save elsewhere",
    errno.EIO: "the device failed; see `dmesg`, and save elsewhere",
    errno.EROFS: "it is mounted read-only, often after a fault of the device; see `dmesg`",
    errno.EACCES: "give this user the right to write there, or save elsewhere",
    errno.EPERM: "give this user the right to write there, or save elsewhere",
    errno.ETIMEDOUT: "the storage does not answer; check its server and the network",
    errno.ESTALE: "the network mount is stale; mount it again",
    errno.ENOTDIR: "a file is where a directory should be; move it away, or save elsewhere",
    errno.ELOOP: "a link is where a directory should be; it is not followed",
    errno.EMFILE: "too many files are open; raise `ulimit -n`",
}

_READING: Final = ("read", "listed")
_ADVICE_ON_READING: Final = {
    errno.EACCES: "give this user the right to read it, and to enter the directories above it",
    errno.EPERM: "give this user the right to read it, and to enter the directories above it",
    errno.EIO: "the device failed; see `dmesg`",
    errno.ENOTDIR: "a file is where a directory should be; check the path",
}


def storage_error(where: str, doing: str, error: OSError) -> StorageError:
    """Describe the failure of a system call, with advice."""
    if isinstance(error, FileNotFoundError):
        return NotThere(f"{where}: cannot be {doing}: it does not exist")
    known = _ADVICE | _ADVICE_ON_READING if doing in _READING else _ADVICE
    code = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno or 0
    advice = known.get(code, "check the storage, and try again")
    what = error.strerror or str(error) or os.strerror(code)
    return StorageError(f"{where}: cannot be {doing}: {what}; {advice}")


@contextmanager
def as_storage_errors(where: str, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(where, doing, error) from error


class Disk:
    def create(self, name: str, directory: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o666, dir_fd=directory)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def settle(self, fd: int, end: int) -> None:
        """Have the kernel start writeback up to `end` and drop the pages from its cache: training has
        more use for the memory."""
        start = max(0, end - _BEHIND)
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_directory(self, directory: int) -> None:
        try:
            os.fsync(directory)
        except OSError as error:
            # Some network file systems cannot, and need not: their names are durable at once.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise

    def rename(self, old: str, new: str, directory: int) -> None:
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def link(self, old: str, new: str, directory: int) -> None:
        os.link(old, new, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)

    def unlink(self, name: str, directory: int) -> None:
        os.unlink(name, dir_fd=directory)

    def make_directory(self, name: str, parent: int) -> None:
        os.mkdir(name, dir_fd=parent)

    def remove_directory(self, name: str, parent: int) -> None:
        os.rmdir(name, dir_fd=parent)
