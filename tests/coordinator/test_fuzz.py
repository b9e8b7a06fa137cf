"""A holder of the token that sends anything harms neither the coordinator nor the job."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hostile import Episode


@pytest.mark.parametrize("as_member", [False, True], ids=["waiting", "placed"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_an_agent_sends_harms_nobody_else(
    seed: int, as_member: bool, tmp_path: Path
) -> None:
    episode = Episode(tmp_path / "journal.db", seed, as_member)
    asyncio.run(asyncio.wait_for(episode.run(frames=1000), 250))
