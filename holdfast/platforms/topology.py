"""The topology is a node's place in the infrastructure, read from its environment.

The infra rank orders nodes as the scheduler placed them. Its sources, of which the first that is set
wins:

    HOLDFAST_INFRA_RANK            set by the user
    HOLDFAST_RANK_FROM_NODENAME    if true: the digits in SLURMD_NODENAME, or in the host's name
    CROSS_SLURM_PROCID             a rank over several Slurm jobs
    SLURM_TOPOLOGY_ADDR            block and node numbers, where Slurm knows the topology
    SLURM_ARRAY_TASK_ID            with SLURM_NNODES and SLURM_PROCID: the place within an array
    SLURM_PROCID                   the place within the job
    GROUP_RANK                     set by another launcher

Labels name what a node shares with its neighbours: HOLDFAST_SWITCH and HOLDFAST_BLOCK (or else the
parts of SLURM_TOPOLOGY_ADDR), and HOLDFAST_DOMAIN, the fast interconnect of a segment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from holdfast.config.sources import from_environment
from holdfast.errors import UsageError

_BLOCK_STRIDE = 10**10


def infra_rank(environ: Mapping[str, str], host: str) -> int | None:
    """The node's place in the infrastructure's order; None if no source is set."""
    if "HOLDFAST_INFRA_RANK" in environ:
        return _number(environ, "HOLDFAST_INFRA_RANK")
    if from_environment(environ).rank_from_nodename:
        return _digits(environ.get("SLURMD_NODENAME", host), "HOLDFAST_RANK_FROM_NODENAME")
    if "CROSS_SLURM_PROCID" in environ:
        return _number(environ, "CROSS_SLURM_PROCID")
    if "SLURM_TOPOLOGY_ADDR" in environ:
        block, node = _topology(environ["SLURM_TOPOLOGY_ADDR"])
        return _digits(block, "SLURM_TOPOLOGY_ADDR") * _BLOCK_STRIDE + _digits(
            node, "SLURM_TOPOLOGY_ADDR"
        )
    if "SLURM_ARRAY_TASK_ID" in environ and "SLURM_PROCID" in environ:
        task, nodes = _number(environ, "SLURM_ARRAY_TASK_ID"), _number(environ, "SLURM_NNODES")
        return task * nodes + _number(environ, "SLURM_PROCID")
    for name in ("SLURM_PROCID", "GROUP_RANK"):
        if name in environ:
            return _number(environ, name)
    return None


def labels(environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Switch, block and domain of this node; empty where unknown."""
    given = from_environment(environ)
    block, switch = given.block, given.switch
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    if address and not (block or switch):
        parts = address.split(".")
        block, switch = parts[0], ".".join(parts[:-1])
    return switch, block, given.domain


def node_name(environ: Mapping[str, str], host: str) -> str:
    """The platform's name for this node, by which it can be avoided; the host's where it has none."""
    return from_environment(environ).node_name or environ.get("SLURMD_NODENAME") or host


def request(environ: Mapping[str, str]) -> str:
    """The request that a supplier started this node for; empty if somebody else did."""
    return from_environment(environ).request


def _topology(address: str) -> tuple[str, str]:
    parts = address.split(".")
    return parts[0] if len(parts) > 1 else "0", parts[-1]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r}: a whole number is needed to place this node") from None


def _digits(text: str, source: str) -> int:
    found = re.findall(r"\d+", text)
    if not found:
        raise UsageError(f"{source}: no number in {text!r} to place this node by")
    return int(found[-1])
