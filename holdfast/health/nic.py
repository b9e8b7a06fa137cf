"""Checks the network devices: is a link down that was up, did one go down and come back?

Every InfiniBand port and every Ethernet device with hardware behind it is checked. Those nearest to a
GPU carry the training: what happens to them fails the node. For others, perhaps a management interface,
it is a warning. Where no GPU shows which they are, all carry it. A link that was never up is probably
not cabled, and no fault.

Near means a short way through the PCI tree: the one in sysfs, or, where a virtual machine hides it, the
one in a topology file of NCCL's format. A device's path in the tree is the tuple of bridges from the
root down to it; the more of it two devices share, the nearer they are. Several devices may be equally
near, and then all of them count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import NamedTuple
from xml.etree import ElementTree

from msgspec import Struct

from holdfast.health.baseline import NicSeen, PortSeen
from holdfast.health.judgement import Judgement, Remark, counted, summed
from holdfast.health.node import Node
from holdfast.messages.health import Fact

_IB, _NET = "sys/class/infiniband", "sys/class/net"
_PART = re.compile(r"pci[0-9a-f:]+|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.IGNORECASE)
_GPU_VENDORS = ("0x10de", "0x1002")
_GPU_CLASSES = ("0x03", "0x12")
_NIC_CLASSES = ("0x02",)

PciPath = tuple[str, ...]


class Port(Struct, frozen=True):
    """A port of a network device."""

    state: str
    up: bool | None
    """None if the device does not report it."""
    downs: int | None
    """Number of times that the link went down, ever."""
    device: str
    """PCI address; empty if there is none."""


class Near(NamedTuple):
    """Which devices are nearest to the GPUs."""

    by_gpu: dict[str, list[str]]
    """Names of devices by the GPU's PCI address."""
    addresses: set[str] | None
    """PCI addresses of the devices that carry the training; None: all do."""
    trouble: str | None


def check_nic(node: Node, before: NicSeen | None) -> Judgement:
    near = find_near(node)
    found = judge_ports(read_ports(node), before, near.addresses)
    facts: dict[str, Fact] = {**found.facts}
    facts |= {f"near gpu {gpu}": ",".join(names) for gpu, names in near.by_gpu.items() if names}
    if near.trouble is None:
        return Judgement(found.verdict, found.reason, facts, found.seen)
    trouble = Remark("unknown", near.trouble)
    return summed([Remark(found.verdict, found.reason), trouble], "", facts, found.seen)


def read_ports(node: Node) -> dict[str, Port]:
    """Read all ports by name: "mlx5_0/1" for a port of InfiniBand, "eth0" for Ethernet."""
    ports: dict[str, Port] = {}
    for device in node.names(_IB):
        where = _address(node, f"{_IB}/{device}/device")
        for number in node.names(f"{_IB}/{device}/ports"):
            ports[f"{device}/{number}"] = _ib_port(node, f"{_IB}/{device}/ports/{number}", where)
    for device in _ethernets(node):
        where = _address(node, f"{_NET}/{device}/device")
        ports[device] = _net_port(node, f"{_NET}/{device}", where)
    return ports


def _ethernets(node: Node) -> list[str]:
    return [name for name in node.names(_NET) if node.path(f"{_NET}/{name}/device").exists()]


def _address(node: Node, device: str) -> str:
    path = path_of(node, device)
    return path[-1] if path else ""


def _ib_port(node: Node, base: str, device: str) -> Port:
    state = _word(node.text(f"{base}/state"))
    physical = _word(node.text(f"{base}/phys_state"))
    up = state == "ACTIVE" if state else None
    shown = f"{state} ({physical})" if physical and not up else state
    return Port(shown or "unknown", up, node.number(f"{base}/counters/link_downed"), device)


def _word(text: str | None) -> str:
    """Return the name in the kernel's "4: ACTIVE"."""
    return re.sub(r"^\s*[0-9]+:\s*", "", text or "").strip()


def _net_port(node: Node, base: str, device: str) -> Port:
    state = node.text(f"{base}/operstate") or "unknown"
    downs = node.number(f"{base}/carrier_down_count")
    if downs is None:
        downs = node.number(f"{base}/carrier_changes")
    return Port(state, {"up": True, "down": False}.get(state), downs, device)


def judge_ports(
    ports: Mapping[str, Port], before: NicSeen | None, carrying: Collection[str] | None
) -> Judgement:
    known = before.ports if before else {}
    remarks = [
        Remark("fail", f"{name} was up at an earlier look and is gone")
        for name, was in known.items()
        if was.up and name not in ports
    ]
    for name, port in ports.items():
        carries = carrying is None or port.device in carrying
        remark = _port(name, port, known.get(name), carries and carrying is not None)
        if remark is not None:
            softer = remark.verdict == "fail" and not carries
            remarks.append(remark._replace(verdict="warn") if softer else remark)
    up = sum(port.up is True for port in ports.values())
    if not remarks and not up:
        remarks.append(Remark("unknown", "no link is up here, and none was before"))
    noted = {name: _noted(port, known.get(name)) for name, port in ports.items()}
    fine = f"{up} of {len(ports)} links up" + ("" if before else "; first look, counters noted")
    facts: dict[str, Fact] = {"links": len(ports), "links_up": up}
    return summed(remarks, fine, facts, NicSeen({**known, **noted}))


def _port(name: str, port: Port, was: PortSeen | None, near_gpu: bool) -> Remark | None:
    if was is not None and was.up and port.up is False:
        return Remark("fail", f"{name} was up and is {port.state}")
    if was is not None and port.downs is not None and port.downs > was.downs:
        times = counted(port.downs - was.downs, "time")
        return Remark("fail", f"{name} went down {times} since the last look")
    if port.up is False and near_gpu:
        return Remark("warn", f"{name} is {port.state}, and it is the one nearest to a GPU")
    return None


def _noted(port: Port, was: PortSeen | None) -> PortSeen:
    """Note a port; one that was up is missed until it is up again."""
    up = port.up is True or (was is not None and was.up)
    if port.downs is None:
        return PortSeen(up, was.downs if was else 0)
    return PortSeen(up, port.downs)


# ---- nearness -----------------------------------------------------------------------------------


def find_near(node: Node) -> Near:
    """Find the devices nearest to the GPUs, by the topology file or sysfs."""
    devices = {name: path_of(node, f"{_IB}/{name}/device") for name in node.names(_IB)}
    if not devices:
        devices = {name: path_of(node, f"{_NET}/{name}/device") for name in _ethernets(node)}
    paths = {name: path for name, path in devices.items() if path}
    gpus, trouble = gpu_paths(node), None
    if node.settings.topology is not None:
        try:
            gpus, by_address = read_topology(node.settings.topology)
            paths = {n: by_address[p[-1]] for n, p in paths.items() if p[-1] in by_address}
        except (OSError, ElementTree.ParseError) as error:
            trouble = f"the topology file {node.settings.topology} cannot be used: {error}"
    by_gpu = {gpu: nearest(path, paths) for gpu, path in gpus.items()}
    near = {devices[name][-1] for names in by_gpu.values() for name in names}
    return Near(by_gpu, near or None, trouble)


def address(text: str) -> str:
    """Write a PCI address as sysfs does."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}"


def path_of(node: Node, device: str) -> PciPath:
    """Return the path of a device in sysfs; empty if it is not on PCI."""
    real = os.path.realpath(node.path(device))
    return tuple(part.lower() for part in real.split(os.sep) if _PART.fullmatch(part))


def gpu_paths(node: Node) -> dict[str, PciPath]:
    """Return the paths of the GPUs by address."""
    base = "sys/bus/pci/devices"
    return {
        name: path_of(node, f"{base}/{name}")
        for name in node.names(base)
        if (node.text(f"{base}/{name}/vendor") or "") in _GPU_VENDORS
        and (node.text(f"{base}/{name}/class") or "").startswith(_GPU_CLASSES)
    }


def read_topology(path: str) -> tuple[dict[str, PciPath], dict[str, PciPath]]:
    """Read the paths of GPUs and network devices, by address, from a file in NCCL's XML.

    Raises OSError or ElementTree.ParseError (a SyntaxError) if that is impossible.
    """
    gpus: dict[str, PciPath] = {}
    nics: dict[str, PciPath] = {}

    def walk(element: ElementTree.Element, above: PciPath) -> None:
        for number, inner in enumerate(element):
            bus = inner.get("busid")
            here = (*above, address(bus) if bus else f"{inner.tag}{number}")
            if inner.tag == "pci" and bus:
                kind = inner.get("class", "")
                if kind.startswith(_GPU_CLASSES) or inner.find("gpu") is not None:
                    gpus[address(bus)] = here
                elif kind.startswith(_NIC_CLASSES) or inner.find("nic") is not None:
                    nics[address(bus)] = here
            walk(inner, here)

    walk(ElementTree.parse(path).getroot(), ())
    return gpus, nics


def nearest(gpu: PciPath, nics: Mapping[str, PciPath]) -> list[str]:
    """Return the devices that share most of their path with a GPU; none if none shares any."""
    shared = {name: _shared(gpu, path) for name, path in nics.items()}
    most = max(shared.values(), default=0)
    return [name for name, length in shared.items() if length == most and most > 0]


def _shared(one: PciPath, other: PciPath) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
