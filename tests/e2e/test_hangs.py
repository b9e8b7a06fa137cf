"""Ranks that stand still, in every way there is, and ranks that only seem to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from unittest.mock import ANY

import pytest

from holdfast.core.job import Job
from holdfast.messages.records import Incident

from .harness import MARKER, PATIENCE_S, Run, wait_for
from .test_many_nodes import Cluster, cluster

__all__ = ["cluster"]

TRAIN = """
    import ctypes, os, threading, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset
    import holdfast

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def told(what):
        try:
            os.remove(f"{what}.{rank}")
        except FileNotFoundError:
            return False
        return True

    class Data(Dataset):
        def __len__(self):
            return 1 << 20

        def __getitem__(self, index):
            if told("worker"):
                time.sleep(1000)  # worker
            return torch.ones(8)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 1)

        def forward(self, batch):
            time.sleep(0.03)
            if told("sleep"):
                time.sleep(1000)  # sleep
            return self.inner(batch)

    def clip(gradient):
        if told("gil"):
            ctypes.PyDLL(None).usleep(1_000_000_000)  # gil

    def lend(*_):
        if told("lock"):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # lock

    def log():
        with holdfast.section("log"):
            while told("loop"):
                while True: pass  # loop

    def gather():
        with holdfast.section("gather"):
            if told("async"):
                time.sleep(1000)  # async
            dist.all_reduce(torch.ones(2), async_op=True).wait()

    def meet():
        if not told("skip"):
            dist.barrier()

    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lend)
    for batch in DataLoader(Data(), batch_size=4, num_workers=1):
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.register_hook(clip)
        loss.backward()
        optimizer.step()
        log()
        gather()
        meet()
        if os.path.exists("end"):
            break
    dist.barrier()
"""
"""A rank hangs, once, when there is a file that is named after the way and the rank."""

HANGS = {
    "gil": "holds the GIL in train.py:{line} (clip)",
    "lock": "waits for locks that only its own threads could release in train.py:{line} (lend)",
    "stop": "is stopped (SIGSTOP)",
    "skip": "will never meet",
    "sleep": "sleeps in train.py:{line} (forward)",
    "loop": "computes in train.py:{line} (log), section log",
    "async": "sleeps in train.py:{line} (gather), section gather",
    "worker": "train.py:{line} (__getitem__)",
}
PROVEN = list(HANGS)[:4]
"""Ways that are proven: they are acted on at once, however long the user allows the others."""
LONG_S = 600.0
"""Allowed where only proof may act: nobody here waits for as long."""
HANG_AFTER_S = 6.0
LIMIT_S = 5.0
"""What the user allows the sections, in which something may move."""
WARM = 8
"""Steps after which a process is warm."""


def line_of(run: Run, mark: str, name: str = "train.py") -> int:
    lines = (run.folder / name).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def until_warm(run: Run, round: int = 1) -> Job:
    """Every rank of the round has finished more than a few steps."""
    return run.until(
        lambda job: (
            job.membership.round >= round
            and job.state.name == "running"
            and not job.unstepped
            and all(rank.step - (rank.base or 0) >= WARM for rank in job.ranks.values())
        ),
        f"{WARM} steps of every rank in round {round}",
    )


def until_hang(run: Run, number: int) -> Incident:
    """The incident of that number, once it has its verdict and is over."""
    job = run.until(
        lambda job: len(job.incidents) >= number and job.incidents[number - 1].closed_at,
        f"the end of incident {number}",
    )
    incident = job.incidents[number - 1]
    assert incident.kind == "hang", incident
    return incident


def why(run: Run, *words: str) -> str:
    """What `holdfast why` says to a person."""
    command = [sys.executable, "-m", "holdfast", "why", run.job, *words]
    env = {name: value for name, value in run.env.items() if name != MARKER}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("ways", "after_s", "limit_s"),
    [(PROVEN, LONG_S, LONG_S), (list(HANGS)[4:], HANG_AFTER_S, LIMIT_S)],
    ids=["proven", "not proven"],
)
def test_each_way_to_hang_is_seen_in_time_and_the_rank_and_its_line_are_named(
    run: Run, ways: list[str], after_s: float, limit_s: float
) -> None:
    limits = f"log:{limit_s:g},gather:{limit_s:g}"
    flags = ("--hang-after", f"{after_s:g}", "--rank-section-timeouts", limits)
    run.start(*flags, run.write(TRAIN), nproc=3)
    ids = []
    for number, way in enumerate(ways, 1):
        until_warm(run, round=number)
        guilty = 1 + number % 2
        if way == "stop":
            run.kill_rank(guilty, signal.SIGSTOP)
        else:
            (run.folder / f"{way}.{guilty}").touch()
        incident = until_hang(run, number)
        ids.append(incident.id)
        expected = HANGS[way]
        line = line_of(run, way) if "{line}" in expected else 0
        assert f"rank {guilty}" in incident.detail
        assert expected.format(line=line) in incident.detail
        assert incident.rank == guilty, incident
        took_s = incident.opened_at - incident.fault_at
        assert took_s > LIMIT_S - 1 or way in PROVEN, f"{way}: acted on after {took_s:.2f} s"
    until_warm(run, round=len(ways) + 1)
    assert "rank 2" in why(run, "--incident", str(ids[0]))
    run.end()
    assert run.code() == 0


# ---- without torch, which costs seconds --------------------------------------------------------

BARE = """
    import os, sys, time
    import holdfast

    rank = int(os.environ["RANK"])
    kept = f"step_{rank}"
    step = int(open(kept).read()) if os.path.exists(kept) else 0

    def told(what):
        try:
            os.remove(f"{what}.{rank}")
        except FileNotFoundError:
            return False
        return True

    def work():
        if told("sleep"):
            time.sleep(1000)  # sleep

    while not os.path.exists("end"):
        time.sleep(0.01)
        work()
        holdfast.barrier("step")
        step += 1
        with open(kept + ".new", "w") as file:
            file.write(str(step))
        os.replace(kept + ".new", kept)
        holdfast.progress(step)
    holdfast.barrier("end")
"""


SOON = ("--hang-after", "6")


def hang(run: Run, rank: int) -> None:
    """Have the bare trainer's rank hang, and see that it does."""
    order = run.folder / f"sleep.{rank}"
    order.touch()
    wait_for(lambda: not order.exists(), f"rank {rank} to hang")


def test_a_rank_of_another_node_hangs_and_is_named(cluster: Cluster) -> None:
    def start() -> Run:
        node = cluster._make()
        if cluster.nodes:
            node.job, node.job_home = cluster.nodes[0].job, cluster.nodes[0].job_home
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", cluster.endpoint)
        node.train("--nnodes", "2", *SOON, *meet, script=BARE)
        cluster.nodes.append(node)
        return node

    first = start()
    first.until(lambda job: job.membership.count() == 1, "the first node")
    second = start()
    job = until_warm(first)
    far = next(r for r, s in job.ranks.items() if f":{second.agent()}-" in s.node)
    hang(first, far)
    incident = until_hang(first, 1)
    line = line_of(first, "sleep")
    assert (incident.rank, incident.node) == (far, job.ranks[far].node)
    assert f"rank {far} on {incident.node} sleeps in train.py:{line} (work)" in incident.detail
    seen = sorted(path.name for path in (first.job_home / "incidents" / str(incident.id)).iterdir())
    assert seen == [*(f"rank_{rank}.json" for rank in range(4)), "verdict.json"]
    until_warm(first, round=2)
    first.end()
    assert (first.code(), second.code()) == (0, 0)


def test_a_coordinator_that_dies_while_a_rank_hangs_finds_it_when_it_is_back(run: Run) -> None:
    run.train(*SOON, script=BARE)
    until_warm(run)
    hang(run, 1)
    run.kill(run.coordinator())
    incident = until_hang(run, 1)
    assert incident.rank == 1
    assert "sleeps in train.py" in incident.detail
    until_warm(run, round=2)
    run.end()
    assert run.code() == 0


def test_without_detection_a_hung_rank_is_left_alone_and_why_tells_where_it_is(run: Run) -> None:
    run.train("--no-hang-detection", script=BARE)
    until_warm(run)
    calm = why(run)
    assert calm.startswith("hang detection is off")
    assert "train.py:" in calm, "stacks of a job that runs"
    hang(run, 1)
    said = wait_for(lambda: found if "; rank 0 waits" in (found := why(run)) else "", "a verdict")
    assert f"sleeps in train.py:{line_of(run, 'sleep')} (work)" in said
    found = run.ask("why")
    assert found["verdict"]["guilty"] == [1]
    assert [each["rank"] for each in found["evidence"]] == [0, 1]
    job = run.peek()
    assert job is not None
    assert (job.incidents, job.membership.round) == ([], 1)


def test_a_rank_that_trains_in_a_thread_is_seen_there(run: Run) -> None:
    lines = BARE.splitlines()
    first = next(n for n, line in enumerate(lines) if "while not" in line)
    loop = [f"    {line}" for line in lines[first:] if line]
    thread = ["    threading.Thread(target=train).start()"]
    script = [*lines[:first], "    def train():", "        global step", *loop, *thread]
    run.train(*SOON, script="\n".join(script).replace("import os,", "import os, threading,"))
    until_warm(run)
    hang(run, 1)
    incident = until_hang(run, 1)
    assert incident.rank == 1
    assert f"sleeps in train.py:{line_of(run, 'sleep')} (work); rank 0 waits" in incident.detail
    until_warm(run, round=2)
    run.end()
    assert run.code() == 0


WITHOUT_PTRACE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(24, 19, 0, 0, 0)  # Nobody from here on gets CAP_SYS_PTRACE.
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_where_nobody_may_look_at_a_rank_it_tells_itself_where_it_is(run: Run) -> None:
    hidden = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # Not dumpable.\n"
    command = (sys.executable, "-c", WITHOUT_PTRACE, sys.executable, "-m", "holdfast", "run")
    run.train(*SOON, script=hidden + textwrap.dedent(BARE), command=command)
    until_warm(run)
    hang(run, 1)
    incident = until_hang(run, 1)
    assert incident.rank == 1
    told = why(run, "--incident", str(incident.id))
    assert f"rank 1: is in train.py:{line_of(run, 'sleep')} (work)" in told
    seen = json.loads((run.job_home / "incidents" / str(incident.id) / "rank_1.json").read_bytes())
    assert seen["stack_source"] == "faulthandler"
    assert any("Permission denied" in reason for reason in seen["missing"])
    until_warm(run, round=2)
    run.end()
    assert run.code() == 0


def test_a_hang_that_is_only_a_doubt_never_ends_the_job(run: Run) -> None:
    """Rank 1 pauses at step 9 each time it comes there; it is given more time, and gets through."""
    script = BARE.replace("step = int", "step = 0 and int")
    pause = 'step == 9 and rank == 1 and time.sleep(2 if os.path.exists("through") else 1000)'
    script = script.replace('told("sleep")', pause)
    run.train("--rank-heartbeat-timeout", "1", script=script)
    job = run.until(lambda job: len(job.incidents) > 6, "one hang more than ever ended a job")
    assert {incident.kind for incident in job.incidents} == {"hang"}
    assert job.result is None


def test_what_is_suspected_shows_before_anything_is_done_and_a_person_decides(run: Run) -> None:
    run.train(script=BARE)
    until_warm(run)
    hang(run, 1)
    place = f"train.py:{line_of(run, 'sleep')} (work)"
    found = wait_for(
        lambda: s if (s := run.ask("status")["suspicion"]) and s["place"] and s["rank"] else None,
        "a suspicion of rank 1",
    )
    assert (found["rank"], found["place"], found["waiting"]) == (1, place, [0])
    assert found["proof"] is None
    line = wait_for(
        lambda: [x for x in run.own_lines if "has been in" in x], "a line in the terminal"
    )
    assert f"rank 1 has been in {place} for 10 s, 1 rank waits" in line[0]
    assert "no sign of life" in line[0]
    assert line[0].endswith("proven: no")
    assert "left alone until" in why(run)
    job = run.peek()
    assert job is not None
    assert job.incidents == []
    assert run.ask("hang", "--rank", "1", "now") == {"text": ANY, "type": "HangNoted"}
    assert until_hang(run, 1).rank == 1
    until_warm(run, round=2)
    run.end()
    assert run.code() == 0


# ---- scripts that are over ---------------------------------------------------------------------

OVER = """
    import atexit, os, sys, threading, time
    import holdfast

    rank = int(os.environ["RANK"])
    for step in range(1, 6):
        holdfast.progress(step)
    if rank == 1:
        print("over", flush=True)
        {end}
"""


def test_a_script_that_trains_in_a_thread_is_over_with_that_thread(run: Run) -> None:
    script = """
        import threading, time
        import holdfast

        def train():
            for step in range(1, 101):
                time.sleep(0.01)
                holdfast.progress(step)

        threading.Thread(target=train).start()
    """
    run.train(script=script)
    assert run.code() == 0
    job = run.peek()
    assert job is not None
    assert [rank.step for rank in job.ranks.values()] == [100, 100]


def test_a_rank_that_raised_and_does_not_end_is_ended_and_its_error_told(run: Run) -> None:
    """A thread that is no daemon keeps python from ending; nothing moves for ten seconds."""
    end = "threading.Thread(target=time.sleep, args=(1000,)).start(); raise ValueError(step)"
    once = f"open('once', 'x') and None if not os.path.exists('once') else sys.exit(); {end}"
    run.train(script=OVER.format(end=once))
    assert run.code() == 0
    job = run.peek()
    assert job is not None
    assert [(i.kind, i.rank) for i in job.incidents] == [("exception", 1)]
    assert job.incidents[0].signature.startswith("ValueError at train.py")


# ---- nobody hangs ------------------------------------------------------------------------------

CALM = """
    import io, os, random, time
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    import holdfast

    STEP_S, LONG_S = 0.015, 2.1

    class SlowStorage(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            time.sleep(LONG_S / 8)
            return len(data)

    def tally(n):
        return sum(range(n))

    def score(n):
        return tally(n) + 1

    def rank_them(n):
        return score(n) + tally(n)

    def evaluate_by_hand():
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            rank_them(20_000)

    def evaluate(model):
        model.eval()
        for batch in DataLoader([torch.ones(8)] * 50, batch_size=1):
            model(batch)
            time.sleep(LONG_S / 50)
        model.train()

    @record
    def main():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = DistributedDataParallel(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        pauses = random.Random(rank)
        for step in range(1, 211):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            time.sleep(STEP_S * (10 if pauses.random() < 0.02 else 1))
            if step == 40 and rank == 0:
                torch.save(model.state_dict(), SlowStorage())
            if step == 80 and rank == 0:
                with holdfast.section("checkpoint"):
                    time.sleep(LONG_S)
            if step == 100 and rank == 0:
                evaluate(model.module)
            if step == 150:
                evaluate(model)
            if step == 180:
                time.sleep(5)
            if step == 200 and rank == 0:
                evaluate_by_hand()
            if step % 20 == 0:
                dist.barrier()
        dist.barrier()

    main()
"""


def test_pauses_saves_and_evaluations_are_no_hangs(run: Run) -> None:
    run.start(run.write(CALM), nproc=2)
    assert run.code(90.0) == 0
    job = run.peek()
    assert job is not None
    # Rank 0 does more than the other, and may well be called slow.
    assert [incident for incident in job.incidents if incident.kind != "straggler"] == []
    assert job.membership.round == 1
    books = run.ask("goodput")["seconds"]
    assert books["checkpoint"] >= 4.0, "saves were not booked"
