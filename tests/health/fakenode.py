"""A made-up machine: trees like the kernel's below a directory, and a file in place of NVML."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from holdfast.health.node import Node
from holdfast.health.settings import HealthLimits, HealthSettings

GIB = 1 << 30


class FakeNode:
    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, inner: str, content: object) -> Path:
        path = self.root / inner
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
        return path

    def link(self, inner: str, target: str) -> None:
        path = self.root / inner
        path.parent.mkdir(parents=True, exist_ok=True)
        (self.root / target).mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(self.root / target, path.parent))

    # ---- what a machine is made of ----

    def pci(self, place: str, vendor: str, kind: str) -> str:
        """A device on PCI, given by its way from the root: "pci0000:00/0000:00:01.0/..."."""
        device = f"sys/devices/{place}"
        self.write(f"{device}/vendor", vendor)
        self.write(f"{device}/class", kind)
        self.link(f"sys/bus/pci/devices/{place.rpartition('/')[2]}", device)
        return device

    def pci_gpu(self, place: str) -> None:
        self.pci(place, "0x10de", "0x030200")

    def infiniband(self, name: str, place: str, state: str = "4: ACTIVE", downs: int = 0) -> None:
        device = self.pci(place, "0x15b3", "0x020700")
        port = f"{device}/infiniband/{name}/ports/1"
        self.write(f"{port}/state", state)
        self.write(f"{port}/phys_state", "5: LinkUp" if "ACTIVE" in state else "3: Disabled")
        self.write(f"{port}/counters/link_downed", downs)
        self.link(f"sys/class/infiniband/{name}", f"{device}/infiniband/{name}")
        self.link(f"{device}/infiniband/{name}/device", device)

    def ethernet(self, name: str, place: str, state: str = "up", changes: int = 1) -> None:
        device = self.pci(place, "0x8086", "0x020000")
        self.write(f"{device}/net/{name}/operstate", state)
        self.write(f"{device}/net/{name}/carrier_changes", changes)
        self.link(f"sys/class/net/{name}", f"{device}/net/{name}")
        self.link(f"{device}/net/{name}/device", device)

    def gpus(self, *gpus: dict[str, Any], driver: str = "570.86.15") -> None:
        described = [{"index": i, "uuid": f"GPU-{i}", **gpu} for i, gpu in enumerate(gpus)]
        self.write("nvml.json", json.dumps({"driver": driver, "gpus": described}))

    def cores(self, online: str, present: str | None = None) -> None:
        self.write("sys/devices/system/cpu/online", online)
        self.write("sys/devices/system/cpu/present", present or online)

    def memory(self, total_gib: float, available_gib: float) -> None:
        kib = 1 << 20
        lines = [
            f"MemTotal:       {int(total_gib * kib)} kB",
            f"MemAvailable:   {int(available_gib * kib)} kB",
        ]
        self.write("proc/meminfo", "\n".join(lines))

    def sees_all_processes(self) -> None:
        (self.root / "proc/self/ns").mkdir(parents=True, exist_ok=True)
        (self.root / "proc/self/ns/pid").symlink_to("pid:[4026531836]")

    # ---- how it is looked at ----

    def settings(self, **changes: Any) -> HealthSettings:
        given = {
            "root": str(self.root),
            "nvml": str(self.root / "nvml.json"),
            "installed_checks": False,
            "settle_s": 0.0,
            **changes,
        }
        return HealthSettings(**given)

    def node(self, limits: HealthLimits | None = None, **changes: Any) -> Node:
        """One look; a second one needs another."""
        return Node(self.settings(limits=limits or HealthLimits(), **changes))
