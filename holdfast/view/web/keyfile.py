"""Keeps the key from which the tokens and cookies of `holdfast web` are made.

The key outlives the server, so that links stay good and an open page comes back by itself after a
restart. It is in a file of the Holdfast home that only this user can read. A file that others could
have read or written is refused; one that is damaged is replaced. Servers of one home share the key, and
notice when one of them was told to make a new one. Where no such file can be kept (a home that is
read-only, or on a file system that changes owners or modes) the key is of this run alone.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.errors import UsageError
from holdfast.jobhome import make_private_directory

FILE: Final = "web.key"
SIZE_BYTES: Final = 32
RENEW: Final = "`holdfast web --new-tokens` makes new ones"


class FileStamp(NamedTuple):
    """Identity of one content of the file."""

    inode: int
    changed_ns: int


class KeptKey(NamedTuple):
    """What the file holds; the key is None if it is damaged."""

    key: bytes | None
    stamp: FileStamp


class WebKey:
    """A key, and the file that keeps it."""

    def __init__(self, path: Path | None, renew: bool = False) -> None:
        """Read the key, or make one; `renew` makes a new one in any case.

        Without a path the key is of this run alone."""
        self._path = path
        self._key = secrets.token_bytes(SIZE_BYTES)
        self._stamp: FileStamp | None = None
        self.notice: str | None = None
        """What the user should know about the key; None if it is kept as it was."""
        if path is not None:
            self._renew(path) if renew else self._open(path)

    def current(self) -> bytes:
        """The key that is good now: another server of this home may have made a new one."""
        if self._stamp is None or self._path is None:
            return self._key
        with suppress(OSError, UsageError):  # A file that is no good now ends no session.
            if _stamp(os.lstat(self._path)) != self._stamp:
                self._take(_read(self._path))
        return self._key

    def _open(self, path: Path) -> None:
        try:
            kept = self._read_or_create(path)
            if kept.key is None:
                self.notice = (
                    f"{path} was damaged and is replaced: links of earlier runs have ended"
                )
                kept = self._replace(path)
        except OSError as error:
            self.notice = (
                f"the links are of this run alone: {path} cannot be kept"
                f" ({error.strerror or error}); after a restart, open pages need the new link"
            )
            return
        self._take(kept)

    def _renew(self, path: Path) -> None:
        try:
            self._take(self._replace(path))
        except OSError as error:
            raise UsageError(
                f"{path} cannot be replaced ({error.strerror or error}), so links of earlier runs"
                " stay good; remove it, or set HOLDFAST_HOME to another directory"
            ) from None

    def _take(self, kept: KeptKey) -> None:
        if kept.key is not None:
            self._key, self._stamp = kept.key, kept.stamp

    def _read_or_create(self, path: Path) -> KeptKey:
        with suppress(FileNotFoundError):
            return _read(path)
        make_private_directory(path.parent)
        new = _write_beside(path, self._key)
        try:
            with suppress(FileExistsError):  # Another server was first: its key counts.
                os.link(new, path)
        finally:
            os.unlink(new)
        return _read(path)

    def _replace(self, path: Path) -> KeptKey:
        """Replace the file by one with this key; return what it holds then: that of another server
        which did the same at this moment counts if it came later."""
        make_private_directory(path.parent)
        new = _write_beside(path, self._key)
        try:
            os.replace(new, path)
        except OSError:
            os.unlink(new)
            raise
        return _read(path)


def _read(path: Path) -> KeptKey:
    """Read the file. One that others may have read or written is a UsageError."""
    try:
        # Neither a link nor a pipe is opened: either may lead to another user.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO):
            raise UsageError(_not_trusted(path, f"cannot be opened ({error.strerror})")) from None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(_not_trusted(path, "is no plain file"))
        if found.st_uid != os.geteuid():
            raise UsageError(_not_trusted(path, f"is of another user (uid {found.st_uid})"))
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise UsageError(_not_trusted(path, f"is open to other users (mode {mode:04o})"))
        content = os.read(fd, 4 * SIZE_BYTES)
    finally:
        os.close(fd)
    return KeptKey(_decoded(content), _stamp(found))


def _decoded(content: bytes) -> bytes | None:
    try:
        key = bytes.fromhex(content.decode("ascii"))
    except ValueError:
        return None
    return key if len(key) == SIZE_BYTES else None


def _not_trusted(path: Path, why: str) -> str:
    return f"{path} {why}: its links may be known to others; {RENEW}"


def _write_beside(path: Path, key: bytes) -> Path:
    """Write a new file in the same directory; its name is nobody else's."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, key.hex().encode() + b"\n")
        os.fsync(fd)
        kept = os.fstat(fd)
        if kept.st_uid != os.geteuid() or kept.st_mode & 0o077:
            raise OSError(errno.ENOTSUP, "its file system does not keep owners and modes")
    except OSError:
        os.unlink(new)
        raise
    finally:
        os.close(fd)
    return new


def _stamp(found: os.stat_result) -> FileStamp:
    return FileStamp(found.st_ino, found.st_mtime_ns)
