"""Keeps what earlier looks saw, for checks that judge by change.

A counter says nothing by itself: ten link failures may be ten years old. A check that judges by change
gets what it saw last time and returns what to remember for the next. An agent keeps that in memory,
`holdfast check --baseline FILE` in a file. Counters start anew with the machine, so nothing is kept
over a reboot.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct, field

from holdfast.errors import UsageError


class CpuSeen(Struct, frozen=True, tag="cpu"):
    online: tuple[int, ...]
    """Every core that was ever online: one that disappears stays missed until it is back."""
    throttles: int


class MemorySeen(Struct, frozen=True, tag="memory"):
    uncorrected: int


class ClockSeen(Struct, frozen=True, tag="clock"):
    wall_minus_boot_s: float
    """Constant until the clock is set."""


class GpusSeen(Struct, frozen=True, tag="gpus"):
    uuids: dict[str, int]
    """Index by UUID of every GPU that was ever there."""


class EccSeen(Struct, frozen=True, tag="ecc"):
    uncorrected: dict[str, int]


class XidSeen(Struct, frozen=True, tag="xid"):
    sequence: int
    """Number of the last record read from the kernel's log."""


class LinkSeen(Struct, frozen=True):
    enabled: bool
    replays: int
    recoveries: int
    windows: int = 0
    """One bit for each look, the newest lowest: whether a counter had grown."""


class NvlinkSeen(Struct, frozen=True, tag="nvlink"):
    links: dict[str, LinkSeen]


class PortSeen(Struct, frozen=True):
    up: bool
    downs: int


class NicSeen(Struct, frozen=True, tag="nic"):
    ports: dict[str, PortSeen]


class MountSeen(Struct, frozen=True, tag="mount"):
    point: str
    kind: str


SeenOfGpus = GpusSeen | EccSeen | XidSeen | NvlinkSeen
Seen = SeenOfGpus | CpuSeen | MemorySeen | ClockSeen | NicSeen | MountSeen


class Baseline(Struct):
    """What each check saw at its last look, by the check's name."""

    boot: str = ""
    seen: dict[str, Seen] = field(default_factory=dict)


def load(path: Path) -> Baseline:
    """Read the baseline of an earlier run; an empty one if the file does not exist."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Baseline)
    except FileNotFoundError:
        return Baseline()
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path}: not a baseline ({error}); remove it to begin a new one"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None


def save(baseline: Baseline, path: Path) -> None:
    """Write a baseline atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(baseline), indent=1))
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)
