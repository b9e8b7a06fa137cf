"""Defines what a node's machine is used for: CPUs, memory, network, GPUs.

An agent reports it now and then, and only when it has changed: see `agent.node_sampler`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.messages.units import Count

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Rate = Annotated[float, Meta(ge=0.0, le=1e18)]

MAX_GPUS = 64
"""GPUs of one node that a sample describes."""


class GpuUsage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much of one GPU is in use."""

    busy: Share | None = None
    """Share of the time in which a kernel ran; null if the driver does not tell."""
    memory_used_bytes: Count = 0
    """Memory in use."""
    memory_bytes: Count = 0
    """Memory that it has; 0 if the driver does not tell."""


class NodeUsage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much of a node is in use: the mean since the sample before."""

    cpu: Share | None = None
    """Share of the CPU time that the node's cgroup may use, or of the CPUs that it may run on; null
    if unknown."""
    cpus: Rate = 0.0
    """CPUs that this is a share of; 0 if unknown."""
    memory_used_bytes: Count = 0
    """Memory in use, without cached files, against the tightest limit; the most since the sample
    before."""
    memory_bytes: Count = 0
    """That limit: the cgroup's or the machine's; 0 if unknown."""
    received_bytes_per_s: Rate | None = None
    """Received from the network, RDMA included; null if unknown."""
    sent_bytes_per_s: Rate | None = None
    """Sent to the network, RDMA included; null if unknown."""
    gpus: Annotated[tuple[GpuUsage, ...], Meta(max_length=MAX_GPUS)] = ()
    """GPUs in NVML's order; empty where there are none, or NVML is missing."""

    @property
    def memory(self) -> float | None:
        """Share of the memory that is in use; None if unknown."""
        return self.memory_used_bytes / self.memory_bytes if self.memory_bytes else None

    @property
    def gpu(self) -> float | None:
        """Mean of what is known of the GPUs; None if nothing is."""
        known = [one.busy for one in self.gpus if one.busy is not None]
        return sum(known) / len(known) if known else None

    @property
    def network_bytes_per_s(self) -> float | None:
        """Received and sent together; None if unknown."""
        if self.received_bytes_per_s is None or self.sent_bytes_per_s is None:
            return None
        return self.received_bytes_per_s + self.sent_bytes_per_s
