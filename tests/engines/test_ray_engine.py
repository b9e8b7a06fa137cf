"""What Ray does, tried on a real cluster: the facts that the Ray platform is built on.

Drivers are processes of their own, as Ray has one for each process; each prints what it saw as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import ray_cluster
from .ray_cluster import AutoscalingRayCluster, RayCluster

pytestmark = [
    pytest.mark.platform,
    pytest.mark.timeout(400),
    pytest.mark.skipif(ray_cluster.missing() is not None, reason=str(ray_cluster.missing())),
    pytest.mark.xdist_group("ray"),
]

PRELUDE = """
import json, os, sys, time
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup

ray.init(log_to_driver=False, logging_level="ERROR", namespace="test")

@ray.remote(num_cpus=1)
class Place:
    def node(self):
        return ray.get_runtime_context().get_node_id()
    def pid(self):
        return os.getpid()
    def gpus(self):
        return ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")
    def stay(self):
        time.sleep(1000)

def tell(**what):
    print(json.dumps(what), flush=True)

def ask():
    return sys.stdin.readline().strip()

def alive(node):
    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())

def outcome(reference, timeout=120):
    try:
        return ray.get(reference, timeout=timeout)
    except Exception as error:
        return type(error).__name__

def until_answered(call):
    while True:
        try:
            return ray.get(call(), timeout=120)
        except ActorUnavailableError:
            time.sleep(0.1)
"""


class Driver:
    """A process that uses the cluster; it tells and asks one line at a time."""

    def __init__(self, cluster: RayCluster | AutoscalingRayCluster, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script],
            env=cluster.env,
            cwd=cluster.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self) -> dict[str, Any]:
        """Wait for what the driver says next, past Ray's own messages."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                return said
        raise AssertionError(f"the driver ended with {self.process.wait()} and said nothing")

    def say(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Three nodes besides the head; a test that takes one away adds another."""
    with RayCluster(3, num_cpus=3, num_gpus=2, resources={"spot": 1}) as cluster:
        yield cluster


def test_actors_get_custom_resources_and_fake_gpus_on_separate_nodes(cluster: RayCluster) -> None:
    script = """
actors = [Place.options(num_gpus=2, resources={"spot": 1}).remote() for _ in range(3)]
tell(nodes=ray.get([one.node.remote() for one in actors]), gpus=ray.get(actors[0].gpus.remote()))
"""
    with Driver(cluster, script) as driver:
        said = driver.hear()
    assert sorted(said["nodes"]) == sorted(cluster.nodes)
    assert said["gpus"][1] == "0,1"


def test_a_call_fails_long_before_ray_declares_a_killed_node_dead(cluster: RayCluster) -> None:
    script = """
actor = Place.options(max_restarts=1).remote()
node = ray.get(actor.node.remote())
call = actor.stay.remote()
tell(node=node)
ask()
start = time.monotonic()
tell(outcome=outcome(call), still_alive=alive(node), after_s=time.monotonic() - start)
while alive(node):
    time.sleep(0.1)
tell(dead_after_s=time.monotonic() - start)
"""
    with Driver(cluster, script) as driver:
        cluster.kill_node(driver.hear()["node"])
        driver.say()
        said = driver.hear()
        assert said["outcome"] == "ActorUnavailableError"
        assert said["still_alive"]
        assert driver.hear()["dead_after_s"] > said["after_s"]
    cluster.add_node()


def test_an_actor_with_restarts_left_comes_back_on_another_node(cluster: RayCluster) -> None:
    script = """
actor = Place.options(max_restarts=1).remote()
last = Place.options(max_restarts=0).remote()
node = ray.get(actor.node.remote())
gone = Place.options(max_restarts=0, scheduling_strategy=OnNode(node, soft=False)).remote()
ray.get(gone.node.remote())
tell(node=node)
ask()
tell(back=until_answered(actor.node.remote))
try:
    until_answered(gone.node.remote)
except ActorDiedError as error:
    tell(gone="node has died" in str(error))
"""
    with Driver(cluster, script) as driver:
        node = driver.hear()["node"]
        cluster.kill_node(node)
        driver.say()
        assert driver.hear()["back"] in cluster.nodes
        assert driver.hear()["gone"]
    cluster.add_node()


def test_a_strict_spread_group_waits_for_a_new_node_and_keeps_its_other_bundles(
    cluster: RayCluster,
) -> None:
    script = """
group = placement_group([{"CPU": 1}] * 3, strategy="STRICT_SPREAD")
ray.get(group.ready(), timeout=120)
actors = [
    Place.options(max_restarts=1, scheduling_strategy=InGroup(group, index)).remote()
    for index in range(3)
]
nodes, pids = (ray.get([getattr(a, what).remote() for a in actors]) for what in ("node", "pid"))
tell(nodes=nodes)
ask()
while placement_group_table(group)["state"] != "RESCHEDULING":
    time.sleep(0.1)
kept = ray.get([actors[index].pid.remote() for index in (0, 2)])
tell(bundles=placement_group_table(group)["bundles_to_node_id"], kept=kept == [pids[0], pids[2]])
tell(back=until_answered(actors[1].node.remote), state=placement_group_table(group)["state"])
"""
    with Driver(cluster, script) as driver:
        nodes = driver.hear()["nodes"]
        cluster.kill_node(nodes[1])
        driver.say()
        said = driver.hear()
        assert said["bundles"] == {"0": nodes[0], "1": "", "2": nodes[2]}
        assert said["kept"]
        new = cluster.add_node()
        assert driver.hear() == {"back": new, "state": "CREATED"}


def test_a_detached_actor_outlives_its_driver_and_another_driver_finds_it(
    cluster: RayCluster,
) -> None:
    start = """
kept = Place.options(name="kept", lifetime="detached").remote()
lost = Place.options(name="lost").remote()
tell(kept=ray.get(kept.pid.remote()), lost=ray.get(lost.pid.remote()))
ask()
"""
    with Driver(cluster, start) as first:
        pids = first.hear()
        first.process.kill()
        first.process.wait()
    deadline = time.monotonic() + 120
    while Path("/proc", str(pids["lost"])).exists():
        assert time.monotonic() < deadline, "the driver's own actor outlived it"
        time.sleep(0.1)
    find = """
kept = ray.get_actor("kept")
tell(pid=ray.get(kept.pid.remote()))
ray.kill(kept)
"""
    with Driver(cluster, find) as second:
        assert second.hear()["pid"] == pids["kept"]


def test_the_autoscaler_starts_nodes_for_actors_that_do_not_fit() -> None:
    script = """
actors = [Place.options(num_cpus=2, max_restarts=1).remote() for _ in range(2)]
nodes = ray.get([one.node.remote() for one in actors], timeout=200)
tell(nodes=nodes)
"""
    with AutoscalingRayCluster({"CPU": 2}, most=3) as cluster, Driver(cluster, script) as driver:
        nodes = driver.hear()["nodes"]
        assert len(set(nodes)) == 2


def test_nothing_of_ray_is_left_when_the_test_process_is_killed() -> None:
    script = """
import time
from tests.engines.ray_cluster import RayCluster
with RayCluster(0) as cluster:
    print(cluster.folder, *cluster.processes(cluster.head), flush=True)
    time.sleep(1000)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    folder, *pids = process.stdout.readline().split()
    process.kill()
    process.communicate()
    assert pids
    deadline = time.monotonic() + 60
    while Path(folder).exists() or any(Path("/proc", pid).exists() for pid in pids):
        assert time.monotonic() < deadline, (pids, folder)
        time.sleep(0.05)
