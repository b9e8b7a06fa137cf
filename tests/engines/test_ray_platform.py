"""`holdfast up --on ray` on a real Ray cluster: nodes are actors, and come back when hosts die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.harness import MARKER, TRAINER, Run, wait_for

from holdfast.core.job import Job

from . import ray_cluster
from .ray_cluster import AutoscalingRayCluster, RayCluster

pytestmark = [
    pytest.mark.platform,
    pytest.mark.timeout(400),
    pytest.mark.skipif(ray_cluster.missing() is not None, reason=str(ray_cluster.missing())),
    pytest.mark.xdist_group("ray"),
]

UP = (sys.executable, "-m", "holdfast", "up", "--on", "ray")
ACTORS = """
import json, ray, ray.util
ray.init(logging_level="ERROR", log_to_driver=False)
found = ray.util.list_named_actors(all_namespaces=True)
print(json.dumps([one["name"] for one in found]))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Three nodes besides the head; a test that takes one away adds another."""
    with RayCluster(3, resources={"spot": 1}) as cluster:
        yield cluster


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    try:
        yield run
    except BaseException:
        print(run.story())
        raise
    finally:
        print(run.story())
        run.close()


def up(run: Run, cluster: Any, *flags: str, script: str = TRAINER, **more: Any) -> Run:
    run.env = {**cluster.env, **{k: v for k, v in run.env.items() if k.startswith("HOLDFAST_")}}
    run.env |= more.pop("env", {})
    return run.train(*flags, script=script, nproc=1, command=UP, **more)


def driver(run: Run, cluster: Any, script: str, wait: bool = True) -> Any:
    """Run a Python program in the cluster; what it prints last, as JSON."""
    env = {**run.env, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=env,
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def actors(run: Run, cluster: Any) -> list[str]:
    env = {k: v for k, v in run.env.items() if k != MARKER}
    done = subprocess.run(
        [sys.executable, "-c", ACTORS],
        env={**env, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return [name for name in json.loads(done.stdout.splitlines()[-1]) if run.job in name]


def stepping(run: Run, nodes: int, round: int = 1) -> Job:
    return run.until_stepping(round, nodes)


def hosts(job: Job) -> dict[str, str]:
    """Ray's node ids by the request that is there, of nodes that train."""
    specs = [one.spec for one in job.membership.placed.values()]
    return {spec.request: spec.host for spec in specs}


def positions(run: Run) -> dict[int, Any]:
    return {one["position"]: one for one in run.ask("status")["supply"]["positions"]}


def test_a_job_runs_to_its_end_on_actors_and_leaves_none(run: Run, cluster: RayCluster) -> None:
    up(run, cluster, "--nodes", "2", args=("20",))
    assert run.code() == 0, run.err
    wait_for(lambda: not actors(run, cluster), "all actors to be gone")


def test_a_spare_takes_the_place_of_a_host_that_dies_and_ray_is_asked_for_another(
    run: Run, cluster: RayCluster
) -> None:
    script = TRAINER.replace("    until =", '    print("rank", rank, "trains")\n    until =')
    up(run, cluster, "--nodes", "2", "--spares", "1", script=script)
    job = stepping(run, 2)
    run.until(lambda job: len(job.membership.waiting) == 1, "a spare")
    for rank in range(2):
        wait_for(lambda rank=rank: f"rank {rank} trains" in run.out, "what a rank prints")  # type: ignore[misc]
    request, host = next(iter(hosts(job).items()))
    cluster.kill_node(host)
    job = stepping(run, 2, round=2)
    assert request not in hosts(job)
    (incident,) = run.ask("incidents")
    assert "a spare took the lost node's place" in incident["action"]
    cluster.add_node()
    run.until(lambda job: len(job.membership.waiting) == 1, "another spare")
    found = positions(run)[int(request[0])]
    assert (found["request"], found["reason"]) == (f"{request[0]}-2", "lost")
    run.end()
    assert run.code() == 0


def test_without_a_spare_the_job_goes_on_once_ray_has_another_host(
    run: Run, cluster: RayCluster
) -> None:
    up(run, cluster, "--nodes", "3", env={"HOLDFAST_RAY_CPUS": "2"})
    job = stepping(run, 3)
    assert sorted(hosts(job).values()) == sorted(cluster.nodes), "one on each host"
    request, host = next(iter(hosts(job).items()))
    cluster.kill_node(host)
    new = f"{request[0]}-2"
    run.until(lambda job: job.supply.positions[int(request[0])].request == new, "another request")
    detail = wait_for(lambda: positions(run)[int(request[0])]["detail"], "what Ray waits for")
    assert "waits until CPU 2 is free on one of 2 nodes" in detail
    added = cluster.add_node()
    assert hosts(stepping(run, 3, round=2))[new] == added
    run.end()
    assert run.code() == 0


def test_a_supplier_that_is_killed_costs_no_round_and_the_next_one_has_all_actors(
    run: Run, cluster: RayCluster
) -> None:
    up(run, cluster, "--nodes", "2")
    before = stepping(run, 2)
    first = wait_for(lambda: run._child("holdfast-supply"), "the supplier")
    run.kill(first)
    wait_for(lambda: run._child("holdfast-supply") not in (None, first), "another supplier")
    highest = before.highest
    job = run.until(
        lambda job: job.supply.connected and job.highest > highest + 20, "steps with the next one"
    )
    assert (job.membership.round, hosts(job)) == (before.membership.round, hosts(before))
    assert sorted(actors(run, cluster)) == [f"{run.job}/0-1", f"{run.job}/1-1"]
    kill = f"""
    import ray
    ray.init(logging_level="ERROR", log_to_driver=False)
    (space,) = [one["namespace"] for one in ray.util.list_named_actors(all_namespaces=True)
                if one["name"] == "{run.job}/0-1"]
    ray.kill(ray.get_actor("{run.job}/0-1", namespace=space))
    print("{{}}")
    """
    driver(run, cluster, kill)
    job = stepping(run, 2, round=2)
    assert sorted(hosts(job)) == ["0-2", "1-1"]
    assert job.supply.positions[0].reason == "deleted"
    run.end()
    assert run.code() == 0


def test_a_launcher_that_is_killed_takes_every_actor_with_it(run: Run, cluster: RayCluster) -> None:
    up(run, cluster, "--nodes", "2")
    stepping(run, 2)
    run.kill(run.pid)
    run.code()
    wait_for(lambda: not actors(run, cluster), "all actors to be gone")
    run.assert_nobody_left()


def test_a_job_is_scaled_up_and_down_while_it_runs(run: Run, cluster: RayCluster) -> None:
    up(run, cluster, "--nodes", "1:2")
    stepping(run, 2)
    run.ask("scale", "1:3")
    stepping(run, 3)
    run.ask("scale", "1:1")
    stepping(run, 1)
    wait_for(lambda: len(actors(run, cluster)) == 1, "two actors to go")
    run.end()
    assert run.code() == 0


def test_what_no_host_of_the_cluster_can_hold_is_refused_for_good(
    run: Run, cluster: RayCluster
) -> None:
    up(run, cluster, "--nodes", "2", env={"HOLDFAST_RAY_GPUS": "8"})
    assert run.code() == 93
    assert "no node of the Ray cluster has GPU 8 (the most is 0)" in run.err
    assert "ask for less, or add such a node" in run.err


def test_actors_are_on_none_of_the_hosts_to_avoid(run: Run, cluster: RayCluster) -> None:
    script = f"""
    import asyncio, json, sys
    from holdfast.platforms.ray_engine import ActorTerms, connect
    from holdfast.platforms.ray_node import RayNodeStart
    async def place():
        engine = connect("avoiding")
        terms = ActorTerms(cpus=1, resources={{"spot": 0.1}}, avoid={tuple(cluster.nodes[:2])!r})
        start = RayNodeStart(request="0-1", command=("-c", "pass"), environ={{}}, limit_s=1,
                          directory=".")
        await engine.create("avoiding/0-1", start, terms)
        await engine.create("avoiding/0-1", start, terms)
        state = await engine.ended("avoiding/0-1")
        names = await engine.names()
        await engine.remove("avoiding/0-1")
        await engine.remove("avoiding/0-1")
        print(json.dumps([state.host, state.code, names]))
    asyncio.run(place())
    """
    host, code, names = driver(run, cluster, script)
    assert (host, code, names) == (cluster.nodes[2], 0, ["avoiding/0-1"])


def test_a_cluster_that_cannot_be_reached_is_said_in_one_line(
    run: Run, cluster: RayCluster
) -> None:
    up(run, cluster, "--nodes", "2", env={"RAY_ADDRESS": "127.0.0.1:1"})
    assert run.code() == 1
    assert "no Ray cluster can be reached at 127.0.0.1:1" in run.err
    assert "Traceback" not in run.err


# ---- from Python ---------------------------------------------------------------------------------

RUN = """
import json, ray
from holdfast.platforms.ray import run
ray.init(logging_level="ERROR", log_to_driver=False)
done = run("train.py", args=[{args}], nodes=(1, 2), spares=1, resources={{"CPU": 1, "spot": 0.5}},
           job="{job}", detached={detached})
print(json.dumps([done.code, str(done.home), done.job]))
"""


def test_a_program_in_the_cluster_runs_a_job_to_its_end(run: Run, cluster: RayCluster) -> None:
    run.without_torch()
    run.env = {**cluster.env, **{k: v for k, v in run.env.items() if k.startswith("HOLDFAST_")}}
    run.write(TRAINER)
    script = RUN.format(args="'20'", job=run.job, detached=False)
    assert driver(run, cluster, script) == [0, str(run.job_home), run.job]


def test_a_detached_job_outlives_the_program_that_started_it(run: Run, cluster: RayCluster) -> None:
    run.without_torch()
    run.env = {**cluster.env, **{k: v for k, v in run.env.items() if k.startswith("HOLDFAST_")}}
    run.write(TRAINER)
    script = RUN.format(args="", job=run.job, detached=True)
    assert driver(run, cluster, script) == [None, str(run.job_home), run.job]

    def steps() -> int:
        job = run.peek()
        return job.highest if job is not None and job.state.name == "running" else 0

    seen = wait_for(steps, "the job to train")
    wait_for(lambda: steps() > seen + 50, "more steps")
    run.end()
    waiting = f"""
    import json
    from holdfast.platforms.ray import RayRun
    print(json.dumps(RayRun("{run.job}", "", None).wait().code))
    """
    assert driver(run, cluster, waiting) == 0


# ---- autoscaling ---------------------------------------------------------------------------------


def test_pending_nodes_are_demand_for_the_autoscaler(run: Run) -> None:
    with AutoscalingRayCluster({"CPU": 2}, most=3) as cluster:
        up(run, cluster, "--nodes", "2", env={"HOLDFAST_RAY_CPUS": "2"})
        job = stepping(run, 2)
        assert len(set(hosts(job).values())) == 2
        run.end()
        assert run.code() == 0


# ---- submitted -----------------------------------------------------------------------------------

FOLLOW = """
import json, sys, time
from ray.job_submission import JobSubmissionClient
client = JobSubmissionClient("{address}")
while not client.get_job_status("{id}").is_terminal():
    time.sleep(0.2)
print(json.dumps([client.get_job_status("{id}").value, client.get_job_logs("{id}")]))
"""


@pytest.fixture(scope="module")
def with_dashboard() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        own = os.path.dirname(sys.executable)
        patch.setenv("PATH", f"{own}{os.pathsep}{os.environ['PATH']}")
        with RayCluster(2, dashboard=True) as cluster:
            yield cluster


def submit(run: Run, cluster: RayCluster, *words: str) -> Any:
    """`holdfast submit ray` for a script in the run's directory; what it prints."""
    run.without_torch()
    run.write(TRAINER)
    # The job's processes have what Ray gives them; the directory is on all nodes of this cluster.
    names = {k: v for k, v in run.env.items() if k.startswith(("HOLDFAST_", "PYTHONPATH"))}
    run.write(json.dumps({"env_vars": names, "working_dir": str(run.folder)}), "env.json")
    to = ["--address", cluster.dashboard, "--runtime-env", "env.json", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "submit", "ray", *to, "--job", run.job, *words],
        env={**run.env, "RAY_ADDRESS": ""},
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_job_that_was_submitted_runs_to_its_end(run: Run, with_dashboard: RayCluster) -> None:
    told = submit(run, with_dashboard, "--nodes", "2", "--cpus", "1", "train.py", "20")
    assert told["job"] == run.job
    follow = FOLLOW.format(address=with_dashboard.dashboard, id=told["ray_job"])
    status, logs = driver(run, with_dashboard, follow)
    assert status == "SUCCEEDED", logs
    assert f"job {run.job} finished" in logs


def test_a_job_that_ray_is_told_to_stop_leaves_no_actor(
    run: Run, with_dashboard: RayCluster
) -> None:
    told = submit(run, with_dashboard, "--nodes", "2", "train.py")
    run.process = None

    def training() -> bool:
        job = run.peek()
        return job is not None and job.highest > 10

    wait_for(training, "the job to train")
    stop = f"""
    import json
    from ray.job_submission import JobSubmissionClient
    print(json.dumps(JobSubmissionClient("{with_dashboard.dashboard}").stop_job("{told["ray_job"]}")))
    """
    assert driver(run, with_dashboard, stop)
    wait_for(lambda: not actors(run, with_dashboard), "all actors to be gone")
