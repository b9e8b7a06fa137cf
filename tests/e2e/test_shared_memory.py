"""A loader's shared memory goes with its rank, however the rank ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import PATIENCE_S, Run, wait_for

LOAD = """
    import os
    import torch, torch.multiprocessing
    import holdfast

    torch.multiprocessing.set_sharing_strategy("file_system")

    def note(worker):
        open(f"loader_{os.getpid()}", "w").close()
        torch.multiprocessing.set_sharing_strategy("file_system")

    data = torch.utils.data.TensorDataset(torch.zeros(1 << 16, 256))
    loader = torch.utils.data.DataLoader(data, batch_size=256, num_workers=2, worker_init_fn=note)
    for step, batch in enumerate(loader):
        holdfast.progress(step + 1)
        while step > 4 and not os.path.exists("end"):
            pass
        if os.path.exists("end"):
            break
"""


def segments(run: Run) -> list[str]:
    """The segments that the job's loaders have created and nobody has removed."""
    loaders = {path.name.partition("_")[2] for path in run.folder.glob("loader_*")}
    names = [path.name for path in Path("/dev/shm").glob("torch_*")]
    return [name for name in names if name.split("_")[1] in loaders]


@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_no_segment_of_a_loader_is_left_after_kills(run: Run, victim: str) -> None:
    run.start(run.write(LOAD), nproc=1, env={"OMP_NUM_THREADS": "1"})
    for kill in range(1, 4 if victim == "rank" else 2):
        run.until_stepping(kill)
        wait_for(lambda: segments(run), "a segment", PATIENCE_S)
        run.kill(run.rank_pid(0) if victim == "rank" else run.agent())
    run.until_stepping(kill + 1)
    run.end()
    assert run.code() == 0
    assert segments(run) == []
