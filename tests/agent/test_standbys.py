"""A process that was got for a rank is never forgotten."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from holdfast.agent.standbys import Pool


@pytest.mark.parametrize("turns", range(7))
def test_when_a_start_is_given_up_whoever_was_got_for_it_stands_by(turns: int) -> None:
    got = []

    def get() -> MagicMock:
        got.append(MagicMock())
        return got[-1]

    orders = MagicMock(logs=Path())
    orders.settings = MagicMock(standby=0, entry="script", script="train.py", script_args=())
    orders.home.imports = Path("imports.json")

    async def scenario() -> None:
        pool = Pool(orders, MagicMock(), {})
        pool._spawn_fresh = get  # type: ignore[method-assign]
        taking = asyncio.ensure_future(pool.take(range(3)))
        for _ in range(turns):
            await asyncio.sleep(0)
        taking.cancel()
        taken = []
        with contextlib.suppress(asyncio.CancelledError):
            taken = await taking
        await asyncio.sleep(0)
        assert taken + pool.waiting == got

    asyncio.run(scenario())
