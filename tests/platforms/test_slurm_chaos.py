"""The Slurm platform comes through hundreds of faults: no node is leaked, none is asked for twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import endure
from fake_slurm import FakeSlurm


@pytest.mark.parametrize("seed", range(4))
def test_the_slurm_platform_comes_through_500_faults(seed: int, tmp_path: Path) -> None:
    counts = endure(FakeSlurm(tmp_path), seed)
    assert counts.total() >= 500
    assert min(counts.values()) > 5
