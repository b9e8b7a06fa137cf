"""Defines section timings, and the findings about slow ranks that are derived from them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.messages.units import Listed, Rank, Seconds, StepNumber

STEP = "step"
"""Section of the whole step; all other sections are parts of it."""
FORWARD, BACKWARD, OPTIMIZER, BETWEEN = "forward", "backward", "optimizer", "between"

Kind = Literal["relative", "individual"]
"""Slow compared with the other ranks, or with this rank's own best."""


class Timing(Struct, frozen=True, kw_only=True):
    """One section of one rank since the last report."""

    section: Annotated[str, Meta(min_length=1, max_length=200)]
    count: Annotated[int, Meta(ge=0, le=1 << 53)]
    median_s: Seconds
    total_s: Seconds
    waits: bool = False
    """Whether the time may include waiting for other ranks, as in a backward pass of DDP."""


class CpuShortage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Time that a rank's busiest thread wanted to run and had no CPU, since the last report."""

    queued_s: Seconds = 0.0
    """Run-queue delay: another thread had the CPU."""
    throttled_s: Seconds = 0.0
    """The cgroup had used up its quota."""
    stolen_s: Seconds = 0.0
    """The hypervisor had given the CPU to another virtual machine."""

    @property
    def total_s(self) -> Seconds:
        return self.queued_s + self.throttled_s + self.stolen_s


class RankTimings(Struct, frozen=True, kw_only=True):
    rank: Rank
    timings: Listed[Timing]
    shortage: CpuShortage = CpuShortage()


class Finding(Struct, frozen=True, kw_only=True):
    """A rank that became a straggler, or ceased to be one."""

    rank: Rank
    """Rank that the finding is about."""
    kind: Kind
    """Slower than the other ranks ("relative"), or than its own best ("individual")."""
    began: bool
    """True when the rank became a straggler, False when it ceased to be one."""
    score: float
    """Speed as a fraction of the best: 0.5 takes twice as long."""
    section: str
    """Section in which the rank loses the most time."""
    step: StepNumber
    """Training step at which the finding was made."""
