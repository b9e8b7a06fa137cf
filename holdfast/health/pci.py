"""Finds the network devices that are near a GPU.

Near means a short way through the PCI tree: the one in sysfs, or, where a virtual machine hides it, the
one in a topology file of NCCL's format. A device's path in the tree is the tuple of bridges from the
root down to it; the more of it two devices share, the nearer they are. Several devices may be equally
near, and then all of them count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import takewhile
from xml.etree import ElementTree

from holdfast.health.node import Node

PciPath = tuple[str, ...]

_PART = re.compile(r"pci[0-9a-f:]+|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.IGNORECASE)
_GPU_VENDORS = ("0x10de", "0x1002")
_GPU_CLASSES = ("0x03", "0x12")
_NIC_CLASSES = ("0x02",)


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
