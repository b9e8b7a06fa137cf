"""What the NVIDIA driver wrote into the kernel's log: its Xids.

Some Xids say that the hardware or the driver is broken, most only that a program did something
wrong. A new one of the first kind fails the node; of the second it is a warning. What stands in the
log from before the first look may have been repaired since, so it is a warning at most.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from holdfast.health.baseline import Seen, XidSeen
from holdfast.health.finding import Finding, Remark, summed, unknown
from holdfast.health.node import Node
from holdfast.messages.health import Fact

BROKEN = {
    48: "memory error that could not be corrected",
    62: "halt of the GPU's controller",
    64: "no memory rows left to remap",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "memory error that could not be contained",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
    140: "memory error that could not be recovered",
    143: "the GPU cannot be initialised",
}

RECOVERY_CHANGED = 154
"""The driver's wish for recovery changed; the line says to what."""

_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): ([0-9]+)(?:, )?(.*)")
_TO_SOMETHING = re.compile(r"to 0x0*[1-9a-fA-F]")
_RECORD_BYTES = 16384


class Line(NamedTuple):
    sequence: int
    text: str


class Xid(NamedTuple):
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


def check_xid(node: Node, before: Seen | None) -> Finding:
    if not node.has_nvidia_device:
        return unknown("no GPU here: no NVIDIA device")
    try:
        lines = read_log(str(node.path("dev/kmsg")))
    except OSError as error:
        return unknown(f"the kernel's log cannot be read ({error.strerror})")
    return judge_xids(lines, before.sequence if isinstance(before, XidSeen) else None)


def read_log(path: str) -> list[Line]:
    """All that the kernel's log holds: each read gives one record, until there is none."""
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
                break  # A file that stands in for the log ends.
            parts.append(part)
    finally:
        os.close(fd)
    return parsed(b"".join(parts).decode(errors="replace"))


def parsed(text: str) -> list[Line]:
    """Records are "priority,sequence,microseconds,flags;text"; other lines belong to the one before."""
    lines = []
    for line in text.splitlines():
        head, separator, message = line.partition(";")
        words = head.split(",")
        if separator and len(words) >= 3 and words[1].isdecimal():
            lines.append(Line(int(words[1]), message))
    return lines


def judge_xids(lines: list[Line], known: int | None) -> Finding:
    xids = [
        Xid(line.sequence, match[1], int(match[2]), match[3])
        for line in lines
        if (match := _LINE.search(line.text))
    ]
    last = max((line.sequence for line in lines), default=-1 if known is None else known)
    new = [xid for xid in xids if known is not None and xid.sequence > known]
    remarks = _new(new) if known is not None else _old(xids)
    if known is not None and lines and lines[0].sequence > known + 1:
        lost = lines[0].sequence - known - 1
        remarks.append(Remark("unknown", f"{lost} lines of the log were lost since the last look"))
    facts: dict[str, Fact] = {"xids": len(xids), "new_xids": len(new)}
    fine = f"no new Xid in the kernel's log ({len(xids)} older)" if xids else "no Xid in the log"
    return summed(remarks, fine, facts, XidSeen(last))


def _new(xids: list[Xid]) -> list[Remark]:
    return [Remark("fail" if xid.broken else "warn", f"{xid}") for xid in xids[-8:]]


def _old(xids: list[Xid]) -> list[Remark]:
    worst = {(xid.pci, xid.number): xid for xid in xids if xid.broken}
    return [Remark("warn", f"{xid} before this first look") for xid in worst.values()]
