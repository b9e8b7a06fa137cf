"""A node whose ranks crash again and again makes place for a spare, and is named."""

from __future__ import annotations

from holdfast.core.job import Job
from holdfast.core.suspects.state import Suspects

from .test_node_check import Nodes, name_of, nodes, table, trains_on

__all__ = ["nodes"]

CRASHING = """
    import os, signal, time
    import holdfast

    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)

    rank = os.environ["RANK"]
    bad = os.environ.get("BAD_NODE", "")
    while bad == "at once":
        time.sleep(0.01)
        if os.path.exists("go"):
            crash()
    open(f"began_{rank}", "w").close()
    while not (os.path.exists("began_0") and os.path.exists("began_1")):
        time.sleep(0.01)  # No rank takes a step before all have begun.
    kept = f"step_{rank}"
    step = int(open(kept).read()) if os.path.exists(kept) else 0
    last = step + 5 if bad else 1 << 30
    while not os.path.exists("end"):
        time.sleep(0.01)
        step += 1
        with open(kept + ".new", "w") as file:
            file.write(str(step))
        os.replace(kept + ".new", kept)
        holdfast.progress(step)
        if step >= last and os.path.exists("go"):
            crash()
"""
"""Trains without torch. On a bad node a rank crashes after five steps, or at once, from when there is a
file named go."""


def crashes(job: Job) -> list[str]:
    """The nodes of the ranks that crashed, in order."""
    return [one.node for one in job.incidents if one.signature == "killed by SIGSEGV"]


def started(nodes: Nodes, bad: str) -> str:
    """Start two nodes, the second of which is bad, and a spare; the bad one, which crashes from now."""
    first = nodes.start("2", "--spares", "1", script=CRASHING)
    culprit = nodes.start("2", "--spares", "1", script=CRASHING, BAD_NODE=bad)
    name = name_of(culprit)
    first.until(lambda job: job.membership.round > 0, "the first round")
    nodes.start("2", "--spares", "1", script=CRASHING)
    first.until(lambda job: len(job.membership.waiting) == 1, "a spare")
    (first.folder / "go").touch()
    return name


def test_a_node_whose_ranks_crash_again_and_again_makes_place_for_a_spare(nodes: Nodes) -> None:
    name = started(nodes, "after some steps")
    first = nodes.all[0]
    job = first.until(lambda job: bool(left(job)) and trains_on(job, 2), "the bad node to be left")
    assert set(crashes(job)) == {name}
    assert len(crashes(job)) == 7
    assert name not in {rank.node for rank in job.ranks.values()}
    assert job.membership.has(job.incidents[-1].node), "it waits, and is not sent away"
    status = first.ask("status")
    assert "crashes struck it (killed by SIGSEGV, rank 1)" in status["suspects"][name]
    assert any(line.startswith(f"suspect: node {name}: ") for line in table(first))
    named = [one for one in first.ask("incidents") if one["kind"] == "suspect"]
    assert [one["node"] for one in named][-1] == name
    assert nodes.end() == [0, 0, 0]
    assert f"suspect: node {name}" in first.err


def left(job: Job) -> list[str]:
    """The suspects that another node has replaced."""
    suspicions = job.of(Suspects).all.values()
    return [one.node for one in suspicions if one.state == "replaced"]


def test_a_node_that_crashes_before_the_first_step_makes_place_before_the_job_is_given_up(
    nodes: Nodes,
) -> None:
    name = started(nodes, "at once")
    first = nodes.all[0]
    job = first.until(lambda job: bool(left(job)) and trains_on(job, 2), "the bad node to be left")
    assert crashes(job) == [name, name]
    assert "not on another node" in first.ask("status")["suspects"][name]
    assert nodes.end() == [0, 0, 0]
