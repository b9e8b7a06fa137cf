"""Reads the state of the GPUs from NVML, NVIDIA's management library, as plain data.

The library comes with the driver; `nvidia-ml-py` (module `pynvml`, extra `holdfast[gpu]`) calls it. It
is opened for one look and closed again: a process that keeps it open keeps the GPUs in use, and they
could not be reset. A value that NVML does not give stays in the data as an `NvmlRefusal` with its error
number, so a call that fails makes one value unknown, and no GPU unhealthy.

`Gpus` is also the format of the JSON file that replaces the library in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

T = TypeVar("T")

ERRORS = {
    1: "not initialised",
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    9: "the NVIDIA driver is not loaded",
    10: "the driver timed out",
    12: "libnvidia-ml.so.1 is not found",
    13: "this version of the library does not have it",
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
"""Errors of a value that this kind of GPU, or this driver, does not have."""

_RECOVERY_ACTION = 230
_LINK_RECOVERIES = 215
"""Numbers of fields; older versions of pynvml have no names for them."""

MISSING = "nvidia-ml-py is not installed: pip install 'holdfast[gpu]'"


class NvmlRefusal(Struct, frozen=True):
    """A value that NVML did not give."""

    error: int

    def __str__(self) -> str:
        return ERRORS.get(self.error, f"error {self.error}")


class GpuProcess(Struct, frozen=True):
    """A process that uses a GPU."""

    pid: int
    used_bytes: int | None = None


class NvLink(Struct, frozen=True):
    """One NVLink of a GPU."""

    number: int
    enabled: bool | NvmlRefusal
    replays: int | NvmlRefusal = 0
    recoveries: int | NvmlRefusal = 0


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU."""

    index: int
    uuid: str = ""
    pci: str = ""
    name: str = ""
    handle: NvmlRefusal | None = None
    """Why NVML gives nothing at all about this GPU."""
    recovery: int | NvmlRefusal = NvmlRefusal(13)
    """The action that the driver wants; 0 for none."""
    ecc_uncorrected: int | NvmlRefusal = NvmlRefusal(3)
    """Since the driver was loaded or the GPU reset."""
    remap_pending: bool | NvmlRefusal = NvmlRefusal(3)
    remap_failed: bool | NvmlRefusal = NvmlRefusal(3)
    used_bytes: int | NvmlRefusal = NvmlRefusal(3)
    """Without what the driver reserves for itself."""
    processes: tuple[GpuProcess, ...] | NvmlRefusal = NvmlRefusal(3)
    links: tuple[NvLink, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.pci})" if self.pci else f"GPU {self.index}"


class Gpus(Struct, frozen=True):
    """All GPUs of the node."""

    driver: str
    gpus: tuple[Gpu, ...]


class NoNvml(Struct, frozen=True):
    """Why NVML gives nothing."""

    reason: str


def read_gpus(replacement: str | None) -> Gpus | NoNvml:
    """Read the GPUs from the library, or from the JSON file that replaces it."""
    if replacement is not None:
        try:
            return msgspec.json.decode(Path(replacement).read_bytes(), type=Gpus)
        except (OSError, msgspec.DecodeError) as error:
            told = error.strerror if isinstance(error, OSError) else error
            return NoNvml(f"no NVML here ({replacement}: {told})")
    try:
        import pynvml
    except ImportError:
        return NoNvml(MISSING)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NoNvml(f"NVML does not answer: {NvmlRefusal(error.value)}")
    try:
        driver, count = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount()
        reader = _GpuReader(pynvml)
        return Gpus(driver=str(driver), gpus=tuple(map(reader.gpu, range(count))))
    except pynvml.NVMLError as error:
        return NoNvml(f"NVML does not count the GPUs: {NvmlRefusal(error.value)}")
    finally:
        pynvml.nvmlShutdown()


class _GpuReader:
    """Reads GPUs from the library while it is open."""

    def __init__(self, pynvml: Any) -> None:
        self._nvml = pynvml

    def _told(self, get: Callable[[], T]) -> T | NvmlRefusal:
        """Return a value, or its refusal."""
        try:
            return get()
        except self._nvml.NVMLError as error:
            return NvmlRefusal(error.value)

    def _text(self, get: Callable[[], str]) -> str:
        text = self._told(get)
        return "" if isinstance(text, NvmlRefusal) else text

    def gpu(self, index: int) -> Gpu:
        nvml, told = self._nvml, self._told
        device = told(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        if isinstance(device, NvmlRefusal):
            return Gpu(index=index, handle=device)
        ecc = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        return Gpu(
            index=index,
            uuid=self._text(lambda: str(nvml.nvmlDeviceGetUUID(device))),
            pci=self._text(lambda: _address(nvml.nvmlDeviceGetPciInfo(device))),
            name=self._text(lambda: str(nvml.nvmlDeviceGetName(device))),
            recovery=told(lambda: self._field(device, _RECOVERY_ACTION)),
            ecc_uncorrected=told(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(device, *ecc))),
            remap_pending=told(lambda: bool(nvml.nvmlDeviceGetRemappedRows(device)[2])),
            remap_failed=told(lambda: bool(nvml.nvmlDeviceGetRemappedRows(device)[3])),
            used_bytes=told(lambda: self._used(device)),
            processes=told(lambda: self._processes(device)),
            links=self._links(device),
        )

    def _field(self, device: Any, number: int, scope: int = 0) -> int:
        (found,) = self._nvml.nvmlDeviceGetFieldValues(device, [(number, scope)])
        if found.nvmlReturn:
            raise self._nvml.NVMLError(found.nvmlReturn)
        wide = found.valueType in (2, 3)  # unsigned long, unsigned long long
        return int(found.value.ullVal if wide else found.value.uiVal)

    def _used(self, device: Any) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(device, self._nvml.nvmlMemory_v2).used)

    def _processes(self, device: Any) -> tuple[GpuProcess, ...]:
        nvml = self._nvml
        listed = list(nvml.nvmlDeviceGetComputeRunningProcesses(device))
        for get in (
            nvml.nvmlDeviceGetGraphicsRunningProcesses,
            nvml.nvmlDeviceGetMPSComputeRunningProcesses,
        ):
            more = self._told(partial(get, device))
            listed += [] if isinstance(more, NvmlRefusal) else more
        found = {one.pid: GpuProcess(one.pid, one.usedGpuMemory) for one in listed}
        return tuple(found.values())

    def _links(self, device: Any) -> tuple[NvLink, ...]:
        numbers = range(self._nvml.NVML_NVLINK_MAX_LINKS)
        links = [self._link(device, number) for number in numbers]
        absent = [NvmlRefusal(error) for error in ABSENT]
        return tuple(link for link in links if link.enabled not in absent)

    def _link(self, device: Any, number: int) -> NvLink:
        nvml, told = self._nvml, self._told
        enabled = told(lambda: bool(nvml.nvmlDeviceGetNvLinkState(device, number)))
        if enabled is not True:
            return NvLink(number, enabled)

        def counter(kind: int) -> int | NvmlRefusal:
            return told(lambda: int(nvml.nvmlDeviceGetNvLinkErrorCounter(device, number, kind)))

        recoveries = counter(nvml.NVML_NVLINK_ERROR_DL_RECOVERY)
        if isinstance(recoveries, NvmlRefusal):  # Newer links have a field instead.
            recoveries = told(lambda: self._field(device, _LINK_RECOVERIES, number))
        return NvLink(number, True, counter(nvml.NVML_NVLINK_ERROR_DL_REPLAY), recoveries)


def _address(info: Any) -> str:
    """Write a PCI address as sysfs does."""
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"
