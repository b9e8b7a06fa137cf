"""NVIDIA's management library itself, called through ctypes so that nothing need be installed.

The names, structures and numbers are those of nvml.h. Functions that came later (`_v2`, `_v3`) are
part of every driver since 510; where one is missing, what it would have told is refused.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from typing import Any

from holdfast.health.nvml import ABSENT, ERRORS, Gpu, GpuProcess, Gpus, Link, NoNvml, Refused

LIBRARY = "libnvidia-ml.so.1"

_NOT_FOUND = 13
_TOO_SMALL = 7
_UNCORRECTED, _SINCE_RESET = 1, 0
_REPLAYS, _RECOVERIES = 0, 1
_FIELD_RECOVERY_ACTION = 230
_FIELD_LINK_RECOVERIES = 215
_MOST_LINKS = 36
_NOT_TOLD = (1 << 64) - 1


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("device_id", c_uint),
        ("subsystem_id", c_uint),
        ("bus_id", c_char * 32),
    )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", c_uint),
        ("used", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


class _Value(ctypes.Union):
    _fields_ = (("unsigned", c_uint), ("long", c_ulonglong))


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field", c_uint),
        ("scope", c_uint),
        ("timestamp", c_longlong),
        ("latency_us", c_longlong),
        ("kind", c_uint),
        ("error", c_uint),
        ("value", _Value),
    )


class NvmlLibrary:
    def look(self) -> Gpus | NoNvml:
        try:
            session = _Session(ctypes.CDLL(LIBRARY))
        except OSError:
            return NoNvml(f"no NVML here ({LIBRARY} is not found)")
        error = session.call("nvmlInit_v2")
        if error:
            return NoNvml(f"NVML does not answer: {ERRORS.get(error, f'error {error}')}")
        try:
            return session.gpus()
        finally:
            session.call("nvmlShutdown")


class _Session:
    """The library between its start and its end."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> int:
        """A function's error number; 0 is success."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return _NOT_FOUND
        return int(function(*arguments))

    def gpus(self) -> Gpus | NoNvml:
        count = c_uint()
        if error := self.call("nvmlDeviceGetCount_v2", byref(count)):
            return NoNvml(f"NVML does not count the GPUs: {Refused(error)}")
        driver = self._text("nvmlSystemGetDriverVersion")
        return Gpus(driver=driver, gpus=tuple(map(self._gpu, range(count.value))))

    def _gpu(self, index: int) -> Gpu:
        device = c_void_p()
        if error := self.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(device)):
            return Gpu(index=index, handle=Refused(error))
        pending, failed = self._remapped(device)
        return Gpu(
            index=index,
            uuid=self._text("nvmlDeviceGetUUID", device),
            pci=self._pci(device),
            name=self._text("nvmlDeviceGetName", device),
            recovery=self._field(device, _FIELD_RECOVERY_ACTION),
            ecc_uncorrected=self._ecc(device),
            remap_pending=pending,
            remap_failed=failed,
            used_bytes=self._used(device),
            processes=self._processes(device),
            links=self._links(device),
        )

    def _text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        error = self.call(name, *arguments, buffer, c_uint(len(buffer)))
        return "" if error else buffer.value.decode(errors="replace")

    def _pci(self, device: c_void_p) -> str:
        """Its PCI address, as sysfs writes it."""
        info = _PciInfo()
        if self.call("nvmlDeviceGetPciInfo_v3", device, byref(info)):
            return ""
        return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"

    def _field(self, device: c_void_p, number: int, scope: int = 0) -> int | Refused:
        value = _FieldValue(field=number, scope=scope)
        error = self.call("nvmlDeviceGetFieldValues", device, c_int(1), byref(value))
        if error or value.error:
            return Refused(error or int(value.error))
        wide = value.kind in (2, 3)  # unsigned long, unsigned long long
        return int(value.value.long if wide else value.value.unsigned)

    def _ecc(self, device: c_void_p) -> int | Refused:
        count = c_ulonglong()
        kind, period = c_uint(_UNCORRECTED), c_uint(_SINCE_RESET)
        error = self.call("nvmlDeviceGetTotalEccErrors", device, kind, period, byref(count))
        return Refused(error) if error else count.value

    def _remapped(self, device: c_void_p) -> tuple[bool | Refused, bool | Refused]:
        """Whether memory rows wait for a reset to be replaced, and whether replacing failed."""
        rows = [c_uint() for _ in range(4)]
        error = self.call("nvmlDeviceGetRemappedRows", device, *map(byref, rows))
        if error:
            return Refused(error), Refused(error)
        return bool(rows[2].value), bool(rows[3].value)

    def _used(self, device: c_void_p) -> int | Refused:
        memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        error = self.call("nvmlDeviceGetMemoryInfo_v2", device, byref(memory))
        return Refused(error) if error else int(memory.used)

    def _processes(self, device: c_void_p) -> tuple[GpuProcess, ...] | Refused:
        found: dict[int, GpuProcess] = {}
        for kind in ("Compute", "Graphics", "MPSCompute"):
            listed = self._listed(f"nvmlDeviceGet{kind}RunningProcesses_v3", device)
            if isinstance(listed, Refused):
                if kind == "Compute":
                    return listed
                continue
            found |= {process.pid: process for process in listed}
        return tuple(found.values())

    def _listed(self, name: str, device: c_void_p) -> list[GpuProcess] | Refused:
        room = 64
        while True:
            count = c_uint(room)
            processes = (_Process * room)()
            error = self.call(name, device, byref(count), processes)
            if error != _TOO_SMALL:
                break
            room = 2 * max(room, count.value)
        if error:
            return Refused(error)
        return [
            GpuProcess(process.pid, None if process.used == _NOT_TOLD else process.used)
            for process in processes[: count.value]
        ]

    def _links(self, device: c_void_p) -> tuple[Link, ...]:
        links = []
        for number in range(_MOST_LINKS):
            state = c_uint()
            error = self.call("nvmlDeviceGetNvLinkState", device, c_uint(number), byref(state))
            if error in ABSENT:
                continue
            if error:
                links.append(Link(number, Refused(error)))
            elif not state.value:
                links.append(Link(number, False))
            else:
                replays = self._counter(device, number, _REPLAYS)
                links.append(Link(number, True, replays, self._recoveries(device, number)))
        return tuple(links)

    def _counter(self, device: c_void_p, link: int, kind: int) -> int | Refused:
        count = c_ulonglong()
        name = "nvmlDeviceGetNvLinkErrorCounter"
        error = self.call(name, device, c_uint(link), c_uint(kind), byref(count))
        return Refused(error) if error else count.value

    def _recoveries(self, device: c_void_p, link: int) -> int | Refused:
        """From the counter of older links, or the field of newer ones."""
        counted = self._counter(device, link, _RECOVERIES)
        if isinstance(counted, int):
            return counted
        return self._field(device, _FIELD_LINK_RECOVERIES, link)
