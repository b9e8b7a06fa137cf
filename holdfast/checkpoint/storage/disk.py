"""The calls that change what is on a disk, each in one place, and what their failure means.

`PosixStorage` is made of these and of nothing else, so a test can number them, have each of them
fail, or die in its place. Names are relative to an open directory: a directory that is replaced by a
link to somewhere else, while we work in it, leads nowhere.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.checkpoint.state.layout import BLOCK_BYTES
from holdfast.errors import NotThere, StorageError

_BEHIND: Final = 8 * BLOCK_BYTES

_ADVICE: Final = {
    errno.ENOSPC: "free some space, keep fewer checkpoints, or save elsewhere",
    errno.EDQUOT: "the quota is used up: keep fewer checkpoints, or save elsewhere",
    errno.EIO: "the device failed; see `dmesg`, and save elsewhere",
    errno.EROFS: "it is mounted read-only, often after a fault of the device; see `dmesg`",
    errno.EACCES: "give this user the right to write there, or save elsewhere",
    errno.EPERM: "give this user the right to write there, or save elsewhere",
    errno.ESTALE: "the network mount is stale; mount it again",
    errno.ENOTDIR: "a file is where a directory should be; move it away, or save elsewhere",
    errno.ELOOP: "a link is where a directory should be; it is not followed",
    errno.EMFILE: "too many files are open; raise `ulimit -n`",
}


def storage_error(where: str, doing: str, error: OSError) -> StorageError:
    """The failure of a call, told to whoever has to do something about it."""
    if isinstance(error, FileNotFoundError):
        return NotThere(f"{where}: cannot be {doing}: it is not there")
    advice = _ADVICE.get(error.errno or 0, "see whether the storage is well, and try again")
    return StorageError(f"{where}: cannot be {doing}: {error.strerror or error}; {advice}")


@contextmanager
def told(where: str, doing: str) -> Iterator[None]:
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
        """Have the kernel begin to write out what was written up to there, and then forget it: the
        pages are of more use to whoever trains here."""
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
