"""Platforms come through hundreds of faults, and the harness that says so can fail."""

from __future__ import annotations

import pytest
from chaos import endure
from fake_kubernetes import FakeCluster
from model import ModelEngine


@pytest.mark.parametrize("seed", range(4))
def test_a_model_of_an_engine_comes_through_500_faults(seed: int) -> None:
    counts = endure(ModelEngine(), seed)
    assert counts.total() >= 500
    assert min(counts.values()) > 5


@pytest.mark.parametrize("seed", range(4))
def test_kubernetes_comes_through_500_faults(seed: int) -> None:
    counts = endure(FakeCluster(), seed)
    assert counts.total() >= 500
    assert min(counts.values()) > 5
