"""Each record once: ranks, agents and coordinators die, nodes come and go, and the model's own state
says what it was trained on. `bench/scripts/counting.py` is such a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from .harness import Run, wait_for

COUNTING = Path(__file__).parents[2] / "bench" / "scripts" / "counting.py"
RECORDS = 20_000
BATCH = 50

SHARINGS = ["lockstep", "leases"]


def start(run: Run, sharing: str, *flags: str, nproc: int = 2, **options: Any) -> Run:
    given = {
        "records": RECORDS,
        "batch": BATCH,
        "sharing": sharing,
        "folder": run.folder,
        **options,
    }
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return run.start(*flags, str(COUNTING), *words, nproc=nproc)


def step(run: Run) -> int:
    file = run.folder / "step"
    return int(file.read_text() or 0) if file.exists() else 0


def reach(run: Run, number: int) -> None:
    wait_for(lambda: step(run) >= number, f"step {number}", 60)


def used(run: Run) -> list[int]:
    """How many records were used never, once, twice, ..."""
    found: list[int] = json.loads((run.folder / "result.json").read_text())["used"]
    return found


def audit(run: Run, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", "data", "audit", run.job, *words]
    env = {key: value for key, value in run.env.items() if key != "HOLDFAST_TEST_ID"}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize("sharing", SHARINGS)
def test_each_record_is_used_once_though_ranks_and_the_coordinator_die(
    run: Run, sharing: str
) -> None:
    start(run, sharing, epochs=2)
    reach(run, 30)
    run.kill_rank(1)
    reach(run, 80)
    run.kill(run.coordinator())
    reach(run, 120)
    run.kill_rank(0)
    reach(run, 200)
    run.kill(run.agent())
    assert run.code(90) == 0
    assert used(run) == [0, 2 * RECORDS]
    proof = audit(run)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert "exact" in proof.stdout
    assert "epoch 1: 20,000 once" in proof.stdout


@pytest.mark.parametrize("sharing", SHARINGS)
def test_each_record_is_used_once_when_nodes_come_and_go(
    make_run: Callable[[], Run], sharing: str
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    meet = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    first, second, third = make_run(), make_run(), make_run()
    for other in (second, third):
        other.job, other.job_home = first.job, first.job_home
    start(first, sharing, *meet, nproc=1)
    first.until(lambda job: job.membership.count() == 1, "the first node, with the coordinator")
    start(second, sharing, *meet, nproc=1)
    first.until(lambda job: len(job.ranks) == 2 and not job.unstepped, "two nodes")
    reach(first, 30)
    second.close()
    first.until(lambda job: len(job.ranks) == 1 and not job.unstepped, "one node")
    reach(first, step(first) + 40)
    start(third, sharing, *meet, nproc=1)
    assert first.code(90) == 0
    assert used(first) == [0, RECORDS]
    assert audit(first).returncode == 0


FORGETFUL = """
    import os, sys, time
    import torch, torch.distributed as dist
    import holdfast
    from holdfast.data import ElasticDataLoader

    dist.init_process_group("gloo")
    model = torch.nn.Linear(1, 1)
    data = ElasticDataLoader(list(range(4000)), batch_size=10, name="numbers")
    ckpt = holdfast.Checkpointer("checkpoints", {"model": model}, memory_every=1)
    step = ckpt.restore()
    for batch in data:
        time.sleep(0.005)
        dist.barrier()
        step += 1
        holdfast.progress(step)
        ckpt.save(step)
        open("step", "w").write(str(step))
"""
"""Saves its model, and not where it is in its data."""


def test_a_script_that_does_not_save_its_position_is_found_out(run: Run) -> None:
    run.start(run.write(FORGETFUL), nproc=2)
    reach(run, 40)
    run.kill_rank(0)
    assert run.code(90) == 0
    proof = audit(run)
    assert proof.returncode == 1
    assert "used 2 times: positions 0 to" in proof.stdout


PREDICTING = """
    import os, time
    import holdfast
    from holdfast.data import ShardClient

    rank = os.environ["RANK"]
    client = ShardClient("pages", size=3000, shard=10, task="prediction")
    for number, shard in enumerate(client):
        time.sleep(0.005)
        with open(f"done_{rank}", "a") as file:
            file.write(f"{shard.start}\\n")
        holdfast.progress(number + 1)
"""


def done(run: Run) -> list[int]:
    files = run.folder.glob("done_*")
    return [int(line) for file in files for line in file.read_text().split()]


def test_without_coupling_what_is_finished_stays_finished(run: Run) -> None:
    """At least once: only shards that were begun when a rank died come again."""
    run.train(script=PREDICTING)
    wait_for(lambda: len(done(run)) > 60, "sixty shards")
    run.kill_rank(0)
    wait_for(lambda: len(done(run)) > 150, "more shards")
    run.kill(run.coordinator())
    assert run.code(60) == 0
    found = done(run)
    assert set(found) == set(range(0, 3000, 10))
    assert len(found) - len(set(found)) <= 8, "shards that were in hand"


POISONED = """
    import os, sys, time
    import holdfast
    from holdfast.data import ShardClient

    client = ShardClient("pages", size=100, shard=10, exact=False, skip=sys.argv[1] == "skip")
    for number, shard in enumerate(client):
        with shard:
            if shard.start == 40:
                raise OSError("cannot read page 47")
            time.sleep(0.002)
        holdfast.progress(number + 1)
"""


def test_a_shard_that_fails_again_and_again_stops_the_job_and_is_named(run: Run) -> None:
    run.train(script=POISONED, args=["stop"], nproc=2)
    assert run.code(60) == 93
    assert "positions 40 to 49" in run.err
    assert "cannot read page 47" in run.err


def test_or_is_left_out_and_listed(run: Run) -> None:
    run.train(script=POISONED, args=["skip"], nproc=2)
    assert run.code(60) == 0
    assert "positions 40 to 49" in run.err
    listed = audit(run)
    assert "cannot read page 47" in listed.stdout


def test_two_data_sets_of_one_name_are_refused(run: Run) -> None:
    script = """
        import os
        from holdfast.data import ShardClient
        ShardClient("pages", size=100 + int(os.environ["RANK"]), exact=False).fetch()
    """
    run.train(script=script, nproc=2)
    assert run.code(60) != 0
    assert "'pages'" in run.err
    assert "100" in run.err
    assert "101" in run.err


def test_a_loader_is_tuned_at_the_same_step_on_all_ranks_and_stays_exact(run: Run) -> None:
    start(run, "lockstep", records=5 * RECORDS)
    reach(run, 20)
    command = [sys.executable, "-m", "holdfast", "tune", run.job, "--micro-batch", "20"]
    env = {key: value for key, value in run.env.items() if key != "HOLDFAST_TEST_ID"}
    tuned = subprocess.run(
        [*command, "--workers", "1"], env=env, capture_output=True, text=True, timeout=200
    )
    assert tuned.returncode == 0, tuned.stderr
    reach(run, step(run) + 100)
    run.kill_rank(1)
    assert run.code(90) == 0
    assert used(run) == [0, 5 * RECORDS]
    steps = json.loads((run.folder / "result.json").read_text())["steps"]
    assert steps > 1.2 * 5 * RECORDS / (2 * BATCH), "some steps had the smaller batches"
    assert audit(run).returncode == 0
