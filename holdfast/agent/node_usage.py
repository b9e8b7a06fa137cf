"""Reads how much of this machine is in use: CPUs, memory, network, GPUs.

Counters only grow, so two readings and the time between them give a mean. What concerns CPUs and memory
is judged against what this process may use, because an agent often runs in a container or in a job of a
cluster that has only a part of the machine:

    CPUs      a quota of the cgroup (cpu.max, or cpu.cfs_quota_us): what the cgroup used of it;
              without one, what the CPUs of our affinity did, whoever used them
    memory    the tightest limit of the cgroups and the machine: see `cgroups.memory_left`
    network   interfaces with a device behind them, so that a bond or a bridge does not count twice;
              in a container there are none, and all but the loopback count. RDMA ports count too
    GPUs      NVML, where it is installed

What the kernel does not show reads as unknown, never as an error.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast import cgroups
from holdfast.messages.usage import MAX_GPUS, GpuUsage

ROOT: Final = Path("/")
_IDLE, _IOWAIT, _FIELDS = 3, 4, 8
"""Fields of a line of /proc/stat; those after the eighth are part of the others."""
_RDMA_WORD_BYTES: Final = 4
"""RDMA ports count in words."""


class Capacity(NamedTuple):
    """CPU time used so far, and how much may be used at most."""

    used_s: float
    cpus: float


class Traffic(NamedTuple):
    """Bytes received and sent so far."""

    received: int
    sent: int


class MachineReading(NamedTuple):
    """All that is known at one moment."""

    at: float
    cpu: Capacity | None
    memory_used_bytes: int
    memory_bytes: int
    traffic: Traffic | None
    gpus: tuple[GpuUsage, ...] = ()


def cpu_use(root: Path = ROOT) -> Capacity | None:
    """Return the CPU time that was used of what this process may use."""
    allowed = os.sched_getaffinity(0)
    quota = _quota(root)
    if quota is not None and quota.cpus < len(allowed):
        return quota
    return _machine(root, allowed)


def _quota(root: Path) -> Capacity | None:
    """Return the tightest quota of our cgroups, and what that cgroup has used."""
    found = []
    for controllers, path in _own_cgroups(root):
        top = root / "sys/fs/cgroup"
        mounted = top / controllers if controllers else top
        if controllers and not mounted.is_dir():
            mounted = top / "cpu"
        inner = Path(path.strip("/"))
        for level in [] if ".." in inner.parts else [inner, *inner.parents]:
            one = _quota_of(mounted / level)
            if one is not None:
                found.append(one)
    return min(found, key=lambda one: one.cpus, default=None)


def _quota_of(cgroup: Path) -> Capacity | None:
    words = _text(cgroup / "cpu.max").split()
    if len(words) == 2 and words[0] != "max":
        stat = dict(line.split()[:2] for line in _text(cgroup / "cpu.stat").splitlines())
        if "usage_usec" in stat:
            return Capacity(int(stat["usage_usec"]) / 1e6, int(words[0]) / int(words[1]))
    older, period = _text(cgroup / "cpu.cfs_quota_us"), _text(cgroup / "cpu.cfs_period_us")
    if older.strip().isdigit() and period.strip().isdigit() and int(period):
        used = _text(cgroup / "cpuacct.usage").strip()
        if used.isdigit():
            return Capacity(int(used) / 1e9, int(older) / int(period))
    return None


def _own_cgroups(root: Path) -> list[tuple[str, str]]:
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    return [(c, path) for _, c, path in lines if not c or "cpu" in c.split(",")]


def _machine(root: Path, allowed: set[int]) -> Capacity | None:
    tick = os.sysconf("SC_CLK_TCK")
    busy, found = 0, 0
    for line in _text(root / "proc/stat").splitlines():
        name, _, rest = line.partition(" ")
        if name == "cpu" or not name.startswith("cpu"):
            continue
        if int(name[3:]) in allowed:
            ticks = [int(word) for word in rest.split()[:_FIELDS]]
            busy += sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT]
            found += 1
    return Capacity(busy / tick, found) if found else None


def memory_use(root: Path = ROOT) -> tuple[int, int]:
    """Return the memory in use and the tightest limit; (0, 0) if unknown."""
    left, limit = cgroups.memory_left(root / "proc", root / "sys/fs/cgroup")
    return max(0, limit - left), limit


def traffic(root: Path = ROOT) -> Traffic | None:
    """Return what the network has carried so far."""
    counts: dict[str, Traffic] = {}
    for line in _text(root / "proc/self/net/dev").splitlines()[2:]:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) >= 9 and name.strip() != "lo":
            counts[name.strip()] = Traffic(int(words[0]), int(words[8]))
    devices = [name for name in counts if (root / "sys/class/net" / name / "device").exists()]
    chosen = [counts[name] for name in devices or counts]
    chosen += _rdma(root / "sys/class/infiniband")
    if not chosen:
        return None
    return Traffic(sum(one.received for one in chosen), sum(one.sent for one in chosen))


def _rdma(folder: Path) -> list[Traffic]:
    found = []
    with suppress(OSError):
        for port in folder.glob("*/ports/*/counters"):
            words = [_text(port / name).strip() for name in ("port_rcv_data", "port_xmit_data")]
            if all(word.isdigit() for word in words):
                received, sent = (int(word) * _RDMA_WORD_BYTES for word in words)
                found.append(Traffic(received, sent))
    return found


class GpuReader:
    """The GPUs as NVML shows them; it stays open, because opening it takes tenths of a second."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        try:
            import pynvml
        except ImportError:
            return
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            count = min(pynvml.nvmlDeviceGetCount(), MAX_GPUS)
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        self._nvml = pynvml

    def read(self) -> tuple[GpuUsage, ...]:
        return tuple(self._read(device) for device in self._devices)

    def _read(self, device: Any) -> GpuUsage:
        nvml, busy, used, total = self._nvml, None, 0, 0
        with suppress(nvml.NVMLError):
            busy = min(1.0, nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)
        with suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
            used, total = int(memory.used), int(memory.total)
        return GpuUsage(busy=busy, memory_used_bytes=used, memory_bytes=total)


def read(now: float, gpus: GpuReader | None = None, root: Path = ROOT) -> MachineReading:
    """Read everything."""
    used, limit = memory_use(root)
    shown = gpus.read() if gpus is not None else ()
    return MachineReading(now, cpu_use(root), used, limit, traffic(root), shown)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
