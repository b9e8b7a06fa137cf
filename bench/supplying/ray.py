"""Ray: how long until all ranks step again after a host is lost, with a spare and without.

The cluster is a real one of three hosts on this machine (`tests/engines/ray_cluster.py`); the host of a
node that trains is killed with all its processes. With a spare, the time runs from there. Without one,
it runs from the moment at which Ray has another host, since Ray alone can provide that. The script
takes steps of 10 ms without torch, so that what is measured is Ray and Holdfast.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from e2e.harness import TRAINER, Run
from engines import ray_cluster
from engines.ray_cluster import RayCluster
from harness.setting import Setting, say

from supplying.lines import Line, Skipped

UP = (sys.executable, "-m", "holdfast", "up", "--on", "ray")


def run(setting: Setting) -> list[Line]:
    why = ray_cluster.missing()
    if why is not None:
        raise Skipped(why)
    spare = Line("ray", "host lost, a spare takes its place", goal=3.0)
    asked = Line("ray", "Ray has another host -> all ranks step", goal=5.0)
    with RayCluster(3) as cluster:
        for _ in range(setting.tries):
            spare.values.append(_with_spare(cluster))
            asked.values.append(_without(cluster))
            say(f"ray: {spare.values[-1]:.3f} s with a spare, {asked.values[-1]:.3f} s without")
    return [spare, asked]


def _with_spare(cluster: RayCluster) -> float:
    run = _start(cluster, "--nodes", "2", "--spares", "1")
    try:
        run.until_stepping(1, nodes=2)
        run.until(lambda job: len(job.membership.waiting) == 1, "a spare")
        cluster.kill_node(_host(run))
        began = time.monotonic()
        run.until_stepping(2, nodes=2)
        took_s = time.monotonic() - began
        cluster.add_node()
        return round(took_s, 3)
    finally:
        _end(run)


def _without(cluster: RayCluster) -> float:
    run = _start(cluster, "--nodes", "3")
    try:
        run.until_stepping(1, nodes=3)
        request = _placed(run)[0].request
        cluster.kill_node(_host(run))
        position, again = int(request.partition("-")[0]), f"{request.partition('-')[0]}-2"
        run.until(
            lambda job: (
                job.supply.positions[position].request == again
                and job.supply.positions[position].status == "pending"
            ),
            "Ray to notice",
        )
        cluster.add_node()
        began = time.monotonic()
        run.until_stepping(2, nodes=3)
        return round(time.monotonic() - began, 3)
    finally:
        _end(run)


def _start(cluster: RayCluster, *flags: str) -> Run:
    run = Run(Path(tempfile.mkdtemp(prefix="ray-bench-")))
    own = {k: v for k, v in run.env.items() if k.startswith("HOLDFAST_")}
    run.env = {**cluster.env, **own, "HOLDFAST_RAY_CPUS": "2"}
    return run.train(*flags, script=TRAINER, nproc=1, command=UP)


def _placed(run: Run) -> list[Any]:
    job = run.peek()
    assert job is not None
    return [one.spec for one in job.membership.placed.values()]


def _host(run: Run) -> str:
    return str(_placed(run)[0].host)


def _end(run: Run) -> None:
    run.end()
    try:
        run.code()
    finally:
        run.close()
