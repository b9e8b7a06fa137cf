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


def test_a_suspended_job_has_no_pods_and_goes_on_as_the_same_job(
    operator: Operator, tmp_path: Path
) -> None:
    operator.apply("llm", training(tmp_path))
    operator.until_step("llm", 20)
    operator.change("llm", suspend=True)
    stood = operator.until_phase("llm", "Suspended")
    assert stood["exitCode"] == 75
    operator.until(lambda: operator.names() <= {"llm-coordinator"}, "no workers")
    operator.change("llm", suspend=False)
    operator.until_phase("llm", "Running")
    operator.until_step("llm", 20)
    status = operator.status("llm")
    assert status["requeues"] == 1
    assert status["step"] > stood["step"]
    finish(tmp_path)
    assert operator.until_phase("llm", "Succeeded")["round"] >= 2


def test_a_job_that_is_suspended_from_the_start_makes_nothing(
    operator: Operator, tmp_path: Path
) -> None:
    operator.apply("llm", training(tmp_path, steps="20", suspend=True))
    operator.until_phase("llm", "Suspended")
    assert operator.names() == set()
    operator.change("llm", suspend=False)
    operator.until_phase("llm", "Succeeded")


def test_other_numbers_of_nodes_scale_the_job(operator: Operator, tmp_path: Path) -> None:
    operator.apply("llm", training(tmp_path, min=1, max=1))
    operator.until_step("llm", 10)
    operator.change("llm", nodes={"min": 1, "max": 2})
    operator.until(lambda: operator.status("llm")["nodes"] == 2, "two nodes")
    operator.change("llm", nodes={"max": 1})
    operator.until(
        lambda: operator.status("llm")["nodes"] == 1 and operator.pod("llm-1-1") is None, "one node"
    )
    operator.until_step("llm", 10)
    finish(tmp_path)
    operator.until_phase("llm", "Succeeded")


def test_an_operator_that_is_killed_costs_nothing_and_the_next_one_goes_on(
    operator: Operator, tmp_path: Path
) -> None:
    operator.apply("llm", training(tmp_path))
    operator.until_step("llm", 10)
    before = operator.names()
    operator.kill()
    path = f"/api/v1/namespaces/{operator.space}/pods/llm-0-1"
    operator.cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})
    operator.start()
    operator.until(lambda: operator.pod("llm-0-2") is not None, "the next attempt")
    operator.until_step("llm", 10)
    assert operator.names() - {"llm-0-1"} == before - {"llm-0-1"} | {"llm-0-2"}
    finish(tmp_path)
    operator.until_phase("llm", "Succeeded")


@pytest.mark.parametrize("how", ["killed", "deleted", "evicted"])
def test_a_coordinator_that_is_lost_costs_no_round(
    operator: Operator, tmp_path: Path, how: str
) -> None:
    operator.apply("llm", training(tmp_path))
    operator.until_step("llm", 10)
    name, space = "llm-coordinator", operator.space
    node = operator.cluster.node_of(name, space)
    if how == "killed":
        node.kill(name, space)
    elif how == "evicted":
        node.evict(name, space)
    else:
        operator.cluster.api.request("DELETE", f"/api/v1/namespaces/{space}/pods/{name}")
    operator.until_step("llm", 200)
    status = operator.status("llm")
    assert (status["round"], status["phase"]) == (1, "Running")
    finish(tmp_path)
    operator.until_phase("llm", "Succeeded")
