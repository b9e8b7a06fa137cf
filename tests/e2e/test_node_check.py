"""Nodes that test each other, nodes that fall ill, and ranks that slow the others down."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_port

from holdfast.coordinator.journal import replay
from holdfast.core.job import Job
from holdfast.core.nodecheck.schedule import Checking

from .harness import PATIENCE_S, TRAINER, Run, wait_for

SLUGGISH = """
    import os, time
    import torch
    import torch.distributed as dist
    import holdfast

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    slow = "SLOW_NODE" in os.environ or os.environ.get("SLOW_RANK") == str(rank)

    class Model(torch.nn.Linear):
        def forward(self, x):
            time.sleep(0.4 if slow else 0.1)
            return super().forward(x)

    def tell(finding):
        with open(f"told_{rank}", "a") as file:
            file.write(f"{finding.rank} {finding.kind} {finding.began} {finding.section}\\n")

    holdfast.on_straggler(tell)
    if "SHARDED" in os.environ:
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(Model(8, 8))
    else:
        model = torch.nn.parallel.DistributedDataParallel(Model(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    end = torch.zeros(1)
    while not end:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        end[0] = os.path.exists("end")
        dist.all_reduce(end)
"""
"""Trains with gloo, and DDP or FSDP; a rank that is slow sleeps four times as long in its forward
pass. Both sleep for long: the time without a CPU must be a small part of a step, on a busy machine too,
or no rank may be called slow."""

COLD = ("--standby", "0")
"""No nursery: each process imports torch for itself, which is less work if there are few of them."""


class Nodes:
    """Launchers that meet at one port, each with an environment of its own."""

    def __init__(self, make_run: Callable[[], Run], folder: Path) -> None:
        self._make = make_run
        self._folder = folder
        self.all: list[Run] = []
        self.endpoint = f"127.0.0.1:{free_port()}"

    def start(self, nnodes: str, *flags: str, script: str = TRAINER, **env: str) -> Run:
        """The first one has joined when this returns; others are on their way."""
        node = self._make()
        if self.all:
            node.job, node.job_home = self.all[0].job, self.all[0].job_home
        if "--node-check" not in flags and "import torch" not in script:
            node.without_torch()
        meet = ("--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint)
        node.start(*meet, *flags, node.write(script), nproc=1, env=env)
        self.all.append(node)
        if len(self.all) == 1:
            node.until(lambda job: job.membership.count() == 1, "the first node")
        return node

    def checked(self, nnodes: str, count: int, *flags: str, **odd: str) -> Run:
        """That many nodes that are to be checked; the second is odd. The first."""
        for i in range(count):
            self.start(nnodes, "--node-check", *flags, **(odd if i == 1 else {}))
        return self.all[0]

    def made_up(self, **files: object) -> Path:
        """The directory of a machine that is made up, with these JSON files."""
        root = self._folder / f"machine-{len(self.all)}"
        root.mkdir()
        for name, content in files.items():
            put(root / f"{name}.json", json.dumps(content))
        return root

    def end(self) -> list[int]:
        self.all[0].end()
        return [node.code() for node in self.all]


@pytest.fixture
def nodes(make_run: Callable[[], Run], tmp_path: Path) -> Nodes:
    return Nodes(make_run, tmp_path)


def put(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


def name_of(node: Run) -> str:
    """The id of a node that has joined, whether it is still a member or not."""
    agent = f":{node.agent()}-"

    def look() -> str:
        snapshot = replay(node.job_home / "journal.db")
        assert snapshot is not None
        return next((name for name in snapshot.acked if agent in name), "")

    return wait_for(look, "the node's first word")


def trains_on(job: Job, count: int) -> bool:
    world = job.world
    return world is not None and len(world.places) == count and not job.unstepped


def unfit(job: Job) -> dict[str, str]:
    return {i.node: i.signature for i in job.incidents if i.kind == "unfit"}


# ---- nodes test each other ---------------------------------------------------------------------


def test_healthy_nodes_are_checked_in_no_time_before_they_train_and_after_a_fault(
    nodes: Nodes,
) -> None:
    began = time.monotonic()
    first = nodes.checked("4", 4)
    job = first.until(lambda job: trains_on(job, 4), "four nodes that train")
    with_torch_s = time.monotonic() - began
    assert job.of(Checking).number == 1
    assert job.incidents == []
    for node in nodes.all:
        wait_for(node.standbys, "a standby")
    first.kill_rank(0)
    job = first.until_stepping(round=2)
    assert job.of(Checking).number == 2
    (incident,) = first.ask("incidents")
    again_s = incident["phases"]["rendezvous"]
    assert again_s < with_torch_s / 2, "the second check had torch to wait for nowhere"
    assert nodes.end() == [0, 0, 0, 0]


def test_a_node_with_a_broken_link_is_found_and_the_others_train(nodes: Nodes) -> None:
    machine = nodes.made_up(selftest={"pair": "broken link"})
    first = nodes.checked("2:3", 3, HOLDFAST_FAKE_NODE=str(machine))
    sick = nodes.all[1]
    name = name_of(sick)
    assert sick.code() == 93
    job = first.until(lambda job: trains_on(job, 2), "two nodes that train")
    assert list(unfit(job)) == [name]
    assert "passed with others" in unfit(job)[name]
    told = first.ask("status")["excluded"]
    assert "passed with others" in told[socket.gethostname()]
    assert nodes.end() == [0, 93, 0]


def test_of_two_nodes_the_one_that_cannot_compute_goes_and_the_other_does_not_wait_for_it(
    nodes: Nodes,
) -> None:
    machine = nodes.made_up(selftest={"solo": "no GPU"})
    first = nodes.checked("1:2", 2, *COLD, HOLDFAST_FAKE_NODE=str(machine))
    name = name_of(nodes.all[1])
    assert nodes.all[1].code() == 93
    job = first.until(lambda job: trains_on(job, 1), "one node that trains")
    assert unfit(job) == {name: "is unfit: failed its solo test: RuntimeError: no GPU"}
    assert nodes.end() == [0, 93]


@pytest.mark.parametrize("fault", [None, {"solo": "no GPU"}])
def test_a_node_alone_is_checked_too(run: Run, tmp_path: Path, fault: object) -> None:
    if fault is not None:
        put(tmp_path / "machine" / "selftest.json", json.dumps(fault))
    env = {} if fault is None else {"HOLDFAST_FAKE_NODE": str(tmp_path / "machine")}
    run.start("--node-check", *COLD, run.write(TRAINER), "5", nproc=1, env=env)
    assert run.code() == (0 if fault is None else 93)
    if fault is not None:
        assert "no node is fit to train" in run.err
        assert "failed its solo test: RuntimeError: no GPU" in run.err
        assert run.ask("status")["state"] == "ended"


def test_a_test_whose_process_is_killed_is_nobodys_fault(nodes: Nodes, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    machine = nodes.made_up(selftest={"hold": str(hold)})
    first = nodes.checked("3", 3, *COLD, HOLDFAST_FAKE_NODE=str(machine))
    first.until(lambda job: job.of(Checking).check is not None, "a check")
    (testing,) = wait_for(nodes.all[1].standbys, "the process that tests")
    first.kill(testing)
    hold.unlink()
    job = first.until(lambda job: trains_on(job, 3), "three nodes that train")
    assert job.incidents == []
    assert nodes.end() == [0, 0, 0]


def test_a_coordinator_killed_in_the_middle_of_a_check_goes_on_with_it(
    nodes: Nodes, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    machine = nodes.made_up(selftest={"hold": str(hold)})
    first = nodes.checked("2", 2, *COLD, HOLDFAST_FAKE_NODE=str(machine))
    first.until(lambda job: job.of(Checking).check is not None, "a check")
    wait_for(nodes.all[1].standbys, "the process that tests")
    old = first.coordinator()
    first.kill(old)
    wait_for(lambda: first.coordinator() != old, "another coordinator")
    first.until(lambda job: not job.membership.absent, "all nodes to be back")
    hold.unlink()
    job = first.until(lambda job: trains_on(job, 2), "two nodes that train")
    assert (job.membership.round, job.of(Checking).number, job.incidents) == (1, 1, [])
    assert nodes.end() == [0, 0]


# ---- nodes fall ill ----------------------------------------------------------------------------


def gpu(**what: object) -> dict[str, object]:
    gpus = [{"index": 0, "uuid": "GPU-0", "recovery": 0, "ecc_uncorrected": 0, **what}]
    return {"driver": "570.86.15", "gpus": gpus}


def keep_failing(counter: Path, node: Run) -> None:
    """A link goes down again and again, until somebody has seen it do so between two looks."""
    downs = 0

    def over() -> bool:
        nonlocal downs
        downs += 1
        put(counter, str(downs))
        assert node.process is not None
        return node.process.poll() is not None

    wait_for(over, "the node to be sent away")


@pytest.mark.parametrize("part", ["gpu", "nic"])
def test_a_node_that_falls_ill_makes_place_for_a_spare(nodes: Nodes, part: str) -> None:
    machine = nodes.made_up(nvml=gpu())
    port = machine / "sys" / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    put(port / "state", "4: ACTIVE")
    put(port / "phys_state", "5: LinkUp")
    put(port / "counters" / "link_downed", "0")
    first = nodes.start("2", "--spares", "1")
    sick = nodes.start("2", "--spares", "1", HOLDFAST_FAKE_NODE=str(machine))
    first.until(lambda job: trains_on(job, 2), "two nodes that train")
    nodes.start("2", "--spares", "1")
    first.until(lambda job: len(job.membership.waiting) == 1, "a spare")
    name = name_of(sick)
    if part == "gpu":
        put(machine / "nvml.json", json.dumps(gpu(recovery=1)))
    else:
        keep_failing(port / "counters" / "link_downed", sick)
    assert sick.code() == 93
    job = first.until_stepping(round=2)
    assert trains_on(job, 2)
    assert part in unfit(job)[name]
    assert job.recovery.history.restarts == 0
    assert nodes.end() == [0, 93, 0]


# ---- ranks that are slow -----------------------------------------------------------------------


@pytest.mark.parametrize("model", ["REPLICATED", "SHARDED"])
def test_a_slow_rank_is_found_shown_and_told_to_the_script(
    run: Run, tmp_path: Path, model: str
) -> None:
    run.start(run.write(SLUGGISH), nproc=4, env={"SLOW_RANK": "2", model: "yes"})
    for rank in range(4):
        found = wait_for(lambda rank=rank: told(tmp_path, rank), "the script to be told", 90)
        assert found[0].startswith("2 relative True")
    job = run.peek()
    assert job is not None
    assert [one.rank for one in job.incidents if one.kind == "straggler"] == [2]
    assert job.membership.round == 1
    ranks = {r["rank"]: r for node in run.ask("status")["nodes"] for r in node["ranks"]}
    assert ranks[2]["straggler"] == "relative"
    assert ranks[2]["score"] < 0.6
    assert ranks[2]["score"] == min(r["score"] for r in ranks.values())
    assert any(line.endswith(", slow") and "\t2\t" in line for line in table(run))
    run.end()
    assert run.code() == 0


def told(folder: Path, rank: int) -> list[str]:
    path = folder / f"told_{rank}"
    return path.read_text().splitlines() if path.exists() else []


def table(run: Run) -> list[str]:
    """What `holdfast status` shows people."""
    command = [sys.executable, "-m", "holdfast", "status", run.job]
    env = {**run.env, "HOLDFAST_TEST_ID": ""}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    return shown.stdout.splitlines()


def test_the_node_of_a_slow_rank_makes_place_for_a_spare(nodes: Nodes) -> None:
    flags = ("--exclude-stragglers", "--spares", "1")
    nodes.start("2", *flags, script=SLUGGISH)
    slow = nodes.start("2", *flags, script=SLUGGISH, SLOW_NODE="1")
    first = nodes.all[0]
    first.until(lambda job: job.world is not None, "two nodes")
    nodes.start("2", *flags, script=SLUGGISH)
    name = name_of(slow)
    assert slow.code() == 93
    job = first.until_stepping(round=2)
    assert name not in {rank.node for rank in job.ranks.values()}
    straggler = next(i for i in job.incidents if i.kind == "straggler" and i.node == name)
    assert straggler.action == "its node makes place for a spare"
    assert job.recovery.history.restarts == 0
    assert nodes.end() == [0, 93, 0]
