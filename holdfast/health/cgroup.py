"""The control groups that this process is in, for both versions of the kernel's interface.

A limit may be set at any level above us, so all levels are given, ours first. In a container the
path that the kernel names may not be visible; then what is mounted is taken, which is ours.
"""

from __future__ import annotations

from holdfast.health.node import Node

_MOUNT = "sys/fs/cgroup"


def own_groups(node: Node, controller: str) -> list[str]:
    """Directories of the groups that limit us in that respect, the innermost first."""
    groups: list[str] = []
    for line in (node.text("proc/self/cgroup") or "").splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers == "":
            groups += _levels(node, _MOUNT, path)
        elif controller in controllers.split(","):
            groups += _levels(node, f"{_MOUNT}/{controller}", path)
    return groups


def _levels(node: Node, mount: str, path: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    levels = ["/".join([mount, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return [level for level in levels if node.path(level).is_dir()]
