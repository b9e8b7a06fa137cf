"""What the tests of engines share: one cluster for all tests of a module, and a namespace for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from . import kubernetes
from .kube_api import Json

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[kubernetes.Cluster]:
    """A cluster with two nodes of 8 GPUs each."""
    reason = kubernetes.missing()
    if reason is not None:
        pytest.skip(reason)
    with kubernetes.Cluster() as cluster:
        cluster.add_nodes(2, gpus=8)
        yield cluster


@pytest.fixture
def space(cluster: kubernetes.Cluster) -> str:
    """Name of a namespace of the test's own."""
    return cluster.namespace(f"test-{next(_numbers)}")


RunPod = Callable[..., Json]


@pytest.fixture
def run_pod(cluster: kubernetes.Cluster, space: str) -> RunPod:
    """Creates a pod that runs a shell script: `run_pod(name, script, container={...}, **spec)`."""

    def create(name: str, script: str, container: Json | None = None, **spec: object) -> Json:
        box = {
            "name": "main",
            "image": "none",
            "command": ["sh", "-c", script],
            **(container or {}),
        }
        body = {
            "metadata": {"name": name},
            "spec": {"containers": [box], "restartPolicy": "Never", **spec},
        }
        return cluster.api.request("POST", f"/api/v1/namespaces/{space}/pods", body)

    return create
