"""Reads the state of the GPUs from NVML, NVIDIA's management library, as plain data.

The library comes with the driver; `nvidia-ml-py` (module `pynvml`, extra `holdfast[gpu]`) calls it. It
is opened for one look and closed again: a process that keeps it open keeps the GPUs in use, and they
could not be reset. A value that NVML does not give stays in the data as an `NvmlRefusal` with its error
number, so a call that fails makes one value unknown, and no GPU unhealthy.

`Gpus` is also the format of the JSON file that replaces the library in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

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


class Nvml(Protocol):
    """A source of the GPUs' state."""

    def look(self) -> Gpus | NoNvml: ...


class NvmlFile:
    """A JSON file that replaces the library."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def look(self) -> Gpus | NoNvml:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Gpus)
        except (OSError, msgspec.DecodeError) as error:
            told = error.strerror if isinstance(error, OSError) else error
            return NoNvml(f"no NVML here ({self._path}: {told})")


class NvmlLibrary:
    """The library itself, through pynvml."""

    def look(self) -> Gpus | NoNvml:
        try:
            import pynvml
        except ImportError:
            return NoNvml(MISSING)
        session = _Session(pynvml)
        error = session.call("nvmlInit")
        if isinstance(error, NvmlRefusal):
            return NoNvml(f"NVML does not answer: {error}")
        try:
            return session.gpus()
        finally:
            session.call("nvmlShutdown")


class _Session:
    """The library between its start and its end."""

    def __init__(self, pynvml: Any) -> None:
        self._nvml = pynvml

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of NVML; return its result, or the refusal."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError as error:
            return NvmlRefusal(error.value)

    def gpus(self) -> Gpus | NoNvml:
        count = self.call("nvmlDeviceGetCount")
        if isinstance(count, NvmlRefusal):
            return NoNvml(f"NVML does not count the GPUs: {count}")
        driver = self._text("nvmlSystemGetDriverVersion")
        return Gpus(driver=driver, gpus=tuple(map(self._gpu, range(count))))

    def _gpu(self, index: int) -> Gpu:
        nvml, device = self._nvml, self.call("nvmlDeviceGetHandleByIndex", index)
        if isinstance(device, NvmlRefusal):
            return Gpu(index=index, handle=device)
        ecc = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        rows = self.call("nvmlDeviceGetRemappedRows", device)
        memory = self.call("nvmlDeviceGetMemoryInfo", device, nvml.nvmlMemory_v2)
        pci = self.call("nvmlDeviceGetPciInfo", device)
        return Gpu(
            index=index,
            uuid=self._text("nvmlDeviceGetUUID", device),
            pci=_value(pci, lambda: f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0", ""),
            name=self._text("nvmlDeviceGetName", device),
            recovery=self._field(device, _RECOVERY_ACTION),
            ecc_uncorrected=self.call("nvmlDeviceGetTotalEccErrors", device, *ecc),
            remap_pending=_value(rows, lambda: bool(rows[2])),
            remap_failed=_value(rows, lambda: bool(rows[3])),
            used_bytes=_value(memory, lambda: int(memory.used)),
            processes=self._processes(device),
            links=self._links(device),
        )

    def _text(self, name: str, *arguments: Any) -> str:
        found = self.call(name, *arguments)
        if isinstance(found, NvmlRefusal):
            return ""
        return found.decode(errors="replace") if isinstance(found, bytes) else str(found)

    def _field(self, device: Any, number: int, scope: int = 0) -> int | NvmlRefusal:
        found = self.call("nvmlDeviceGetFieldValues", device, [(number, scope)])
        if isinstance(found, NvmlRefusal):
            return found
        if found[0].nvmlReturn:
            return NvmlRefusal(int(found[0].nvmlReturn))
        wide = found[0].valueType in (2, 3)  # unsigned long, unsigned long long
        return int(found[0].value.ullVal if wide else found[0].value.uiVal)

    def _processes(self, device: Any) -> tuple[GpuProcess, ...] | NvmlRefusal:
        found: dict[int, GpuProcess] = {}
        for kind in ("Compute", "Graphics", "MPSCompute"):
            listed = self.call(f"nvmlDeviceGet{kind}RunningProcesses", device)
            if not isinstance(listed, NvmlRefusal):
                found |= {one.pid: GpuProcess(one.pid, one.usedGpuMemory) for one in listed}
            elif kind == "Compute":
                return listed
        return tuple(found.values())

    def _links(self, device: Any) -> tuple[NvLink, ...]:
        nvml, links = self._nvml, []
        for number in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = self.call("nvmlDeviceGetNvLinkState", device, number)
            if isinstance(state, NvmlRefusal):
                if state.error not in ABSENT:
                    links.append(NvLink(number, state))
            elif not state:
                links.append(NvLink(number, False))
            else:
                count = "nvmlDeviceGetNvLinkErrorCounter"
                replays = self.call(count, device, number, nvml.NVML_NVLINK_ERROR_DL_REPLAY)
                found = self.call(count, device, number, nvml.NVML_NVLINK_ERROR_DL_RECOVERY)
                if isinstance(found, NvmlRefusal):  # Newer links have a field instead.
                    found = self._field(device, _LINK_RECOVERIES, number)
                links.append(NvLink(number, True, replays, found))
        return tuple(links)


def _value(found: Any, get: Callable[[], Any], otherwise: Any = None) -> Any:
    """Take a value out of what NVML gave; if it refused, return that, or something else."""
    if not isinstance(found, NvmlRefusal):
        return get()
    return found if otherwise is None else otherwise


def open_nvml(replacement: str | None) -> Nvml:
    """Return the library, or the file that replaces it; nothing is loaded before the first look."""
    return NvmlLibrary() if replacement is None else NvmlFile(replacement)
