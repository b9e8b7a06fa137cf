"""Defines what the id of a node consists of: HOST:PID-LAUNCH.

Host and pid alone are not unique: containers share hostnames, and in each the first pids are the same.
So every launcher draws a word of its own for the ids of its agents.
"""

from __future__ import annotations

from holdfast.messages.units import NodeId


def node_id(host: str, pid: int, launch: str) -> NodeId:
    """Write the id of the node whose agent has this pid, and whose launcher drew that word."""
    return NodeId(f"{host}:{pid}-{launch}")


def host_of(node: NodeId) -> str:
    return node.rpartition(":")[0]


def same_launcher(one: NodeId, other: NodeId) -> bool:
    """Return whether two agents were started by one launcher."""
    return (host_of(one), _launch_of(one)) == (host_of(other), _launch_of(other))


def _launch_of(node: NodeId) -> str:
    return node.rpartition(":")[2].partition("-")[2]
