"""Which network devices are near which GPU.

Near means: the way through the PCI tree is short. The tree is the one that the machine's files show,
or, where a virtual machine hides it, the one in a topology file of NCCL's format. A place in it is
the tuple of bridges from the root down to the device; the more of it two devices share, the nearer
they are. Several devices may be equally near, and then all of them count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from xml.etree import ElementTree

from holdfast.health.node import Node

Place = tuple[str, ...]

_PART = re.compile(r"pci[0-9a-f:]+|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.IGNORECASE)
_GPU_VENDORS = ("0x10de", "0x1002")
_GPU_CLASSES = ("0x03", "0x12")
_NIC_CLASSES = ("0x02",)


def address(text: str) -> str:
    """A PCI address as sysfs writes it, whoever wrote this one."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}"


def place_of(node: Node, device: str) -> Place:
    """Where a device of sysfs sits; empty if it is not on PCI."""
    real = os.path.realpath(node.path(device))
    return tuple(part.lower() for part in real.split(os.sep) if _PART.fullmatch(part))


def gpu_places(node: Node) -> dict[str, Place]:
    """GPUs by address."""
    base = "sys/bus/pci/devices"
    return {
        name: place_of(node, f"{base}/{name}")
        for name in node.names(base)
        if (node.text(f"{base}/{name}/vendor") or "") in _GPU_VENDORS
        and (node.text(f"{base}/{name}/class") or "").startswith(_GPU_CLASSES)
    }


def read_topology(path: str) -> tuple[dict[str, Place], dict[str, Place]]:
    """Places of GPUs and of network devices, by address, from a file in NCCL's XML.

    Raises OSError or ElementTree.ParseError (a SyntaxError) where that cannot be had.
    """
    gpus: dict[str, Place] = {}
    nics: dict[str, Place] = {}

    def walk(element: ElementTree.Element, above: Place) -> None:
        for number, inner in enumerate(element):
            bus = inner.get("busid")
            place = (*above, address(bus) if bus else f"{inner.tag}{number}")
            if inner.tag == "pci" and bus:
                kind = inner.get("class", "")
                if kind.startswith(_GPU_CLASSES) or inner.find("gpu") is not None:
                    gpus[address(bus)] = place
                elif kind.startswith(_NIC_CLASSES) or inner.find("nic") is not None:
                    nics[address(bus)] = place
            walk(inner, place)

    walk(ElementTree.parse(path).getroot(), ())
    return gpus, nics


def nearest(gpu: Place, nics: Mapping[str, Place]) -> list[str]:
    """The devices that share most of the way with a GPU; none where none shares any."""
    shared = {name: _shared(gpu, place) for name, place in nics.items()}
    most = max(shared.values(), default=0)
    return [name for name, length in shared.items() if length == most and most > 0]


def _shared(one: Place, other: Place) -> int:
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length
