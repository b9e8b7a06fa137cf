"""What NVIDIA's management library says about the GPUs, as plain data.

The library is asked everything at one look and closed again: a process that keeps it open keeps the
GPUs in use, and they could not be reset. What it refuses to tell stays in the data as a `Refused`
with its error number, so that one call that fails makes one thing unknown, and no GPU unhealthy.

`Gpus` is also the format of the JSON file that stands in for the library in tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

ERRORS = {
    1: "not initialised",
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    9: "the NVIDIA driver is not loaded",
    10: "the driver timed out",
    12: "a library is missing",
    13: "this version of the library cannot tell",
    15: "the GPU is lost: it has fallen off the bus",
    16: "the GPU must be reset",
    17: "blocked by the operating system",
    18: "driver and library differ in version: the driver was updated without a reboot",
    23: "not enough memory",
    999: "unknown error",
}

LOST = (15, 16)
"""The two errors that are the driver's verdict on a GPU. All others only say that it cannot tell."""

ABSENT = (2, 3, 6, 13)
"""Errors that say: this kind of GPU, or this driver, does not have that."""


class Refused(Struct, frozen=True):
    """A value that the library did not give."""

    error: int

    def __str__(self) -> str:
        return ERRORS.get(self.error, f"error {self.error}")


class GpuProcess(Struct, frozen=True):
    pid: int
    used_bytes: int | None = None


class Link(Struct, frozen=True):
    number: int
    enabled: bool | Refused
    replays: int | Refused = 0
    recoveries: int | Refused = 0


class Gpu(Struct, frozen=True, kw_only=True):
    index: int
    uuid: str = ""
    pci: str = ""
    name: str = ""
    handle: Refused | None = None
    """Why the library does not even let this GPU be asked."""
    recovery: int | Refused = Refused(13)
    """What the driver wants done to it; 0 for nothing."""
    ecc_uncorrected: int | Refused = Refused(3)
    """Since the driver was loaded or the GPU reset."""
    remap_pending: bool | Refused = Refused(3)
    remap_failed: bool | Refused = Refused(3)
    used_bytes: int | Refused = Refused(3)
    """Without what the driver keeps for itself."""
    processes: tuple[GpuProcess, ...] | Refused = Refused(3)
    links: tuple[Link, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.pci})" if self.pci else f"GPU {self.index}"


class Gpus(Struct, frozen=True):
    driver: str
    gpus: tuple[Gpu, ...]


class NoNvml(Struct, frozen=True):
    """The library cannot be asked at all."""

    reason: str


class Nvml(Protocol):
    def look(self) -> Gpus | NoNvml: ...


class NvmlFile:
    """Stands in for the library: the GPUs are those that a JSON file describes."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def look(self) -> Gpus | NoNvml:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Gpus)
        except OSError as error:
            return NoNvml(f"no NVML here ({self._path}: {error.strerror})")
        except msgspec.DecodeError as error:
            return NoNvml(f"no NVML here ({self._path}: {error})")


def open_nvml(stand_in: str | None) -> Nvml:
    """The library, or the file that stands in for it. Nothing is loaded before the first look."""
    if stand_in is not None:
        return NvmlFile(stand_in)
    from holdfast.health.nvml_library import NvmlLibrary

    return NvmlLibrary()
