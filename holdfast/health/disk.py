"""Disks: is there room, for bytes and for files?

For a directory that is not there yet, as a job's home before the first job, the disk it would be
made on is looked at. What is mounted read-only, as data often is, needs no room.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from holdfast.health.baseline import Seen
from holdfast.health.finding import Finding, Remark, amount, summed
from holdfast.health.node import Node
from holdfast.health.settings import Limits


class Room(Struct, frozen=True):
    """What a file system has left for ordinary users."""

    size_bytes: int
    free_bytes: int
    inodes: int
    """0 where the file system does not count them."""
    free_inodes: int


def check_disk(node: Node, path: str, before: Seen | None) -> Finding:
    try:
        disk = os.statvfs(_there(path) if path == node.settings.home else path)
    except OSError as error:
        return Finding("fail", f"{path}: {error.strerror}")
    if disk.f_flag & os.ST_RDONLY:
        return Finding("pass", f"{path} is read-only: it needs no room")
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    return judge_room(Room(size, free, disk.f_files, disk.f_favail), path, node.settings.limits)


def _there(path: str) -> Path:
    """The directory, or the nearest one above it that exists."""
    found = Path(path)
    while not found.exists() and found != found.parent:
        found = found.parent
    return found


def judge_room(room: Room, path: str, limits: Limits) -> Finding:
    text = f"{amount(room.free_bytes)} of {amount(room.size_bytes)} free"
    remarks = []
    if room.free_bytes < limits.disk_bytes:
        remarks.append(Remark("fail", f"{path}: only {text}"))
    elif room.free_bytes < limits.disk_share * room.size_bytes:
        remarks.append(Remark("warn", f"{path}: only {text}"))
    if room.inodes:
        files = f"{path}: only {room.free_inodes} of {room.inodes} more files can be made"
        if room.free_inodes < limits.inodes:
            remarks.append(Remark("fail", files))
        elif room.free_inodes < limits.inode_share * room.inodes:
            remarks.append(Remark("warn", files))
    facts = {"free_bytes": room.free_bytes, "size_bytes": room.size_bytes}
    if room.inodes:
        facts["free_inodes"] = room.free_inodes
    return summed(remarks, text, facts)
