"""Storage paths: can a file be written, kept and read back there?

A small file of our own is made, written, forced to the disk, read back and compared. Its name is
taken away right after it is made, so that a probe that is killed later leaves nothing behind; nothing
else in the directory is touched. A path that hangs never comes to an answer here: the probe's
deadline gives it, and fails the path.

What is mounted there is noted. When another file system turns up later in its place, the real one
has been lost, even though writing would go well. (What is mounted on demand only shows after the
path has been used, so it is looked up once more then.)
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time

from msgspec import Struct

from holdfast.health.baseline import MountSeen, Seen
from holdfast.health.finding import Finding, Remark, summed, unknown
from holdfast.health.node import Node
from holdfast.messages.health import Fact

PROBE_BYTES = 64 << 10

ON_DEMAND = "autofs"
"""Stands where something else will be mounted as soon as the path is used."""


class Mount(Struct, frozen=True):
    point: str
    kind: str
    read_only: bool
    """As it was mounted. A file system that turned read-only by an error does not say so here."""


def check_storage(node: Node, path: str, before: Seen | None) -> Finding:
    if path == node.settings.home and not os.path.exists(path):
        return unknown(f"{path} is not made yet: no job has run here")
    lost = _lost(path, _mount(node, path), before)
    if lost is not None:
        return lost
    begun = time.monotonic()
    remark, took = None, 0.0
    try:
        if not _write_and_read(path):
            remark = Remark("fail", f"{path}: what was written is not what was read back")
        took = time.monotonic() - begun
    except OSError as error:
        remark = _trouble(path, error, _mount(node, path))
    mount = _mount(node, path)
    facts: dict[str, Fact] = {"write_s": round(took, 6)}
    if mount is not None:
        facts |= {"mount": mount.point, "kind": mount.kind}
    fine = f"written, synced and read back in {took:.3f} s"
    seen = MountSeen(mount.point, mount.kind) if mount else None
    return _lost(path, mount, before) or summed([remark] if remark else [], fine, facts, seen)


def _mount(node: Node, path: str) -> Mount | None:
    mount = mount_of(os.path.realpath(path), node.text("proc/self/mountinfo") or "")
    return None if mount is None or mount.kind == ON_DEMAND else mount


def _lost(path: str, mount: Mount | None, before: Seen | None) -> Finding | None:
    if not isinstance(before, MountSeen) or mount is None:
        return None
    if (mount.point, mount.kind) == (before.point, before.kind):
        return None
    text = f"{path} was on {before.kind} ({before.point}) and is on {mount.kind}: mount it again"
    return Finding("fail", text, {"mount": mount.point, "kind": mount.kind})


def _write_and_read(path: str) -> bool:
    name = os.path.join(path, f".holdfast-probe-{os.getpid()}-{secrets.token_hex(8)}")
    content = secrets.token_bytes(PROBE_BYTES)
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(name)
        written = 0
        while written < len(content):
            written += os.write(fd, content[written:])
        os.fsync(fd)
        # Have it forgotten in memory, so that reading asks the storage where that is possible.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read = b""
        while part := os.pread(fd, len(content), len(read)):
            read += part
        return read == content
    finally:
        os.close(fd)


def _trouble(path: str, error: OSError, mount: Mount | None) -> Remark:
    if error.errno in (errno.EACCES, errno.EPERM):
        return Remark("warn", f"{path} cannot be written by this user ({error.strerror})")
    if error.errno == errno.EROFS and mount is not None and mount.read_only:
        return Remark("warn", f"{path} is mounted read-only")
    return Remark("fail", f"{path}: {error.strerror}")


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """What is mounted where the path lies, found without touching the path itself."""
    best = None
    wanted = os.path.abspath(path)
    for line in mountinfo.splitlines():
        words, _, rest = line.partition(" - ")
        fields = words.split()
        if len(fields) < 6 or not rest:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        # Of two mounts at one point the later covers the earlier.
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(point, rest.split()[0], "ro" in fields[5].split(","))
    return best
