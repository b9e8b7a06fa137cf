"""Measures how much more memory a rank could use, at the busiest moment of its steps.

Of a GPU, what torch keeps for reuse beyond the peak of its allocations counts as free. Of a host, all
ranks share what is left, and each is given its part.
"""

from __future__ import annotations

import sys

from holdfast import cgroups
from holdfast.messages.tuning import MemoryRoom


def measured(ranks_of_host: int) -> MemoryRoom:
    """Measure this rank's GPU if it uses one, or else its host."""
    return _of_gpu() or of_host(ranks_of_host)


def _of_gpu() -> MemoryRoom | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info()
    reusable = torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
    return MemoryRoom(free_bytes=max(0, free + reusable), total_bytes=total)


def of_host(ranks: int) -> MemoryRoom:
    left, total = cgroups.memory_left()
    return MemoryRoom(free_bytes=left // max(1, ranks), total_bytes=total // max(1, ranks))
