"""Reads the NVIDIA driver's errors, its Xids, from the kernel's log.

Some Xids mean that the hardware or the driver is broken, most only that a program did something wrong.
A new one of the first kind fails the node; of the second it is a warning. What was logged before the
first look may have been repaired since, so it is a warning at most.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from holdfast.health.baseline import XidSeen
from holdfast.health.judgement import Judgement, Remark, summed, unknown
from holdfast.health.node import Node
from holdfast.messages.health import Fact

BROKEN = {
    48: "uncorrected memory error",
    62: "halt of the GPU's controller",
    64: "no memory rows left to remap",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
    140: "unrecovered memory error",
    143: "the GPU cannot be initialised",
}

RECOVERY_CHANGED = 154
"""The recovery action that the driver wants has changed; the text names it."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): ([0-9]+)(?:, )?(.*)")
_TO_SOMETHING = re.compile(r"to 0x0*[1-9a-fA-F]")
_RECORD_BYTES = 16384


class LogLine(NamedTuple):
    """A record of the kernel's log."""

    sequence: int
    text: str


class Xid(NamedTuple):
    """An error that the NVIDIA driver logged."""

    sequence: int
    pci: str
    number: int
    text: str

    @property
    def broken(self) -> bool:
        if self.number == RECOVERY_CHANGED:
            return _TO_SOMETHING.search(self.text) is not None
        return self.number in BROKEN

    def __str__(self) -> str:
        meaning = BROKEN.get(self.number) or self.text[:120]
        return f"Xid {self.number} on GPU {self.pci} ({meaning})"


def check_xid(node: Node, before: XidSeen | None) -> Judgement:
    if not node.has_nvidia_device:
        return unknown("no GPU here: no NVIDIA device")
    try:
        lines = read_log(str(node.path("dev/kmsg")))
    except OSError as error:
        return unknown(f"the kernel's log cannot be read ({error.strerror})")
    return judge_xids(lines, before.sequence if before else None)


def read_log(path: str) -> list[LogLine]:
    """Read the kernel's log: each read returns one record, until there are no more."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    parts = []
    try:
        while True:
            try:
                part = os.read(fd, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # The record was overwritten meanwhile; the next read goes on after it.
            if not part:
                break  # A file that replaces the log ends.
            parts.append(part)
    finally:
        os.close(fd)
    return parsed(b"".join(parts).decode(errors="replace"))


def parsed(text: str) -> list[LogLine]:
    """Parse records "priority,sequence,microseconds,flags;text"; other lines continue a record."""
    lines = []
    for line in text.splitlines():
        head, separator, message = line.partition(";")
        words = head.split(",")
        if separator and len(words) >= 3 and words[1].isdecimal():
            lines.append(LogLine(int(words[1]), message))
    return lines


def judge_xids(lines: list[LogLine], known: int | None) -> Judgement:
    xids = [
        Xid(line.sequence, match[1], int(match[2]), match[3])
        for line in lines
        if (match := _XID.search(line.text))
    ]
    if known is None:
        new, worst = [], {(xid.pci, xid.number): xid for xid in xids if xid.broken}
        remarks = [Remark("warn", f"{xid} before this first look") for xid in worst.values()]
    else:
        new = [xid for xid in xids if xid.sequence > known]
        remarks = [Remark("fail" if xid.broken else "warn", f"{xid}") for xid in new[-8:]]
        lost = lines[0].sequence - known - 1 if lines else 0
        if lost > 0:
            text = f"{lost} lines of the log were lost since the last look"
            remarks.append(Remark("unknown", text))
    last = max((line.sequence for line in lines), default=-1 if known is None else known)
    facts: dict[str, Fact] = {"xids": len(xids), "new_xids": len(new)}
    fine = f"no new Xid in the kernel's log ({len(xids)} older)" if xids else "no Xid in the log"
    return summed(remarks, fine, facts, XidSeen(last))
