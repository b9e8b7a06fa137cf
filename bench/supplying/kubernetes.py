"""Kubernetes: how long after a fault the next pod is made, on a real API server.

The cluster is the one of tests/engines (tests/engines/kubernetes_build.sh makes it). Operator and
coordinator are real; the pods only sleep, since what is measured is the platform. All times end when
the API server has the pod of the next attempt, and begin

    deleted, out of memory, evicted   before that is done to a pod
    NotReady                          when the API server last said that the node is Ready
    300 lost pods                     when an operator starts that finds all pods of a job gone

What is measured is never less than what it took.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[2]
sys.path[:0] = [str(TREE), str(TREE / "tests")]

from engines import kubernetes  # noqa: E402
from engines.kube_api import Json  # noqa: E402
from engines.kube_jobs import Operator  # noqa: E402
from harness.setting import Setting, say  # noqa: E402

from supplying.lines import Line, Skipped  # noqa: E402

NODES = 6
MANY = 300
MANY_TRIES = 3
LIMIT_S = 120.0


def run(setting: Setting) -> list[Line]:
    reason = kubernetes.missing()
    if reason is not None:
        raise Skipped(reason)
    lines = {name: Line("kubernetes", f"{name} -> the next pod", goal=1.0) for name in FAULTS}
    many = Line("kubernetes", f"an operator starts -> {MANY} lost pods made again", goal=5.0)
    with kubernetes.Cluster() as cluster:
        cluster.add_nodes(NODES)
        for name, fault in FAULTS.items():
            lines[name].values += _replaced(cluster, setting.folder, name, fault, setting.tries)
        many.values += [
            _many(cluster, setting.folder) for _ in range(min(setting.tries, MANY_TRIES))
        ]
    return [*lines.values(), many]


class Arrivals:
    """When each object was first seen by a watch."""

    def __init__(self, cluster: kubernetes.Cluster, path: str, key: Callable[[Json], str]) -> None:
        self._at: dict[str, float] = {}
        self._news = threading.Condition()
        self._stop = threading.Event()

        def follow() -> None:
            for kind, one in cluster.api.follow(path, self._stop):
                now = time.monotonic()
                with self._news:
                    for found in one["items"] if kind == "LISTED" else [one]:
                        self._at.setdefault(key(found), now)
                    self._news.notify_all()

        threading.Thread(target=follow, daemon=True).start()

    def wait(self, name: str) -> float:
        return self.wait_all([name])

    def wait_any(self, names: list[str]) -> float:
        """When the first of these was seen."""
        with self._news:
            done = self._news.wait_for(lambda: any(one in self._at for one in names), LIMIT_S)
            assert done, "none was ever seen"
            return min(self._at[one] for one in names if one in self._at)

    def wait_all(self, names: list[str]) -> float:
        """When the last of these was seen."""
        with self._news:
            done = self._news.wait_for(lambda: all(one in self._at for one in names), LIMIT_S)
            assert done, f"never seen: {[one for one in names if one not in self._at][:5]}"
            return max(self._at[one] for one in names)

    def close(self) -> None:
        self._stop.set()


def _pod_key(pod: Json) -> str:
    return str(pod["metadata"]["name"])


_numbers = iter(range(1, 1000))


@contextlib.contextmanager
def _job(
    cluster: kubernetes.Cluster, folder: Path, nodes: int, **pod: Any
) -> Iterator[tuple[Operator, Arrivals]]:
    """A job of pods that sleep, and an operator of its own."""
    space = cluster.namespace(f"bench-{next(_numbers)}")
    script = "trap exit TERM; sleep 1000 & wait"
    box = {"name": "sleep", "image": "none", "command": ["sh", "-c", script]}
    spec = {
        "nodes": {"min": 1, "max": nodes},
        "settings": {"memory": "64MiB", "relaunches": 1000},
        "template": {
            "spec": {"containers": [box], "terminationGracePeriodSeconds": 1, **pod},
        },
    }
    seen = Arrivals(cluster, f"/api/v1/namespaces/{space}/pods", _pod_key)
    with Operator(cluster, space, folder) as operator:
        operator.apply("b", spec)
        seen.wait_all([f"b-{number}-1" for number in range(nodes)])
        yield operator, seen
        cluster.api.request("DELETE", operator.path("b"))
        operator.until(lambda: not operator.pods(), "all pods are gone", LIMIT_S)
    seen.close()


def _victim(operator: Operator) -> tuple[int, int] | None:
    """Position and attempt of the pod to strike, once all pods of the job run and no others do."""
    running = []
    for pod in operator.pods():
        name, phase = pod["metadata"]["name"], pod["status"].get("phase")
        if name == "b-coordinator" or phase in ("Failed", "Succeeded"):
            continue
        if phase != "Running" or "deletionTimestamp" in pod["metadata"] or not _is_ready(pod):
            return None
        _, position, attempt = name.split("-")
        running.append((int(attempt), int(position)))
    if sorted(position for _, position in running) != list(range(NODES)):
        return None
    attempt, position = min(running)
    return position, attempt


def _next_victim(operator: Operator) -> tuple[int, int]:
    found: list[tuple[int, int] | None] = []

    def look() -> bool:
        found[:] = [_victim(operator)]
        return found[0] is not None

    operator.until(look, "all pods run")
    assert found[0] is not None
    return found[0]


def _replaced(
    cluster: kubernetes.Cluster,
    folder: Path,
    name: str,
    fault: Callable[[Operator, str], float],
    tries: int,
) -> list[float]:
    """Seconds from a fault to the pod that replaces it, one position after the other."""
    taken = []
    with _job(cluster, folder, NODES) as (operator, seen):
        for _ in range(tries):
            position, attempt = _next_victim(operator)
            began = fault(operator, f"b-{position}-{attempt}")
            after = seen.wait(f"b-{position}-{attempt + 1}")
            taken.append(after - began)
            for node in cluster.nodes.values():
                if node.silent:
                    node.resume()
            say(f"kubernetes, {name}: {after - began:.3f} s")
    return taken


def _deleted(operator: Operator, pod: str) -> float:
    began = time.monotonic()
    operator.cluster.api.request("DELETE", f"/api/v1/namespaces/{operator.space}/pods/{pod}")
    return began


def _out_of_memory(operator: Operator, pod: str) -> float:
    node = operator.cluster.node_of(pod, operator.space)
    began = time.monotonic()
    node.oom_kill(pod, operator.space)
    return began


def _evicted(operator: Operator, pod: str) -> float:
    node = operator.cluster.node_of(pod, operator.space)
    began = time.monotonic()
    node.evict(pod, operator.space)
    return began


def _not_ready(operator: Operator, pod: str) -> float:
    cluster = operator.cluster
    node = cluster.node_of(pod, operator.space)
    began = time.monotonic()
    node.silence()
    while True:
        asked = time.monotonic()
        if not _is_ready(cluster.api.request("GET", f"/api/v1/nodes/{node.name}")):
            return began
        began = asked
        time.sleep(0.005)


def _is_ready(found: Json) -> bool:
    conditions = found["status"].get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


FAULTS: dict[str, Callable[[Operator, str], float]] = {
    "a pod deleted": _deleted,
    "a pod out of memory": _out_of_memory,
    "a pod evicted": _evicted,
    "a node NotReady": _not_ready,
}


def _many(cluster: kubernetes.Cluster, folder: Path) -> float:
    """Seconds until an operator that starts has made all pods of a large job again."""
    with _job(cluster, folder, MANY, nodeSelector={"nowhere": "true"}) as (operator, seen):
        operator.until(lambda: _wanted(operator) == MANY, "the coordinator has heard of all pods")
        operator.kill()
        path = f"/api/v1/namespaces/{operator.space}/pods"
        cluster.api.request("DELETE", path, labelSelector="holdfast.dev/role=worker")
        began = time.monotonic()
        operator.start()
        first = seen.wait_any([f"b-{number}-2" for number in range(MANY)])
        after = seen.wait_all([f"b-{number}-2" for number in range(MANY)])
        say(
            f"kubernetes, {MANY} pods made again {after - began:.1f} s after the operator's start,"
            f" {after - first:.1f} s after the first of them"
        )
        return after - began


def _wanted(operator: Operator) -> int:
    """Nodes that run, as the coordinator knows them; 0 while it has not said so."""
    message = operator.condition("b", "NodesProvided").get("message", "")
    return MANY if f"of {MANY} nodes" in message and "is pending" in message else 0
