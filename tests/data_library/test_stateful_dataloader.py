"""torchdata's StatefulDataLoader in a Checkpointer: its state is a value like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds_of_loaders import Numbers

import holdfast

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.mark.parametrize("processes", [0, 2])
def test_a_stateful_loader_resumes_with_the_next_batch(tmp_path: Path, processes: int) -> None:
    def begin() -> tuple[Any, holdfast.Checkpointer]:
        loader = torchdata.StatefulDataLoader(Numbers(24), batch_size=3, num_workers=processes)
        return loader, holdfast.Checkpointer(tmp_path, {"data": loader})

    loader, checkpointer = begin()
    with checkpointer:
        checkpointer.restore()
        batches = iter(loader)
        for step in range(1, 4):
            assert next(batches).tolist() == [3 * step - 3, 3 * step - 2, 3 * step - 1]
            checkpointer.save(step).result()
    loader, checkpointer = begin()
    with checkpointer:
        assert checkpointer.restore() == 3
        assert [batch.tolist()[0] for batch in loader] == [9, 12, 15, 18, 21]
