"""What earlier looks saw.

A counter says nothing by itself: ten link failures may be ten years old. So a check that judges by
change is given what it saw the last time and answers with what to remember for the next. What is
remembered is plain data; an agent keeps it in memory, `holdfast check --baseline FILE` in a file.

Counters start anew with the machine, so nothing is carried over a reboot.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct, field

from holdfast.errors import UsageError


class CpuSeen(Struct, frozen=True, tag="cpu"):
    online: tuple[int, ...]
    """Every core that was ever online: one that goes stays missed until it is back."""
    throttles: int


class MemorySeen(Struct, frozen=True, tag="memory"):
    uncorrected: int


class ClockSeen(Struct, frozen=True, tag="clock"):
    wall_minus_boot_s: float
    """Constant as long as nobody sets the clock."""


class GpusSeen(Struct, frozen=True, tag="gpus"):
    uuids: dict[str, int]
    """Index by UUID of every GPU that was ever there."""


class EccSeen(Struct, frozen=True, tag="ecc"):
    uncorrected: dict[str, int]


class XidSeen(Struct, frozen=True, tag="xid"):
    sequence: int
    """Number of the last line of the kernel's log that was read."""


class LinkSeen(Struct, frozen=True):
    enabled: bool
    replays: int
    recoveries: int
    windows: int = 0
    """One bit a look, the newest lowest: whether a counter had grown."""


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


Seen = (
    CpuSeen
    | MemorySeen
    | ClockSeen
    | GpusSeen
    | EccSeen
    | XidSeen
    | NvlinkSeen
    | NicSeen
    | MountSeen
)


class Baseline(Struct):
    """By check's name, what it saw the last time that it looked."""

    boot: str = ""
    seen: dict[str, Seen] = field(default_factory=dict)


def load(path: Path) -> Baseline:
    """What an earlier run left in a file; an empty one where there is no file yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Baseline)
    except FileNotFoundError:
        return Baseline()
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path}: is no baseline of ours ({error}); remove it to begin a new one"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None


def save(baseline: Baseline, path: Path) -> None:
    """Write it whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(baseline), indent=1))
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)
