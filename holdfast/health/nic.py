"""Network devices: is a link down that was up, did one go down and come back?

Every InfiniBand port and every Ethernet device with hardware behind it is looked at. Those that are
nearest to a GPU carry the training: what happens to them fails the node. What happens to others, an
interface for management perhaps, is a warning. Where no GPU says which they are, all carry it.

A link that was never up is not cabled, for all we know, and no fault.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple
from xml.etree import ElementTree

from msgspec import Struct

from holdfast.health import pci
from holdfast.health.baseline import NicSeen, PortSeen, Seen
from holdfast.health.finding import Finding, Remark, counted, summed
from holdfast.health.node import Node
from holdfast.messages.health import Fact

_IB, _NET = "sys/class/infiniband", "sys/class/net"


class Port(Struct, frozen=True):
    state: str
    up: bool | None
    """None where the device does not say."""
    downs: int | None
    """How often the link went down, ever."""
    device: str
    """PCI address; empty where there is none."""


class Near(NamedTuple):
    by_gpu: dict[str, list[str]]
    """Names of devices by GPU's address."""
    addresses: set[str] | None
    """PCI addresses of the devices that carry the training; None: all do."""
    trouble: str | None


def check_nic(node: Node, before: Seen | None) -> Finding:
    ports = read_ports(node)
    near = find_near(node)
    found = judge_ports(ports, before if isinstance(before, NicSeen) else None, near.addresses)
    facts: dict[str, Fact] = {**found.facts}
    facts |= {f"near gpu {gpu}": ",".join(names) for gpu, names in near.by_gpu.items() if names}
    if near.trouble is None:
        return Finding(found.verdict, found.reason, facts, found.seen)
    trouble = Remark("unknown", near.trouble)
    return summed([Remark(found.verdict, found.reason), trouble], "", facts, found.seen)


def read_ports(node: Node) -> dict[str, Port]:
    """By name: "mlx5_0/1" for a port of InfiniBand, "eth0" for Ethernet."""
    ports: dict[str, Port] = {}
    for device in node.names(_IB):
        where = _address(node, f"{_IB}/{device}/device")
        for number in node.names(f"{_IB}/{device}/ports"):
            ports[f"{device}/{number}"] = _ib_port(node, f"{_IB}/{device}/ports/{number}", where)
    for device in node.names(_NET):
        if node.path(f"{_NET}/{device}/device").exists():
            where = _address(node, f"{_NET}/{device}/device")
            ports[device] = _net_port(node, f"{_NET}/{device}", where)
    return ports


def _address(node: Node, device: str) -> str:
    place = pci.place_of(node, device)
    return place[-1] if place else ""


def _ib_port(node: Node, base: str, device: str) -> Port:
    state = _word(node.text(f"{base}/state"))
    physical = _word(node.text(f"{base}/phys_state"))
    up = state == "ACTIVE" if state else None
    shown = f"{state} ({physical})" if physical and not up else state
    return Port(shown or "unknown", up, node.number(f"{base}/counters/link_downed"), device)


def _word(text: str | None) -> str:
    """The name in the kernel's "4: ACTIVE"."""
    return re.sub(r"^\s*[0-9]+:\s*", "", text or "").strip()


def _net_port(node: Node, base: str, device: str) -> Port:
    state = node.text(f"{base}/operstate") or "unknown"
    downs = node.number(f"{base}/carrier_down_count")
    if downs is None:
        downs = node.number(f"{base}/carrier_changes")
    return Port(state, {"up": True, "down": False}.get(state), downs, device)


def find_near(node: Node) -> Near:
    """Which devices are nearest to the GPUs, as the topology file or sysfs has it."""
    devices = {name: pci.place_of(node, f"{_IB}/{name}/device") for name in node.names(_IB)}
    if not devices:
        names = (name for name in node.names(_NET) if node.path(f"{_NET}/{name}/device").exists())
        devices = {name: pci.place_of(node, f"{_NET}/{name}/device") for name in names}
    places = {name: place for name, place in devices.items() if place}
    gpus, trouble = pci.gpu_places(node), None
    if node.settings.topology is not None:
        try:
            gpus, by_address = pci.read_topology(node.settings.topology)
            places = {n: by_address[p[-1]] for n, p in places.items() if p[-1] in by_address}
        except (OSError, ElementTree.ParseError) as error:
            trouble = f"the topology file {node.settings.topology} cannot be used: {error}"
    by_gpu = {gpu: pci.nearest(place, places) for gpu, place in gpus.items()}
    near = {devices[name][-1] for names in by_gpu.values() for name in names}
    return Near(by_gpu, near or None, trouble)


def judge_ports(
    ports: Mapping[str, Port], before: NicSeen | None, carrying: Collection[str] | None
) -> Finding:
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
    """That a link was up stays known, so that it is missed until it is up again."""
    up = port.up is True or (was is not None and was.up)
    if port.downs is None:
        return PortSeen(up, was.downs if was else 0)
    return PortSeen(up, port.downs)
