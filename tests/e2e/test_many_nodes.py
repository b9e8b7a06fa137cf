"""Several launchers are several nodes: they join, die, pause, leave and come back."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_port

from holdfast.core.job import Job

from .harness import TRAINER, Run, gone, wait_for


class Cluster:
    """Launchers that meet at one port and share a job's home."""

    def __init__(self, make_run: Callable[[], Run]) -> None:
        self._make = make_run
        self.nodes: list[Run] = []
        self.endpoint = f"127.0.0.1:{free_port()}"

    def start(self, nnodes: str, *flags: str, where: tuple[str, ...] = ()) -> Run:
        node = self._make()
        if self.nodes:
            node.job, node.job_home = self.nodes[0].job, self.nodes[0].job_home
        meet = where or ("--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint)
        node.train("--nnodes", nnodes, *meet, *flags)
        self.nodes.append(node)
        return node

    def host(self, nnodes: str, *flags: str) -> Run:
        """Start the node that runs the coordinator."""
        node = self.start(nnodes, *flags)
        node.until(lambda job: job.membership.count() == 1, "the first node")
        return node


@pytest.fixture
def cluster(make_run: Callable[[], Run]) -> Cluster:
    return Cluster(make_run)


def kill_node(node: Run) -> None:
    """As if its machine lost power: launcher, agent and workers at the same moment."""
    for pid in node.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def rank_on(job: Job, node: Run) -> int:
    agent = str(node.agent())
    return next(n for n, rank in job.ranks.items() if f":{agent}-" in rank.node)


def sizes(job: Job) -> tuple[int, int]:
    world = job.world
    return (world.size, len(world.places)) if world is not None else (0, 0)


def two_nodes(cluster: Cluster, nnodes: str = "2") -> tuple[Run, Run, Job]:
    first = cluster.host(nnodes)
    second = cluster.start(nnodes)
    first.until(lambda job: sizes(job) == (4, 2) and not job.unstepped, "four ranks on two nodes")
    return first, second, first.until_stepping()


def test_launchers_at_one_endpoint_form_one_world(cluster: Cluster) -> None:
    first, second, job = two_nodes(cluster)
    assert sorted(job.ranks) == [0, 1, 2, 3]
    assert job.membership.round == 1
    first.end()
    assert (first.code(), second.code()) == (0, 0)


def test_launchers_started_at_the_same_moment_find_each_other(cluster: Cluster) -> None:
    for _ in range(3):
        node = cluster._make()
        node.job, node.job_home = "at-once", node.home / "jobs" / "at-once"
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", cluster.endpoint)
        node.without_torch()
        node.write(TRAINER)
        node.start("--nnodes", "3", *meet, "train.py", "20", nproc=1)
        cluster.nodes.append(node)
    assert [node.code() for node in cluster.nodes] == [0, 0, 0]


def test_torchruns_static_way_of_meeting_works(cluster: Cluster) -> None:
    host, _, port = cluster.endpoint.rpartition(":")
    where = ("--master-addr", host, "--master-port", port)
    first = cluster.start("2", "--node-rank", "0", where=where)
    first.until(lambda job: job.membership.count() == 1, "the first node")
    second = cluster.start("2", "--node-rank", "1", where=where)
    job = first.until_stepping()
    assert sizes(job) == (4, 2)
    first.end()
    assert (first.code(), second.code()) == (0, 0)


def test_a_worker_of_another_node_dies_and_all_ranks_go_on(cluster: Cluster) -> None:
    first, second, job = two_nodes(cluster)
    first.kill_rank(rank_on(job, second))
    job = first.until_stepping(round=2)
    assert sizes(job) == (4, 2)
    assert [incident.kind for incident in job.incidents] == ["signal"]
    first.end()
    assert (first.code(), second.code()) == (0, 0)


def test_a_lost_node_is_noticed_and_the_others_go_on_without_it(cluster: Cluster) -> None:
    first, second, before = two_nodes(cluster, "1:2")
    kill_node(second)
    job = first.until(lambda job: sizes(job) == (2, 1) and not job.unstepped, "two ranks")
    assert job.incidents[-1].kind == "node"
    assert job.membership.round == before.membership.round + 1
    first.end()
    assert first.code() == 0


def test_a_spare_takes_the_place_of_a_lost_node_and_survivors_keep_their_ranks(
    cluster: Cluster,
) -> None:
    first, second, before = two_nodes(cluster)
    spare = cluster.start("2", "--spares", "1")
    first.until(lambda job: len(job.membership.waiting) == 1, "a spare")
    kept = {n: rank.node for n, rank in before.ranks.items() if n != rank_on(before, second)}
    kill_node(second)
    job = first.until_stepping(round=2)
    assert sizes(job) == (4, 2)
    assert {job.ranks[n].node for n in (0, 1)} == {before.ranks[n].node for n in (0, 1)}, kept
    first.end()
    assert (first.code(), spare.code()) == (0, 0)


def test_a_node_that_joins_later_makes_the_world_larger_and_costs_no_restart(
    cluster: Cluster,
) -> None:
    first = cluster.host("1:2")
    first.until(lambda job: sizes(job) == (2, 1) and not job.unstepped, "two ranks")
    second = cluster.start("1:2")
    job = first.until(lambda job: sizes(job) == (4, 2) and not job.unstepped, "four ranks")
    assert job.recovery.history.restarts == 0
    assert [incident.kind for incident in job.incidents] == ["resize"]
    first.end()
    assert (first.code(), second.code()) == (0, 0)


def test_a_node_that_is_told_to_leave_goes_with_75_and_the_others_go_on(cluster: Cluster) -> None:
    first, second, _ = two_nodes(cluster, "1:2")
    second.kill(second.pid, signal.SIGTERM)
    assert second.code() == 75
    job = first.until(lambda job: sizes(job) == (2, 1) and not job.unstepped, "two ranks")
    assert job.incidents[-1].kind == "leave"
    assert job.recovery.history.restarts == 0
    first.end()
    assert first.code() == 0


def test_an_agent_that_was_paused_and_replaced_is_fenced_and_joins_afresh(cluster: Cluster) -> None:
    first, second, before = two_nodes(cluster, "1:2")
    agent = second.agent()
    second.kill(agent, signal.SIGSTOP)
    first.until(lambda job: job.membership.count() == 1, "the paused node to be given up")
    old = [rank.pid for rank in before.ranks.values() if f":{agent}-" in rank.node]
    second.kill(agent, signal.SIGCONT)
    first.until(lambda job: sizes(job) == (4, 2) and not job.unstepped, "four ranks again")
    assert all(gone(pid) for pid in old)
    assert gone(agent)
    first.end()
    assert (first.code(), second.code()) == (0, 0)


def test_too_few_nodes_end_the_job_with_75_and_say_what_is_missing(cluster: Cluster) -> None:
    alone = cluster.host("2", "--rdzv-conf", "join_timeout=1")
    assert alone.code() == 75
    assert "1 of at least 2 nodes" in alone.err


def test_a_killed_coordinator_is_back_without_a_new_round_and_in_control(cluster: Cluster) -> None:
    first, second, before = two_nodes(cluster)
    first.kill(first.coordinator())
    highest = before.highest
    job = first.until(
        lambda job: not job.membership.absent and job.highest > highest + 50, "more steps"
    )
    assert job.membership.round == 1
    assert {r.pid for r in job.ranks.values()} == {r.pid for r in before.ranks.values()}
    first.kill_rank(rank_on(job, second))
    first.until_stepping(round=2)
    first.end()
    assert (first.code(), second.code()) == (0, 0)


# ---- the coordinator alone ---------------------------------------------------------------------


def coordinator(run: Run, address: str, *flags: str) -> Run:
    command = [sys.executable, "-m", "holdfast", "coordinator", "--job", run.job]
    return run.start_raw([*command, "--listen", address, *flags])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_coordinator_alone_may_die_and_be_started_again(
    cluster: Cluster, make_run: Callable[[], Run], elsewhere: bool
) -> None:
    """Elsewhere: its nodes find the new address in the job's home, which they share."""
    alone = coordinator(make_run(), cluster.endpoint)
    wait_for(lambda: "listens on" in alone.out, "the coordinator")
    cluster.nodes.append(alone)
    where = ("--coordinator", cluster.endpoint)
    nodes = [cluster.start("2", where=where) for _ in range(2)]
    before = alone.until_stepping()
    alone.kill(alone.pid)
    assert alone.process is not None
    alone.process.wait()
    coordinator(alone, "127.0.0.1:0" if elsewhere else cluster.endpoint)
    highest = before.highest
    job = alone.until(
        lambda job: not job.membership.absent and job.highest > highest + 50, "more steps"
    )
    assert job.membership.round == 1
    alone.end()
    assert [node.code() for node in nodes] == [0, 0]
    assert alone.code() == 0


def test_a_node_with_the_wrong_token_is_turned_away_with_one_line(cluster: Cluster) -> None:
    first = cluster.host("1:2")
    stranger = cluster._make()
    stranger.env["HOLDFAST_TOKEN"] = "guess"
    stranger.train("--nnodes", "1:2", "--coordinator", cluster.endpoint)
    assert stranger.code() == 2
    assert "wrong token" in stranger.err
    first.end()
    assert first.code() == 0


# ---- TLS ---------------------------------------------------------------------------------------


@pytest.fixture
def certificates(tmp_path: Path) -> tuple[str, ...]:
    """An authority of the job's own and a certificate that it signed, as flags."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path / "tls"
    folder.mkdir()

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj")
    openssl("req", "-x509", *new, "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", *new, "/CN=node", "-keyout", "node.key", "-out", "node.csr")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl("x509", "-req", "-in", "node.csr", *signing, "-out", "node.pem")
    files = {"cert": "node.pem", "key": "node.key", "ca": "ca.pem"}
    return tuple(w for name, f in files.items() for w in (f"--tls-{name}", str(folder / f)))


def test_with_tls_only_those_with_a_certificate_get_in(
    cluster: Cluster, certificates: tuple[str, ...]
) -> None:
    first = cluster.host("1:2", *certificates)
    second = cluster.start("1:2", *certificates)
    first.until(lambda job: sizes(job) == (4, 2) and not job.unstepped, "four ranks over TLS")
    plain = cluster.start("1:2", "--rdzv-conf", "join_timeout=2")
    assert plain.code() == 2
    first.end()
    assert (first.code(), second.code()) == (0, 0)
