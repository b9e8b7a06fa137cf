"""Finds out at which step a script resumed, from the files that it reads before its first step.

An optimizer without a count of its own (plain SGD) does not tell how many steps earlier processes took,
and a script need not tell either. But it has to read what it resumes from, and that was written since
the job began. So every file that a rank saves is noted with its step, in a registry that outlives the
process; and a process of a later round notes which young files it reads:

    a file from the registry    the script resumed at that step
    another young file          it may have resumed anywhere
    none                        it began at 0, as far as this process can see: rank 0 may have read
                                what all ranks resume from

What is older than the job was there for its first process too, and says nothing. In the first round
nothing can have been saved, so nothing is observed.

A file is known by its inode, size and time of last change, so that a script may write it under another
name first. Reads are observed with an audit hook, which is told of each file that Python opens. It can
never be removed again: after the first step it returns at once.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from holdfast.messages.records import Resumed

NOT_STATE: Final = (".py", ".pyc", ".so")
NOT_STORAGE: Final = ("/proc/", "/sys/", "/dev/")
SKEW_S: Final = 60.0
"""Tolerated clock skew between the job and its storage."""
MOST_READ: Final = 10_000
"""Young files that are remembered; a process that reads more of them is not understood."""
CLOSES_NS: Final = 10_000_000_000
"""A file that was still open when it was noted is closed within this time."""
REGISTRY_BYTES: Final = 1 << 20
"""Size from which the registry loses its older half."""


class FileKey(NamedTuple):
    """What a file keeps when it is renamed, and loses when it is written again."""

    device: int
    inode: int
    size_bytes: int
    changed_ns: int


class SavedFile(NamedTuple):
    """A file that a rank saved."""

    key: FileKey
    step: int
    exact: bool
    """Whether the step is certain."""
    closed: bool
    """Whether it was complete when it was noted."""

    def is_that(self, key: FileKey) -> bool:
        if self.closed or self.key[:2] != key[:2]:
            return self.key == key
        since_ns = key.changed_ns - self.key.changed_ns
        return 0 <= since_ns <= CLOSES_NS and key.size_bytes >= self.key.size_bytes


def key_of(found: os.stat_result) -> FileKey:
    return FileKey(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class Registry:
    """The files that ranks of this node have saved: a line for each, the newest last."""

    def __init__(self, path: str) -> None:
        self._path = path

    def add(self, saved: SavedFile) -> None:
        line = " ".join(map(str, [*saved.key, saved.step, int(saved.exact), int(saved.closed)]))
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, f"{line}\n".encode())
                full = os.fstat(fd).st_size > REGISTRY_BYTES
            finally:
                os.close(fd)
            if full:
                self._forget_older_half()
        except OSError:
            pass  # Without the note, a resume from that file is at an unknown step.

    def files(self) -> dict[tuple[int, int], SavedFile]:
        """Return what was last noted of each inode."""
        return {saved.key[:2]: saved for saved in self._lines()}

    def _lines(self) -> Iterator[SavedFile]:
        try:
            with open(self._path) as file:
                lines = file.readlines()
        except OSError:
            return
        for line in lines:
            words = line.split()
            if len(words) == 7 and all(word.isdigit() for word in words):
                *key, step, exact, closed = map(int, words)
                yield SavedFile(FileKey(*key), step, bool(exact), bool(closed))

    def _forget_older_half(self) -> None:
        """Shorten the file. A note that another rank makes at this moment may be lost."""
        with open(self._path) as file:
            lines = file.readlines()
        shorter = f"{self._path}.{os.getpid()}"
        with open(shorter, "w") as file:
            file.writelines(lines[len(lines) // 2 :])
        os.replace(shorter, self._path)


class Resumption:
    """What a process saved, and what it read before its first step."""

    def __init__(self, registry: str, round: int, opened_at: float) -> None:
        self._registry = Registry(registry) if registry else None
        self._since_ns = int(max(0.0, opened_at - SKEW_S) * 1e9)
        self._later = round > 1
        self._observes = False
        self._read: set[FileKey] = set()
        self._unknown = False

    def observe(self) -> None:
        """Note from now on which files this process reads, if it may resume from one."""
        if self._later:
            self._observes = True
            os.register_at_fork(after_in_child=self._stop)
            sys.addaudithook(self._audit)

    def begin_again(self, round: int) -> None:
        """Note what is read from now on: the script's function is entered again."""
        hooked = self._later
        self._later = round > 1
        self._read.clear()
        self._unknown = False
        if hooked:
            self._observes = True
        else:
            self.observe()

    def read(self, path: Any) -> None:
        """Note that the script reads a file."""
        if not self._observes or isinstance(path, int):
            return
        name = os.fsdecode(path)
        if name.endswith(NOT_STATE) or name.startswith(NOT_STORAGE):
            return
        try:
            found = os.stat(name)
        except OSError:
            return
        if stat.S_ISREG(found.st_mode) and found.st_mtime_ns >= self._since_ns:
            self._read.add(key_of(found))
            self._unknown = self._unknown or len(self._read) > MOST_READ
            if self._unknown:
                self._read.clear()

    def read_unknown(self) -> None:
        """Note that the script loads state from something that is no file."""
        self._unknown = self._unknown or self._observes

    def saved(self, target: Any, step: int, exact: bool) -> None:
        """Note that a file, given by its path or itself, holds the state of a step."""
        if self._registry is None:
            return
        try:
            closed = isinstance(target, (str, bytes, os.PathLike))
            found = os.stat(target) if closed else os.fstat(target.fileno())
        except (OSError, AttributeError, TypeError, ValueError):
            return  # It is no file.
        if stat.S_ISREG(found.st_mode):
            self._registry.add(SavedFile(key_of(found), step, exact, closed))

    def base(self) -> tuple[int, Resumed]:
        """Return the step that the script resumed at; called at its first step."""
        self._observes = False
        return self.so_far()

    def so_far(self) -> tuple[int, Resumed]:
        """Return the step that the script resumes at, by what it has read until now."""
        files = self._registry.files() if self._registry is not None and self._read else {}
        found = [(key, files.get(key[:2])) for key in self._read]
        saved = [one for key, one in found if one is not None and one.is_that(key)]
        if saved:
            certain = all(one.exact and one.step == saved[0].step for one in saved)
            return max(one.step for one in saved), "known" if certain else "unknown"
        return 0, "unknown" if self._unknown or self._read else "none"

    def _stop(self) -> None:
        self._observes = False

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._observes and event == "open":
            try:
                path, _, flags = args
                if flags & os.O_ACCMODE != os.O_WRONLY:
                    self.read(path)
            except Exception:  # It would become the script's: anything may be given to open().
                self._unknown = True
