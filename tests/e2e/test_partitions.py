"""Links are cut and mended: nobody trains in two worlds, and what comes back in time goes on.

Nodes live in network namespaces, each with a cable of its own to the host of the coordinator. A script
that knows nothing of Holdfast notes the time, which all processes of the machine share, every few
milliseconds: these notes prove who ran when.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from holdfast.core.job import Job
from holdfast.core.leases import lease_s

from .harness import Run, wait_for
from .links import Link, laid

SCRIPT = """
    import os, signal, time

    signal.signal(signal.SIGCONT, lambda *_: open(f"continued_{os.getpid()}", "w").close())
    with open(f"notes_{os.environ['TORCHELASTIC_RESTART_COUNT']}_{os.getpid()}", "a") as notes:
        while not os.path.exists("end"):
            print(time.monotonic(), file=notes, flush=True)
            time.sleep(0.005)
"""


class Partitions:
    """A coordinator on this host, and nodes at the far ends of links."""

    def __init__(self, make_run: Callable[[], Run], links: list[Link]) -> None:
        self._make, self.links = make_run, links
        self.nodes: list[Run] = []
        self.coordinator = make_run()
        command = [sys.executable, "-m", "holdfast", "coordinator", "--json"]
        listens = ["--job", self.coordinator.job, "--listen", "0.0.0.0:0"]
        self.coordinator.start_raw([*command, *listens], stdout=subprocess.PIPE)
        assert self.coordinator.process is not None
        assert self.coordinator.process.stdout is not None
        answer = self.coordinator.process.stdout.readline().decode()
        self.port = int(answer.rpartition(": ")[2].rstrip("}\n"))

    def start(self, link: Link, nnodes: str, *flags: str) -> Run:
        node = self._make()
        node.job, node.job_home = self.coordinator.job, self.coordinator.job_home
        node.without_torch()
        meet = ("--nnodes", nnodes, "--coordinator", f"{link.here}:{self.port}", *flags)
        command = link.command(sys.executable, "-m", "holdfast", "run")
        node.start(*meet, node.write(SCRIPT), nproc=1, command=command)
        self.nodes.append(node)
        return node

    def until(self, found: Callable[[Job], object], what: str) -> Job:
        return self.coordinator.until(found, what)

    def notes(self) -> dict[str, list[float]]:
        """When each process ran, by its file."""
        files = sorted(self.coordinator.folder.glob("notes_*"))
        return {file.name: [float(word) for word in file.read_text().split()] for file in files}

    def continued(self) -> list[str]:
        """The ranks that had been stopped, and were told to go on."""
        return [file.name for file in self.coordinator.folder.glob("continued_*")]

    def end(self) -> list[int]:
        (self.coordinator.folder / "end").touch()
        return [node.code() for node in self.nodes]


@pytest.fixture
def links() -> Iterator[list[Link]]:
    with laid(2) as links:
        yield links


@pytest.fixture
def cluster(make_run: Callable[[], Run], links: list[Link]) -> Partitions:
    return Partitions(make_run, links)


def running(job: Job, ranks: int) -> bool:
    return job.world is not None and len(job.ranks) == ranks and not job.unstarted


def longest_gap_s(notes: list[float]) -> float:
    return max(later - earlier for earlier, later in pairwise(notes))


def stay_cut(link: Link, seconds: float) -> None:
    """Cut a link for a time that must not be shorter."""
    link.cut()
    time.sleep(seconds)
    link.mend()


def test_a_node_that_is_cut_off_has_stopped_before_a_spare_takes_its_place(
    cluster: Partitions,
) -> None:
    near, far = cluster.links
    cut = cluster.start(near, "1", "--spares", "1")
    cluster.until(lambda job: running(job, 1), "the first world")
    cluster.start(far, "1", "--spares", "1")
    cluster.until(lambda job: job.membership.count() == 2, "the spare")
    near.cut()
    cluster.until(lambda job: job.membership.round == 2 and running(job, 1), "the next world")
    wait_for(lambda: len(cluster.notes()) == 2, "notes of the spare")
    near.mend()
    wait_for(lambda: "joins again" in cut.err, "the first node to be fenced")
    cluster.until(lambda job: job.membership.count() == 2, "the first node as a spare")
    first, second = cluster.notes().values()
    assert max(first) < min(second)
    assert cluster.end() == [0, 0]


def test_nodes_that_nobody_can_replace_are_paused_and_go_on_with_nothing_lost(
    cluster: Partitions,
) -> None:
    """The coordinator's host is without network for longer than a lease.

    On a busy machine leases may be longer already, and may become so once more."""
    nodes = [cluster.start(link, "2") for link in cluster.links]
    job = cluster.until(lambda job: running(job, 2), "the world")
    cut_s = 2 * job.membership.silence_s
    for link in cluster.links:
        link.cut()
    time.sleep(cut_s)
    mended = time.monotonic()
    for link in cluster.links:
        link.mend()
    wait_for(lambda: all(one[-1] > mended + 1 for one in cluster.notes().values()), "more notes")
    job = cluster.until(lambda job: not job.membership.absent, "both nodes")
    assert job.membership.round == 1
    assert job.incidents == []
    for notes in cluster.notes().values():
        paused_s = cut_s - lease_s(job.membership.silence_s) - 1.0
        assert longest_gap_s(notes) > paused_s, "it trained on without a lease"
    assert len(cluster.continued()) == 2
    assert all("ranks are paused" in node.err for node in nodes)
    assert cluster.end() == [0, 0]


def test_a_link_that_is_down_for_a_moment_costs_nothing(cluster: Partitions) -> None:
    """The node gets errors of every kind: no route, no network, no host."""
    node = cluster.start(cluster.links[0], "1", "--spares", "1")
    cluster.until(lambda job: running(job, 1), "the world")
    agent = node.agent()
    stay_cut(cluster.links[0], 1.5)
    mended = time.monotonic()
    wait_for(lambda: all(one[-1] > mended + 1 for one in cluster.notes().values()), "more notes")
    assert len(cluster.notes()) == 1
    assert cluster.continued() == []
    assert node.agent() == agent
    assert cluster.end() == [0]


def test_a_dead_coordinator_gives_nobody_up_and_stops_nobody(cluster: Partitions) -> None:
    """Its host can be reached and refuses connections: ranks train on for longer than a lease."""
    node = cluster.start(cluster.links[0], "1", "--spares", "1")
    job = cluster.until(lambda job: running(job, 1), "the world")
    wait_for(cluster.notes, "notes")
    cluster.coordinator.kill(cluster.coordinator.pid)
    died = time.monotonic()
    limit_s = 2 * lease_s(job.membership.silence_s)
    wait_for(lambda: next(iter(cluster.notes().values()))[-1] > died + limit_s, "more notes")
    assert len(cluster.notes()) == 1
    assert cluster.continued() == []
    assert "ranks are paused" not in node.err


def test_a_stopped_agent_does_not_keep_its_ranks_from_stopping(cluster: Partitions) -> None:
    """Ranks stop themselves at the end of the lease, and a spare begins after that."""
    cut = cluster.start(cluster.links[0], "1", "--spares", "1")
    cluster.until(lambda job: running(job, 1), "the first world")
    cluster.start(cluster.links[1], "1", "--spares", "1")
    cluster.until(lambda job: job.membership.count() == 2, "the spare")
    agent = cut.agent()
    cut.kill(agent, signal.SIGSTOP)
    cluster.until(lambda job: job.membership.round == 2 and running(job, 1), "the next world")
    wait_for(lambda: len(cluster.notes()) == 2, "notes of the spare")
    cut.kill(agent, signal.SIGCONT)
    wait_for(lambda: "joins again" in cut.err, "the first node to be fenced")
    cluster.until(lambda job: job.membership.count() == 2, "the first node as a spare")
    first, second = cluster.notes().values()
    assert max(first) < min(second)
    assert cluster.end() == [0, 0]
