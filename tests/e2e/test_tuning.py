"""Loader settings that change while ranks train together."""

from __future__ import annotations

import re
import subprocess
import sys

from holdfast.core.tuning.state import Tunings

from .harness import MARKER, PATIENCE_S, Run

SCRIPT = """
    import os, time
    import torch, torch.distributed as dist
    import holdfast
    from holdfast.data import link
    from holdfast.data.tuning import Tuning
    from holdfast.messages.tuning import LoaderConfig

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    auto = "AUTO" in os.environ
    own = LoaderConfig(micro_batch=16 if auto else 8, workers=0, prefetch=2)
    tuning = Tuning("train", own, link=link.current(), most=64, auto=auto)
    print(f"opened with {tuning.config.micro_batch} as version {tuning.version}", flush=True)
    step = 0
    while not os.path.exists("end"):
        step += 1
        # A rank is slow now and then, another one waits for it in the collective.
        time.sleep(COST if (step + rank) % 7 else 2 * COST)
        settings = torch.tensor([tuning.config.micro_batch, tuning.version])
        every = [torch.zeros_like(settings) for _ in range(dist.get_world_size())]
        dist.all_gather(every, settings)
        assert all(torch.equal(one, settings) for one in every), f"step {step}: {every}"
        holdfast.progress(step)
        changed = tuning.at_boundary(step)
        if changed is not None:
            print(f"step {step}: {changed} as version {tuning.version}", flush=True)
    holdfast.barrier("over")
"""
"""All ranks compare their settings in each step, by a collective."""


def switches(run: Run, rank: int, round: int = 1) -> list[str]:
    lines = run.log(rank, round).decode().splitlines()
    return [line for line in lines if re.match(r"step \d+: ", line)]


def test_all_ranks_of_a_running_job_change_at_the_same_step(run: Run) -> None:
    run.start(run.write(SCRIPT.replace("COST", "0.005")), nproc=3)
    run.until(lambda job: job.highest >= 20, "20 steps")
    taken = run.ask("tune", "--micro-batch", "64", "--workers", "1")
    assert taken["change"]["outcome"] == "applied", taken
    again = run.ask("tune", "--prefetch", "8")
    assert again["change"]["version"] == 2
    (shown,) = run.ask("tune")
    assert shown["config"] == {"micro_batch": 64, "workers": 1, "prefetch": 8}
    assert [change["version"] for change in shown["changes"]] == [1, 2]
    (run.folder / "end").touch()
    assert run.code() == 0
    each = [switches(run, rank) for rank in range(3)]
    assert each[0] == each[1] == each[2]
    steps = [taken["change"]["step"], again["change"]["step"]]
    assert each[0] == [
        f"step {steps[0]}: micro-batch 64, workers 1, prefetch 2 as version 1",
        f"step {steps[1]}: micro-batch 64, workers 1, prefetch 8 as version 2",
    ]
    (reported,) = run.ask("status")["tuning"]
    assert (reported["version"], reported["config"]["micro_batch"]) == (2, 64)


def test_settings_outlive_a_rank_and_the_coordinator(run: Run) -> None:
    run.start(run.write(SCRIPT.replace("COST", "0.005")), nproc=3)
    run.until(lambda job: job.highest >= 20, "20 steps")
    assert run.ask("tune", "--micro-batch", "16")["change"]["outcome"] == "applied"
    run.ask("chaos", "kill-coordinator")
    run.until(lambda job: job.highest >= 300, "300 steps")
    assert run.ask("tune", "--micro-batch", "32")["change"]["version"] == 2
    run.ask("chaos", "kill", "--rank", "1")
    run.until(lambda job: job.membership.round == 2 and job.unstepped == 0, "a second round")
    (run.folder / "end").touch()
    assert run.code() == 0
    for rank in range(3):
        assert b"opened with 32 as version 2" in run.log(rank, 2)


def test_a_search_finds_the_fastest_micro_batch_by_itself(run: Run) -> None:
    cost = "{16: 0.04, 32: 0.02, 64: 0.03}[tuning.config.micro_batch]"
    run.start(run.write(SCRIPT.replace("COST", cost)), nproc=3, env={"AUTO": "1"})

    def over(job: object) -> bool:
        loaders = job.of(Tunings).loaders  # type: ignore[attr-defined]
        search = loaders["train"].search if "train" in loaders else None
        return search is not None and bool(search.over) and loaders["train"].wanted is None

    run.until(over, "the end of the search")
    (shown,) = run.ask("tune")
    assert shown["config"]["micro_batch"] == 32, shown
    assert "is not faster than micro-batch 32" in shown["auto"]
    (run.folder / "end").touch()
    assert run.code() == 0
    assert switches(run, 0) == switches(run, 1) == switches(run, 2)


def test_a_job_without_such_a_loader_refuses_in_one_line(run: Run) -> None:
    run.train()
    run.until(lambda job: job.highest >= 5, "5 steps")
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "tune", run.job, "--workers", "1"],
        env={k: v for k, v in run.env.items() if k != MARKER},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "no loader of the job can be tuned" in done.stderr
    assert done.stderr.count("\n") == 1
    (run.folder / "end").touch()
    assert run.code() == 0
