"""The Ray platform comes through hundreds of faults of a cluster."""

from __future__ import annotations

import pytest
from chaos import endure
from fake_ray import FakeRay


@pytest.mark.parametrize("seed", range(3))
def test_ray_comes_through_500_faults(seed: int) -> None:
    counts = endure(FakeRay(autoscales=True), seed)
    assert counts.total() >= 500
    assert min(counts.values()) > 5
