"""NCCL's waits are ended by its own abort."""

from __future__ import annotations

import pytest
from group_ranks import playing

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

ROUNDS = 5


def test_ranks_in_a_collective_are_freed_and_make_groups_anew() -> None:
    with playing("nccl", 2, ROUNDS) as ranks:
        lines = [[rank.said() for _ in range(ROUNDS)] for rank in ranks]
    for seen in lines:
        print(*seen, sep="\n")
        assert max(line["left_s"] for line in seen[1:]) < 1.0
        assert len({line["threads"] for line in seen[1:]}) == 1
        assert seen[-1]["device_bytes"] <= seen[1]["device_bytes"] + (8 << 20)
