"""Restartable functions with torch: blocked collectives, kept state, loaders and ranks in reserve."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from .harness import Run
from .test_inprocess import PRELUDE, noted

pytest.importorskip("torch")

TORCH = (
    PRELUDE
    + """
    import hashlib
    import torch, torch.distributed as dist
    from holdfast.inprocess import assignment, keep

    torch.set_num_threads(1)
    torch.manual_seed(0)
"""
)


def start(run: Run, script: str, *flags: str, nproc: int) -> Run:
    return run.start(*flags, run.write(TORCH + script), nproc=nproc)


FAULTS = """
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader

    class SlowToSave:
        def state_dict(self):
            if saving:
                note("saving")
                open("saving", "w").close()
                until(lambda: any(t.name == "holdfast-leaving" for t in threading.enumerate()))
                note("saved")
            return {"one": 1}

        def load_state_dict(self, state):
            pass

    saving = False

    @restartable()
    def train(model, optim, ctx: Context):
        global saving
        note("enter", ctx.iteration)
        if rank() == 1 and os.path.exists("no peer") and once("raised without a peer"):
            raise_as("NoPeer")
        dist.init_process_group("gloo")
        saves = holdfast.Checkpointer("saves", {"slow": SlowToSave()}, memory_every=1)
        kept = keep({"model": model, "optim": optim})
        step = kept.restore()
        note("restored", step)
        replica = DDP(model)
        data = iter(DataLoader(range(1 << 20), batch_size=4, num_workers=1))
        while step < 60:
            next(data)
            inputs = torch.full((4, 8), float(step + rank()))
            if rank() == 1 and step == 10 and once("forward"):
                raise_as("InForward")
            loss = replica(inputs).square().mean()
            if rank() == 1 and step == 20 and once("killed"):
                os.kill(os.getpid(), 9)
            if rank() == 0 and step == 30 and once("no peer"):
                raise_as("First")
            optim.zero_grad(set_to_none=True)
            loss.backward()
            optim.step()
            if rank() == 0 and step == 40 and once("killed between"):
                os.kill(os.getpid(), 9)
            step += 1
            kept.commit(step)
            if step == 50 and rank() == 0 and once("will save"):
                saving = True
                saves.save(step)
                note("never")
            if step == 50 and rank() == 1 and once("raised while saving"):
                until(lambda: os.path.exists("saving"))
                raise_as("WhileSaving")
        digest = hashlib.sha256()
        for one in model.parameters():
            digest.update(one.detach().numpy().tobytes())
        return digest.hexdigest()

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optim = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    note("result", train(model, optim))
"""


def test_with_a_living_replica_no_step_is_redone_whatever_happens(run: Run) -> None:
    start(run, FAULTS, nproc=3)
    assert run.code(90) == 0
    kinds = [(one["kind"], one["rank"]) for one in run.ask("incidents")]
    assert kinds == [
        ("exception", 1),
        ("signal", 1),
        ("exception", 0),
        ("exception", 1),
        ("signal", 0),
        ("exception", 1),
    ]
    assert [one["lost_steps"] for one in run.ask("incidents")] == [0] * 6
    restored = [one for one in noted(run, "restored") if one.rank == 2]
    assert [one.what.split()[1] for one in restored] == ["0", "10", "20", "30", "41", "50"]
    assert len({one.pid for one in noted(run) if one.rank == 2}) == 1, "rank 2 was never hit"
    assert [len({one.pid for one in noted(run) if one.rank == rank}) for rank in (0, 1)] == [2, 2]
    assert len({one.what for one in noted(run, "result")}) == 1
    words = [one.what.split()[0] for one in noted(run) if one.rank == 0]
    assert words[words.index("saving") :] == ["saving", "saved", "enter", "restored", "result"]
    assert "does not leave" not in run.err


RESERVE = """
    @restartable(assign=assignment.at_most(2))
    def train(ctx: Context):
        dist.init_process_group("gloo")
        note("enter", dist.get_rank(), dist.get_world_size())
        total = torch.ones(1)
        for step in range(1, 30):
            dist.all_reduce(total)
            holdfast.progress(step)
            if dist.get_rank() == 1 and step == 10 and once("killed"):
                os.kill(os.getpid(), 9)
        return "done"

    note("result", train())
"""


def test_ranks_in_reserve_wait_and_return_none(run: Run) -> None:
    start(run, RESERVE, nproc=3)
    assert run.code(60) == 0
    entered = [one.what for one in noted(run, "enter")]
    assert sorted(entered) == ["enter 0 2", "enter 0 2", "enter 1 2", "enter 1 2"]
    assert sorted(one.what for one in noted(run, "result")) == [
        "result None",
        "result done",
        "result done",
    ]


COUNTS = """
    import json
    from holdfast.data import ElasticDataLoader

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 4000

        def __getitem__(self, index):
            return index

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("used", torch.zeros(4000, dtype=torch.int64))

    @restartable()
    def train():
        dist.init_process_group("gloo")
        counts = Counts()
        data = ElasticDataLoader(Numbers(), batch_size=20, shuffle=True, seed=5, name="numbers")
        kept = keep({"counts": counts, "data": data})
        step = kept.restore()
        for epoch in data.epochs(1):
            for batch in data:
                mine = torch.full((21,), -1)
                mine[: len(batch)] = batch
                parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, mine)
                if rank() == 1 and step == 20 and once("raised"):
                    raise_as("Fault")
                if rank() == 1 and step == 40 and once("killed"):
                    os.kill(os.getpid(), 9)
                if rank() == 0 and step == 60 and once("killed 0"):
                    os.kill(os.getpid(), 9)
                rows = torch.cat(parts)
                kept.changing()
                counts.used.index_add_(0, rows[rows >= 0], torch.ones_like(rows[rows >= 0]))
                step += 1
                kept.commit(step)
                holdfast.progress(step)
        if rank() == 0:
            with open("used.json", "w") as file:
                json.dump(torch.bincount(counts.used).tolist(), file)

    train()
"""


def test_each_record_is_used_once_over_restarts_in_process(run: Run) -> None:
    start(run, COUNTS, nproc=2)
    assert run.code(60) == 0
    assert json.loads((run.folder / "used.json").read_text()) == [0, 4000]
    assert [one["lost_steps"] for one in run.ask("incidents")] == [0, 0, 0]


def test_under_torchrun_an_exception_makes_all_enter_again(run: Run) -> None:
    script = """
    @restartable()
    def train(ctx: Context):
        note("enter", ctx.iteration)
        dist.init_process_group("gloo")
        dist.barrier()  # All have entered.
        if rank() == 1 and ctx.iteration == 0:
            raise ValueError("boom")
        total = torch.ones(1)
        dist.all_reduce(total)
        return int(total)

    note("result", train())
    """
    name = run.write(TORCH + script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", name],
        cwd=run.folder,
        env={**run.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        mine = [one for one in noted(run) if one.rank == rank]
        assert [one.what for one in mine] == ["enter 0", "enter 1", "result 2"]
        assert len({one.pid for one in mine}) == 1


EARLY = """
    @restartable()
    def train(ctx: Context):
        note("enter", ctx.iteration)
        dist.init_process_group("gloo")
        for step in range(1, 31):
            time.sleep(0.01)
            if rank() == 1 and step == 30 and once("returned early"):
                return "early"
            dist.all_reduce(torch.ones(1))
            holdfast.progress(step)
        return "done"

    note("result", train())
"""


def test_a_rank_that_returns_while_others_need_it_is_entered_again(run: Run) -> None:
    start(run, EARLY, nproc=2)
    assert run.code(30) == 0
    (incident,) = run.ask("incidents")
    assert (incident["kind"], incident["rank"]) == ("hang", 1)
    assert "rank 1 has returned from its restartable function; rank 0 waits" in run.err
    assert [one.what for one in noted(run, "result")] == ["result done"] * 2


LOST = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    @restartable()
    def train():
        dist.init_process_group("gloo")
        model = torch.nn.Linear(8, 8)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optim = torch.optim.SGD(model.parameters(), 1e-3)
        kept = keep({"model": model, "optim": optim})
        step = kept.restore()
        note("restored", step)
        while step < 30:
            model(torch.ones(4, 8)).sum().backward()
            optim.step()
            step += 1
            kept.commit(step)
            if rank() == 1 and step == 10:
                os.kill(os.getpid(), 9)

    train()
"""


def test_a_state_that_died_with_its_only_rank_ends_the_job_and_never_starts_over(run: Run) -> None:
    start(run, LOST, nproc=2)
    assert run.code(60) == 93
    assert [one.what for one in noted(run, "restored")] == ["restored 0"] * 2
    assert "living state cannot be used, and there is no checkpointer" in run.err


NOISE = """
    @restartable()
    def train(ctx: Context):
        dist.init_process_group("gloo")
        for step in range(1, 41):
            dist.all_reduce(torch.ones(1))
            holdfast.progress(step)
            if rank() == 1 and step in (10, 20, 30) and once(f"raised {step}"):
                raise_as(f"Fault{step}")
            if rank() == 2 and step == 35 and once("killed"):
                os.kill(os.getpid(), 9)

    train()
"""


def test_only_the_rank_that_failed_by_itself_prints_a_traceback(run: Run) -> None:
    start(run, NOISE, nproc=3)
    assert run.code(60) == 0
    assert len(run.ask("incidents")) == 4
    printed = [line for line in run.err.splitlines() if line.endswith("(most recent call last):")]
    assert len([line for line in printed if line.startswith("[default1]:")]) >= 3
    assert len(printed) <= 4, "a broken collective is shown if it was noticed before the death"


ACCELERATE = """
    from accelerate import Accelerator

    @restartable()
    def train(ctx: Context):
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(8, 8)
        optim = torch.optim.SGD(model.parameters(), 1e-3)
        kept = keep({"model": model, "optim": optim})
        step = kept.restore()
        note("restored", step)
        replica, stepper = accelerator.prepare(model, optim)
        while step < 20:
            accelerator.backward(replica(torch.ones(4, 8)).square().mean())
            if rank() == 1 and step == 10 and once("raised"):
                raise_as("Fault")
            stepper.step()
            stepper.zero_grad()
            step += 1
            kept.commit(step)

    train()
"""


def test_accelerate_makes_its_groups_anew_in_each_entry(run: Run) -> None:
    pytest.importorskip("accelerate")
    start(run, ACCELERATE, nproc=2)
    assert run.code(60) == 0
    assert [one["lost_steps"] for one in run.ask("incidents")] == [0]
    assert len({one.pid for one in noted(run)}) == 2, "no process was replaced"
