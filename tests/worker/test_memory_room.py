"""How much more memory a rank could use."""

from __future__ import annotations

import pytest

from holdfast import cgroups
from holdfast.worker import memory_room


def test_without_a_gpu_the_ranks_of_a_host_share_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "memory_left", lambda: (600, 1000))
    found = memory_room.of_host(4)
    assert (found.free_bytes, found.total_bytes) == (150, 250)


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="no GPU here")
def test_on_a_gpu_the_peak_of_allocations_counts() -> None:
    import torch

    torch.zeros(1, device="cuda")
    before = memory_room.measured(1)
    taken = torch.zeros(1 << 28, device="cuda", dtype=torch.uint8)
    del taken
    after = memory_room.measured(1)
    assert after.total_bytes == torch.cuda.get_device_properties(0).total_memory
    assert abs(before.free_bytes - after.free_bytes - (1 << 28)) < (8 << 20)
