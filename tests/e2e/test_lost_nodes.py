"""A node is lost, and with it the images of its ranks: copies on other nodes bring all back.

The state is sharded (FSDP2) and there is no storage at all, so what is restored can only have come from
memory: each rank's part from whoever has a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.core.commits.state import Commits
from holdfast.core.job import Job

from .test_checkpoints import Training, finished, free_port, trainings

SCRIPT = """
    import glob, hashlib, os, sys, time
    import torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    import holdfast

    torch.set_num_threads(1)
    rank, until = int(os.environ["RANK"]), int(sys.argv[1])
    dist.init_process_group("gloo")

    def note(*words):
        with open(f"notes_{rank}", "a") as file:
            print(*words, file=file)

    def digest():
        found = hashlib.sha256()
        moments = [m for s in optim.state.values() for m in (s["exp_avg"], s["exp_avg_sq"])]
        for tensor in [*net.parameters(), *moments]:
            found.update(tensor.full_tensor().detach().numpy().tobytes())
        return found.hexdigest()[:16]

    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(50, 70), torch.nn.Linear(70, 30))
    fully_shard(net)
    optim = torch.optim.Adam(net.parameters(), lr=0.01)
    ckpt = holdfast.Checkpointer(None, {"net": net, "optim": optim})
    step = ckpt.restore()
    if step:
        note("restored", step, dist.get_world_size(), digest())
    while step < until:
        random = torch.Generator().manual_seed(1000 * step + rank)
        optim.zero_grad()
        net(torch.randn(4, 50, generator=random)).square().mean().backward()
        optim.step()
        step += 1
        note("saved", step, digest())
        ckpt.save(step)
        if step == 7:
            while not os.path.exists("go"):
                time.sleep(0.01)
    dist.barrier()
    dist.destroy_process_group()
"""

Nodes = Callable[[int, str], list[Training]]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Starts so many launchers of one job, the first of which has the coordinator."""
    with trainings(tmp_path) as make:

        def start(count: int, world: str) -> list[Training]:
            runs = [make() for _ in range(count)]
            endpoint = f"127.0.0.1:{free_port()}"
            for run in runs:
                run.job, run.job_home = runs[0].job, runs[0].job_home
                flags = ("--nnodes", world, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
                run.go(SCRIPT, 9, *flags, nproc=1)
                if run is runs[0]:
                    run.until(lambda job: job.membership, "the coordinator")
            return runs

        yield start


def await_copies(run: Training, step: int, world_size: int) -> None:
    """Until each rank's image of that step is on another node, too."""

    def copied(job: Job) -> bool:
        snapshots = [s for book in job.of(Commits).books.values() for s in book.snapshots]
        holders = next((s.holders for s in snapshots if s.id.step == step), {})
        return [len(nodes) for nodes in holders.values()] == [2] * world_size

    run.until(copied, f"copies of step {step}")


def lose_one(runs: list[Training]) -> list[Training]:
    """Take a node away that has a rank and not the coordinator, as a power cut would; the others."""
    ranks = {event["pid"] for event in runs[0].events("WorkerStarted")}
    lost = next(run for run in runs[1:] if ranks & run.alive().keys())
    lost.close()
    return [run for run in runs if run is not lost]


@pytest.mark.parametrize(("launchers", "world", "after"), [(4, "3", 3), (3, "2:3", 2)])
def test_what_a_lost_node_had_is_brought_back_from_copies(
    nodes: Nodes, launchers: int, world: str, after: int
) -> None:
    """By a spare that takes its place; or by a smaller world, which puts the state together anew."""
    runs = nodes(launchers, world)
    await_copies(runs[0], 7, 3)
    left = lose_one(runs)
    (left[0].folder / "go").touch()
    for run in left:
        finished(run)
    (saved,) = {digest for step, digest in left[0].notes(0, "saved") if step == "7"}
    for rank in range(after):
        assert left[0].notes(rank, "restored") == [["7", str(after), saved]]
