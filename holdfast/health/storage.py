"""Checks storage paths: is there space, and can a file be written and read back?

A small file is created, written, synced, read back and compared. Its name is removed right after it is
created, so a probe that is killed later leaves nothing behind; nothing else in the directory is
touched. A path that hangs never comes to an answer here: the probe's deadline gives it, and fails the
path.

The mount is remembered. If another file system appears in its place, the real one has been lost, even
though writing would succeed. (A mount on demand only shows after the path has been used, so it is
looked up once more then.)

For a directory that does not exist yet, as a job's home before the first job, the space of the disk it
would be created on counts. What is mounted read-only, as data often is, needs no space.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from pathlib import Path

from msgspec import Struct

from holdfast.health.baseline import MountSeen
from holdfast.health.judgement import Judgement, Remark, amount, summed, unknown
from holdfast.health.node import Node
from holdfast.health.settings import HealthLimits
from holdfast.messages.health import Fact

PROBE_BYTES = 64 << 10

ON_DEMAND = "autofs"
"""Kind of a mount that something else replaces as soon as the path is used."""


def check_disk(node: Node, path: str, before: None) -> Judgement:
    try:
        disk = os.statvfs(_existing(path) if path == node.settings.home else path)
    except OSError as error:
        return Judgement("fail", f"{path}: {error.strerror}")
    return judge_disk(disk, path, node.settings.limits)


def _existing(path: str) -> Path:
    """Return the directory, or the nearest one above it that exists."""
    found = Path(path)
    while not found.exists() and found != found.parent:
        found = found.parent
    return found


def judge_disk(disk: os.statvfs_result, path: str, limits: HealthLimits) -> Judgement:
    if disk.f_flag & os.ST_RDONLY:
        return Judgement("pass", f"{path} is read-only: it needs no space")
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    text, remarks = f"{amount(free)} of {amount(size)} free", []
    if free < limits.disk_bytes:
        remarks.append(Remark("fail", f"{path}: only {text}"))
    elif free < limits.disk_share * size:
        remarks.append(Remark("warn", f"{path}: only {text}"))
    facts: dict[str, Fact] = {"free_bytes": free, "size_bytes": size}
    if disk.f_files:  # Some file systems do not count inodes.
        facts["free_inodes"] = disk.f_favail
        files = f"{path}: only {disk.f_favail} of {disk.f_files} files can still be created"
        if disk.f_favail < limits.inodes:
            remarks.append(Remark("fail", files))
        elif disk.f_favail < limits.inode_share * disk.f_files:
            remarks.append(Remark("warn", files))
    return summed(remarks, text, facts)


# ---- writing and reading ------------------------------------------------------------------------


class Mount(Struct, frozen=True):
    """A mounted file system."""

    point: str
    kind: str
    read_only: bool
    """As it was mounted; a file system that an error made read-only does not show it here."""


def check_storage(node: Node, path: str, before: MountSeen | None) -> Judgement:
    if path == node.settings.home and not os.path.exists(path):
        return unknown(f"{path} does not exist yet: no job has run here")
    lost = _lost(path, _mount(node, path), before)
    if lost is not None:
        return lost
    begun, remarks, took = time.monotonic(), [], 0.0
    try:
        if not _write_and_read(path):
            remarks = [Remark("fail", f"{path}: what was written is not what was read back")]
        took = time.monotonic() - begun
    except OSError as error:
        remarks = [_trouble(path, error, _mount(node, path))]
    mount = _mount(node, path)
    facts: dict[str, Fact] = {"write_s": round(took, 6)}
    if mount is not None:
        facts |= {"mount": mount.point, "kind": mount.kind}
    fine = f"written, synced and read back in {took:.3f} s"
    seen = MountSeen(mount.point, mount.kind) if mount else None
    return _lost(path, mount, before) or summed(remarks, fine, facts, seen)


def _mount(node: Node, path: str) -> Mount | None:
    mount = mount_of(os.path.realpath(path), node.text("proc/self/mountinfo") or "")
    return None if mount is None or mount.kind == ON_DEMAND else mount


def _lost(path: str, mount: Mount | None, before: MountSeen | None) -> Judgement | None:
    if before is None or mount is None:
        return None
    if (mount.point, mount.kind) == (before.point, before.kind):
        return None
    text = f"{path} was on {before.kind} ({before.point}) and is on {mount.kind}: mount it again"
    return Judgement("fail", text, {"mount": mount.point, "kind": mount.kind})


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
        # Drop it from the page cache, so that reading goes to the storage where that is possible.
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
    """Find the mount that contains a path, without touching the path itself."""
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
