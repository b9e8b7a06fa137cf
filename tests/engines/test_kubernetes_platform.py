"""Jobs on Kubernetes: a real API server, the operator as a process, pods that train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .kube_jobs import Operator, finish, training
from .kubernetes import Cluster

pytestmark = [pytest.mark.platform, pytest.mark.timeout(600)]

pytest.importorskip("kopf")


@pytest.fixture
def operator(cluster: Cluster, space: str, tmp_path: Path) -> Iterator[Operator]:
    with Operator(cluster, space, tmp_path) as operator:
        yield operator


def test_a_job_trains_to_its_end(operator: Operator, tmp_path: Path) -> None:
    operator.apply("llm", training(tmp_path, steps="50"))
    status = operator.until_phase("llm", "Succeeded")
    assert (status["exitCode"], status["step"]) == (0, 50)
    assert operator.condition("llm", "Ended")["reason"] == "Finished"
    operator.until(lambda: operator.names() == {"llm-coordinator"}, "all workers to be released")


def test_a_job_loses_a_pod_and_goes_on(operator: Operator, tmp_path: Path) -> None:
    operator.apply("llm", training(tmp_path))
    operator.until_step("llm", 20)
    path = f"/api/v1/namespaces/{operator.space}/pods/llm-1-1"
    operator.cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})
    operator.until(lambda: operator.pod("llm-1-2") is not None, "the next attempt")
    operator.until(lambda: operator.status("llm")["round"] == 2, "another round")
    operator.until_step("llm", 20)
    finish(tmp_path)
    status = operator.until_phase("llm", "Succeeded")
    assert status["exitCode"] == 0
    assert "goodput" in status
