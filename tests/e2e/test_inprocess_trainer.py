"""`ElasticTrainer` in a restartable function: the step that was under way is completed, not redone."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from .harness import Run, wait_for
from .test_inprocess import PRELUDE, Noted, noted
from .test_many_nodes import Cluster, kill_node

torch = pytest.importorskip("torch")

SIZE, GLOBAL_BATCH, BATCH, EPOCHS = 96, 32, 2, 4
STEPS = SIZE // GLOBAL_BATCH * EPOCHS

SCRIPT = (
    PRELUDE
    + f"""
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from holdfast.data import ElasticDataLoader
    from holdfast.inprocess import keep

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn({SIZE}, 6, dtype=torch.float64)
    records = [(torch.tensor(n), x[n]) for n in range({SIZE})]

    @restartable()
    def train(model, optim, data, ctx: Context):
        dist.init_process_group("gloo")
        replica = DDP(model, init_sync=False)
        trainer = holdfast.ElasticTrainer(replica, optim, data, max_grad_norm=1.0)
        kept = keep(dict(model=model, optim=optim, trainer=trainer, data=data))
        kept.restore()
        note("enter", ctx.round, trainer.steps, kept.restored.records_done)
        for _ in data.epochs({EPOCHS}):
            for number, x in data:
                with trainer.accumulate():
                    fault(trainer.steps, data.current.index)
                    loss = replica(x).square().mean()
                    counts = number.tolist() if data.current.records else []
                    trainer.backward(loss)
                    note("pass", ctx.round, trainer.steps, *counts)
                if trainer.step():
                    kept.commit(trainer.steps)
        torch.save(model.state_dict(), f"{{rank()}}.pt")
        note("finished", trainer.steps, trainer.samples)

    layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers).double()
    optim = torch.optim.AdamW(model.parameters(), 0.02)
    data = ElasticDataLoader(records, {BATCH}, global_batch={GLOBAL_BATCH}, shuffle=True, seed=5)
    """
)
FAULTS = """
    def fault(step, index):
        if rank() == 1 and (step, index) == (2, 2) and once("raised"):
            raise_as("InForward")
        if rank() == 2 and (step, index) == (5, 2) and once("killed"):
            until(lambda: passes_of_others(5) == 9)  # They are in their last one.
            os.kill(os.getpid(), 9)
        if rank() == 0 and (step, index) == (8, 3) and once("killed rank 0"):
            os.kill(os.getpid(), 9)

    def passes_of_others(step):
        lines = [line.split() for line in open("log")]
        passes = [words for words in lines if words[2] == "pass" and words[4] == str(step)]
        return sum(words[0] != "2" for words in passes)

    train(model, optim, data)
"""
LOSES = """
    def fault(step, index):
        if step == 3 and os.environ["WORLD_SIZE"] == "2":
            until(lambda: False)  # The second node comes in another round.
        if os.environ["GROUP_RANK"] == "1" and (step, index) == (4, 2):
            note("stuck")
            until(lambda: False)

    train(model, optim, data)
"""


def expected(run: Run) -> dict[str, torch.Tensor]:
    """The parameters of one process that took the same steps with whole batches."""
    alone = f"""
    for _ in data.epochs({EPOCHS}):
        for number, x in data:
            optim.zero_grad()
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
    torch.save(model.state_dict(), "alone.pt")
    """
    terms = "records, {}, global_batch"
    script = SCRIPT.replace(terms.format(BATCH), terms.format(GLOBAL_BATCH))
    name = run.write(script + alone, "alone.py")
    subprocess.run([sys.executable, name], cwd=run.folder, env=run.env, check=True, timeout=200)
    found: dict[str, torch.Tensor] = torch.load(run.folder / "alone.pt")
    return found


def check_result(run: Run, ranks: int) -> None:
    alone = expected(run)
    for rank in range(ranks):
        found = torch.load(run.folder / f"{rank}.pt")
        for key, value in alone.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12, msg=f"{rank} {key}")


def passes(run: Run, round: int, step: int) -> list[Noted]:
    first = ["pass", str(round), str(step)]
    return [one for one in noted(run, "pass") if one.what.split()[:3] == first]


def audit(run: Run) -> str:
    command = [sys.executable, "-m", "holdfast", "data", "audit", run.job]
    env = {key: value for key, value in run.env.items() if key != "HOLDFAST_TEST_ID"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_whatever_rank_fails_its_step_is_completed_with_the_result_of_an_undisturbed_run(
    run: Run,
) -> None:
    run.start(run.write(SCRIPT + FAULTS), nproc=4)
    assert run.code(90) == 0
    check_result(run, 4)
    entries = [one for one in noted(run, "enter") if one.rank == 3]
    assert len({one.pid for one in entries}) == 1
    assert [one.what.split()[2] for one in entries] == ["0", "2", "5", "8"]
    done = [int(one.what.split()[3]) for one in entries]
    assert done[0] == 0
    assert all(done[1:]), "gradients of survivors stay"
    # The survivors' passes stay, of which there are nine at least.
    assert done[2] >= 9 * BATCH
    assert len(passes(run, 3, 5)) <= 8, "a step has 16 passes"
    again = Counter(record for one in passes(run, 3, 5) for record in one.what.split()[3:])
    assert (again.total(), set(again.values())) == (GLOBAL_BATCH - done[2], {1})
    ends = [one.what for one in noted(run, "finished")]
    assert ends == [f"finished {STEPS} {STEPS * GLOBAL_BATCH}"] * 4
    assert f"epoch {EPOCHS - 1}: {SIZE} once" in audit(run)


def test_a_lost_nodes_records_are_shared_out_over_the_ranks_that_are_left(
    make_run: Callable[[], Run],
) -> None:
    cluster = Cluster(make_run)
    for _ in range(2):
        node = make_run()
        if cluster.nodes:
            node.job, node.job_home = cluster.nodes[0].job, cluster.nodes[0].job_home
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", cluster.endpoint)
        node.start("--nnodes", "1:2", *meet, node.write(SCRIPT + LOSES), nproc=2)
        cluster.nodes.append(node)
        if len(cluster.nodes) == 1:
            node.until(lambda job: job.membership.count() == 1, "the first node")
    first, second = cluster.nodes
    wait_for(lambda: noted(second, "stuck"), "the step in which the node is lost", 60)
    kill_node(second)
    assert first.code(90) == 0
    check_result(first, 2)
    (last,) = {one.what for one in noted(first, "enter") if one.what.split()[2] == "4"}
    assert int(last.split()[3]) >= GLOBAL_BATCH // 4
    audit(first)
