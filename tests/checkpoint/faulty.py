"""Disks that fail, die, and forget.

`FaultyDisk` numbers every call that changes a disk and has one of them fail, or kills the process in
its place; a write then gets half way. That shows what a crash of the *process* leaves.

A crash of the *machine* leaves less: what was not synced may be gone, and of the names that were
changed in a directory since it was synced any may have stayed and any been lost, in whatever order.
`RecordingDisk` writes down the calls, `Machine` replays them up to a point and lists what could then
be found on the disk (as in "All File Systems Are Not Created Equal", OSDI 2014: calls are reordered
unless a sync keeps them apart).
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from holdfast.checkpoint.storage.posix import Disk


class FaultyDisk(Disk):
    """Each call is a point; at one of them (counted from 1) something happens."""

    def __init__(self, at: int = 0, happens: Callable[[], None] = lambda: None) -> None:
        self.points: list[str] = []
        self._at = at
        self._happens = happens

    def _point(self, name: str) -> None:
        self.points.append(name)
        if len(self.points) == self._at:
            self._happens()

    def create(self, name: str, directory: int) -> int:
        self._point(f"create {name}")
        return super().create(name, directory)

    def write(self, fd: int, data: memoryview) -> int:
        if len(self.points) + 1 == self._at:
            super().write(fd, data[: len(data) // 2])
        self._point("write")
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._point("sync")
        super().sync(fd)

    def sync_directory(self, directory: int) -> None:
        self._point("sync directory")
        super().sync_directory(directory)

    def rename(self, old: str, new: str, directory: int) -> None:
        self._point(f"rename to {new}")
        super().rename(old, new, directory)

    def link(self, old: str, new: str, directory: int) -> None:
        self._point(f"link to {new}")
        super().link(old, new, directory)

    def unlink(self, name: str, directory: int) -> None:
        self._point(f"unlink {name}")
        super().unlink(name, directory)

    def make_directory(self, name: str, parent: int) -> None:
        self._point(f"make {name}")
        super().make_directory(name, parent)

    def remove_directory(self, name: str, parent: int) -> None:
        self._point(f"remove {name}")
        super().remove_directory(name, parent)


def fails_with(number: int) -> Callable[[], None]:
    def happens() -> None:
        raise OSError(number, os.strerror(number))

    return happens


no_space = fails_with(errno.ENOSPC)
broken = fails_with(errno.EIO)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], object]) -> int:
    """Run it in a forked process; how that ended, as a signal's number below zero or an exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- machines that die --------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One change of a name: it means that inode now, or nothing any more."""

    path: str
    inode: int | None


@dataclass(frozen=True)
class Call:
    changes: tuple[Change, ...] = ()
    """Names, all of one directory, that change together."""
    inode: int = 0
    data: bytes = b""
    synced: str | int | None = None
    """The directory or inode that is durable from here on."""


class RecordingDisk(Disk):
    """Does what it is told, and writes it down."""

    def __init__(self, root: Path, forgets: tuple[str, ...] = ()) -> None:
        self.calls: list[Call] = []
        self._root = root
        self._forgets = forgets
        """Calls that it claims to do and does not: a test of the tests."""
        self._inodes: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._next = 1_000_000

    def _path(self, directory: int, name: str = "") -> str:
        path = Path(os.readlink(f"/proc/self/fd/{directory}")) / name
        return os.path.relpath(path, self._root)

    def _change(self, *changes: tuple[str, int | None]) -> None:
        for path, inode in changes:
            if inode is None:
                self._names.pop(path, None)
            else:
                self._names[path] = inode
        self.calls.append(Call(tuple(Change(*change) for change in changes)))

    def _inode_of(self, path: str) -> int:
        """Files that were there before go by the number that the disk gave them."""
        return self._names.get(path) or (self._root / path).stat().st_ino

    def create(self, name: str, directory: int) -> int:
        fd = super().create(name, directory)
        self._next += 1
        self._inodes[fd] = self._next
        self._change((self._path(directory, name), self._next))
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        count = super().write(fd, data)
        self.calls.append(Call(inode=self._inodes[fd], data=bytes(data[:count])))
        return count

    def sync(self, fd: int) -> None:
        if "sync" not in self._forgets:
            self.calls.append(Call(synced=self._inodes[fd]))

    def sync_directory(self, directory: int) -> None:
        if "sync_directory" not in self._forgets:
            self.calls.append(Call(synced=self._path(directory)))

    def rename(self, old: str, new: str, directory: int) -> None:
        before, after = self._path(directory, old), self._path(directory, new)
        inode = self._inode_of(before)
        super().rename(old, new, directory)
        self._change((before, None), (after, inode))

    def link(self, old: str, new: str, directory: int) -> None:
        inode = self._inode_of(self._path(directory, old))
        super().link(old, new, directory)
        self._change((self._path(directory, new), inode))

    def unlink(self, name: str, directory: int) -> None:
        super().unlink(name, directory)
        self._change((self._path(directory, name), None))

    def make_directory(self, name: str, parent: int) -> None:
        super().make_directory(name, parent)
        self._change((self._path(parent, name), _DIRECTORY))

    def remove_directory(self, name: str, parent: int) -> None:
        super().remove_directory(name, parent)
        self._change((self._path(parent, name), None))


_DIRECTORY = -1

Tree = dict[str, bytes | None]
"""What is found on a disk: files with what is in them, directories with None."""


@dataclass
class Machine:
    """A disk as it is in memory, and how much of that is on the platter."""

    durable: dict[str, int]
    data: dict[int, bytes]
    synced: dict[int, bytes]
    pending: list[tuple[Change, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path) -> Machine:
        """Everything that is there now is durable."""
        found = sorted(root.rglob("*"))
        names = {
            str(path.relative_to(root)): _DIRECTORY if path.is_dir() else path.stat().st_ino
            for path in found
        }
        data = {path.stat().st_ino: path.read_bytes() for path in found if path.is_file()}
        return cls(names, data, dict(data))

    def apply(self, call: Call) -> None:
        if call.changes:
            self.pending.append(call.changes)
        elif isinstance(call.synced, int):
            self.synced[call.synced] = self.data.get(call.synced, b"")
        elif isinstance(call.synced, str):
            self._sync_directory(call.synced)
        else:
            self.data[call.inode] = self.data.get(call.inode, b"") + call.data

    def _sync_directory(self, directory: str) -> None:
        left = []
        for changes in self.pending:
            if os.path.dirname(changes[0].path) in (directory, directory.removeprefix(".")):
                _change(self.durable, changes)
            else:
                left.append(changes)
        self.pending = left

    def after_crash(self) -> Iterator[Tree]:
        """What may be found: some of the pending changes, whichever; and in each case data that was
        not synced lost, torn or there, of all files, or of one unlike the others."""
        contents = list(self._contents())
        for chosen in _subsets(len(self.pending)):
            names = dict(self.durable)
            for index in chosen:
                _change(names, self.pending[index])
            for content in contents:
                yield self._tree(names, content)

    def _contents(self) -> Iterator[dict[int, bytes]]:
        unsynced = [i for i, data in self.data.items() if self.synced.get(i, b"") != data]
        for survives in (_lost, _torn, _there):
            all_alike = {i: survives(self.synced.get(i, b""), self.data[i]) for i in unsynced}
            yield self.data | all_alike
            for inode in unsynced:
                for otherwise in (_lost, _torn, _there):
                    one = otherwise(self.synced.get(inode, b""), self.data[inode])
                    yield self.data | all_alike | {inode: one}

    def _tree(self, names: dict[str, int], content: dict[int, bytes]) -> Tree:
        tree: Tree = {}
        for path, inode in sorted(names.items()):
            parent = os.path.dirname(path)
            if parent and parent not in tree:
                continue  # Its directory is not there, so neither is it.
            tree[path] = None if inode == _DIRECTORY else content.get(inode, b"")
        return tree


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    """All of them; if they are too many, the beginnings, those of one, and those without one."""
    every = range(count)
    if count <= 6:
        for size in range(count + 1):
            yield from combinations(every, size)
        return
    yield from (tuple(every[:n]) for n in range(count + 1))
    yield from ((n,) for n in every)
    yield from (tuple(m for m in every if m != n) for n in every)


def _change(names: dict[str, int], changes: tuple[Change, ...]) -> None:
    for change in changes:
        if change.inode is None:
            names.pop(change.path, None)
        else:
            names[change.path] = change.inode


def _lost(synced: bytes, data: bytes) -> bytes:
    return synced


def _torn(synced: bytes, data: bytes) -> bytes:
    """Its size is there and half of what was in it; the rest is zeros."""
    half = max(len(synced), len(data) // 2)
    return data[:half] + bytes(len(data) - half)


def _there(synced: bytes, data: bytes) -> bytes:
    return data


def crashes(before: Machine, calls: list[Call]) -> Iterator[tuple[int, Tree]]:
    """Every state that a crash can leave, each once: after how many calls, and what is there."""
    seen: set[frozenset[tuple[str, bytes | None]]] = set()
    for number in range(len(calls) + 1):
        if number:
            before.apply(calls[number - 1])
        for tree in before.after_crash():
            key = frozenset(tree.items())
            if key not in seen:
                seen.add(key)
                yield number, tree


def lay_out(tree: Tree, root: Path) -> None:
    root.mkdir(parents=True)
    for path, data in tree.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)
