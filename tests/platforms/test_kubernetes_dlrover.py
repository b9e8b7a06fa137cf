"""DLRover's resources, field by field: what becomes of each, and that nothing is dropped in silence."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from fake_kubernetes import FakeApi

from holdfast.errors import UsageError
from holdfast.messages.units import StepNumber
from holdfast.platforms.kubernetes import dlrover, operator
from holdfast.platforms.kubernetes.kinds import ElasticJobs
from holdfast.platforms.kubernetes.spec import read_spec
from holdfast.platforms.kubernetes.status import JobStatus, with_condition

Json = dict[str, Any]

COMMAND = ["dlrover-run", "--nnodes=2:4", "--network-check", "--nproc_per_node=8", "train.py"]
PREFIX = "ElasticJob.spec."
WORKER = "ElasticJob.spec.replicaSpecs.worker."


def elastic(worker: Json | None = None, **spec: Any) -> Json:
    box = {"name": "main", "image": "mine", "command": COMMAND}
    made = {
        "replicas": 4,
        "template": {"spec": {"restartPolicy": "Always", "containers": [box]}},
        **(worker or {}),
    }
    roles = {"worker": made, **spec.pop("roles", {})}
    return {"distributionStrategy": "AllreduceStrategy", "replicaSpecs": roles, **spec}


def converted(worker: Json | None = None, **spec: Any) -> Json:
    return dlrover.convert_job(elastic(worker, **spec)).spec


def warned(worker: Json | None = None, **spec: Any) -> str:
    return "; ".join(dlrover.convert_job(elastic(worker, **spec)).warnings)


def refused(worker: Json | None = None, **spec: Any) -> str:
    with pytest.raises(UsageError) as error:
        dlrover.convert_job(elastic(worker, **spec))
    return str(error.value)


def box_of(spec: Json) -> Json:
    found: Json = spec["template"]["spec"]["containers"][0]
    return found


ROWS: dict[str, Any] = {
    PREFIX + "distributionStrategy": lambda: (
        "DLRover" in refused(distributionStrategy="ParameterServerStrategy")
    ),
    PREFIX + "resourceLimits.memory": lambda: (
        converted(resourceLimits={"memory": "32Gi"})["settings"] == {"memory-limit": "32GiB"}
    ),
    PREFIX + "resourceLimits.cpu": lambda: (
        "resourceLimits.cpu has no effect" in warned(resourceLimits={"cpu": "4"})
    ),
    PREFIX + "resourceLimits.gpu": lambda: (
        "resourceLimits.gpu has no effect" in warned(resourceLimits={"gpu": "4"})
    ),
    PREFIX + "optimizeMode": lambda: (
        "optimizeMode single-job has no effect" in warned(optimizeMode="single-job")
        and not warned(optimizeMode="manual")
    ),
    PREFIX + "brainService": lambda: "brainService has no effect" in warned(brainService="x:1"),
    PREFIX + "envs": lambda: (
        box_of(converted(envs=[{"name": "A", "value": "b"}]))["env"]
        == [{"name": "A", "value": "b"}]
    ),
    PREFIX + "suspend": lambda: converted(suspend=True)["suspend"] is True,
    WORKER + "replicas": lambda: converted({"replicas": 6})["nodes"] == {"min": 2, "max": 6},
    WORKER + "template": lambda: (
        box_of(converted())["command"]
        == ["holdfast", "run", "--node-check", "--nproc_per_node=8", "train.py"]
    ),
    WORKER + "restartPolicy": lambda: (
        "restartPolicy Always has no effect" in warned({"restartPolicy": "Always"})
        and not warned({"restartPolicy": "Never"})
    ),
    WORKER + "restartCount": lambda: (
        converted({"restartCount": 5})["settings"] == {"relaunches": 5}
    ),
    WORKER + "autoScale": lambda: "autoScale has no effect" in warned({"autoScale": True}),
    WORKER + "restartTimeout": lambda: (
        converted({"restartTimeout": 60})["settings"] == {"pending-limit": 60}
        and "settings" not in converted({"restartTimeout": 0})
    ),
    WORKER + "criticalNodes": lambda: (
        converted({"criticalNodes": "0:3,1:2"})["settings"] == {"critical": "0,1"}
    ),
    WORKER + "priority": lambda: converted({"priority": "0.5"})["settings"] == {"priority": "0.5"},
    WORKER + "BatchScheduler": lambda: (
        converted({"BatchScheduler": "volcano"})["gang"] == {"scheduler": "volcano"}
        and "only volcano" in refused({"BatchScheduler": "yunikorn"})
    ),
    PREFIX + "replicaSpecs.dlrover-master": lambda: _master_is_kept(),
    PREFIX + "replicaSpecs.ps": lambda: "no such role" in refused(roles={"ps": {"replicas": 1}}),
    PREFIX + "replicaSpecs.chief": lambda: (
        "no such role" in refused(roles={"chief": {"replicas": 1}})
    ),
    PREFIX + "replicaSpecs.evaluator": lambda: (
        "no such role" in refused(roles={"evaluator": {"replicas": 1}})
    ),
    "ElasticJob.status.phase": lambda: (
        dlrover.job_status(JobStatus(phase="Suspending"))["phase"] == "Running"
        and dlrover.job_status(JobStatus(phase="Failed"))["phase"] == "Failed"
    ),
    "ElasticJob.status.conditions": lambda: _conditions_are_kept(),
    "ElasticJob.status.replicaStatuses": lambda: (
        dlrover.job_status(JobStatus(nodes=3))["replicaStatuses"] == {"worker": {"active": 3}}
    ),
    "ScalePlan.spec.ownerJob": lambda: dlrover.convert_plan({"ownerJob": "llm"}).job == "llm",
    "ScalePlan.spec.replicaResourceSpecs.worker.replicas": lambda: (
        dlrover.with_plan(converted(), _plan({"replicas": 8}))["nodes"] == {"min": 2, "max": 8}
        and dlrover.with_plan(converted(), _plan({"replicas": 1}))["nodes"] == {"min": 1, "max": 1}
    ),
    "ScalePlan.spec.replicaResourceSpecs.worker.resource": lambda: (
        "resource has no effect" in _plan({"resource": {"cpu": "1"}}).warnings[0]
    ),
    "ScalePlan.spec.createPods": lambda: "createPods has no effect" in _of_pods("createPods"),
    "ScalePlan.spec.removePods": lambda: "removePods has no effect" in _of_pods("removePods"),
    "ScalePlan.spec.migratePods": lambda: "migratePods has no effect" in _of_pods("migratePods"),
    "ScalePlan.spec.psHosts": lambda: "psHosts has no effect" in _of_pods("psHosts"),
    "ScalePlan.status.phase": lambda: _finished_plan()["phase"] == "Succeeded",
    "ScalePlan.status.finishTime": lambda: _finished_plan()["finishTime"].endswith("Z"),
}


def _finished_plan() -> Json:
    """The status of a plan that the operator has obeyed."""
    api = FakeApi()
    plans = "/apis/elastic.iml.github.io/v1alpha1/namespaces/s/scaleplans"
    meta = {"name": "p", "namespace": "s"}
    body = api._create(
        plans,
        {"apiVersion": "elastic.iml.github.io/v1alpha1", "kind": "ScalePlan", "metadata": meta},
    )
    asyncio.run(operator._finish_plan(api, body, _plan({"replicas": 2})))
    found: Json = api.objects[plans]["p"]["status"]
    return found


def _plan(worker: Json) -> dlrover.PlannedNodes:
    spec = {"ownerJob": "llm", "replicaResourceSpecs": {"worker": worker}}
    return dlrover.convert_plan(spec)


def _of_pods(name: str) -> str:
    return dlrover.convert_plan({"ownerJob": "llm", name: [{"name": "x"}]}).warnings[0]


def _master_is_kept() -> bool:
    box = {"name": "main", "image": "dlrover", "resources": {"limits": {"cpu": "1"}}}
    template = {"spec": {"nodeSelector": {"pool": "cpu"}, "containers": [box]}}
    roles = {"dlrover-master": {"template": template}}
    pod = converted(roles=roles)["coordinator"]["template"]["spec"]
    kept = {"name": "coordinator", "resources": {"limits": {"cpu": "1"}}}
    assert "image has no effect" in warned(roles=roles)
    return pod == {"nodeSelector": {"pool": "cpu"}, "containers": [kept]}


def _conditions_are_kept() -> bool:
    status = with_condition(JobStatus(step=StepNumber(1)), "Training", True, "Runs", "it does", "t")
    (found,) = dlrover.job_status(status)["conditions"]
    return (found["type"], found["status"], found["lastTransitionTime"]) == (
        "Training",
        "True",
        "t",
    )


@pytest.mark.parametrize("field", dlrover.FIELDS)
def test_what_becomes_of_each_field(field: str) -> None:
    assert ROWS[field]()


def test_the_table_of_the_page_is_the_table_of_the_code() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "kubernetes.md").read_text()
    shown = re.findall(r"^\| `((?:ElasticJob|ScalePlan)\.[^`]+)` \| (.*) \|$", text, re.MULTILINE)
    assert dict(shown) == dict(dlrover.FIELDS)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (elastic(enableDynamicSharding=True), "spec.enableDynamicSharding is not known"),
        (elastic({"color": "red"}), "spec.replicaSpecs.worker.color is not known"),
        (elastic(resourceLimits={"disk": "1"}), "spec.resourceLimits.disk is not known"),
        (elastic(roles={"reader": {}}), "spec.replicaSpecs.reader has no effect"),
    ],
)
def test_a_field_that_is_not_known_is_named(spec: Json, told: str) -> None:
    assert told in "; ".join(dlrover.convert_job(spec).warnings)


def test_a_field_of_a_plan_that_is_not_known_is_named() -> None:
    plan = dlrover.convert_plan(
        {"ownerJob": "x", "color": 1, "replicaResourceSpecs": {"ps": {}, "worker": {"size": 1}}}
    )
    told = "; ".join(plan.warnings)
    for name in ("spec.color", "replicaResourceSpecs.ps", "worker.size"):
        assert name in told


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["dlrover-run", "--nnodes", "2:4", "t.py"], ["holdfast", "run", "t.py"]),
        (["/usr/bin/dlrover-run", "t.py"], ["holdfast", "run", "t.py"]),
        (
            ["bash", "-c", "cd /x && dlrover-run --nnodes=$NODE_NUM --network-check t.py --n 3"],
            ["bash", "-c", "cd /x && holdfast run --node-check t.py --n 3"],
        ),
        (["python", "t.py"], ["python", "t.py"]),
    ],
)
def test_a_command_of_dlrover_is_ours(command: list[str], expected: list[str]) -> None:
    template = {"spec": {"containers": [{"name": "main", "command": command}]}}
    assert box_of(converted({"template": template}))["command"] == expected


def test_a_flag_that_is_taken_out_is_named() -> None:
    box = {"name": "main", "command": ["dlrover-run", "--auto-config", "t.py"]}
    worker = {"template": {"spec": {"containers": [box]}}}
    assert box_of(converted(worker))["command"] == ["holdfast", "run", "t.py"]
    assert "--auto-config of dlrover-run has no effect" in warned(worker)


def test_an_elastic_job_can_be_read_as_ours() -> None:
    everything = elastic(
        {"restartCount": 3, "criticalNodes": "none", "priority": "high"},
        envs=[{"name": "A", "value": "b"}],
        resourceLimits={"memory": "128Gi"},
    )
    spec = read_spec("llm", dlrover.convert_job(everything).spec)
    assert spec.nnodes == "2:4"


def test_a_job_without_workers_says_what_to_give() -> None:
    with pytest.raises(UsageError, match=r"worker: has no template; give one"):
        dlrover.convert_job({"replicaSpecs": {}})


def test_the_newest_plan_counts_and_a_plan_that_is_deleted_does_not() -> None:
    theirs = ElasticJobs()
    job = {"metadata": {"namespace": "s", "name": "llm"}, "spec": elastic()}

    def plan(uid: str, created: str, nodes: int) -> Json:
        spec = {"ownerJob": "llm", "replicaResourceSpecs": {"worker": {"replicas": nodes}}}
        meta = {"namespace": "s", "name": uid, "uid": uid, "creationTimestamp": created}
        return {"metadata": meta, "spec": spec}

    theirs.plan_seen(plan("b", "2026-01-02", 8), gone=False)
    theirs.plan_seen(plan("a", "2026-01-01", 6), gone=False)
    assert theirs.kind.read(job)[0].nodes.max == 8
    theirs.plan_seen(plan("b", "2026-01-02", 8), gone=True)
    assert theirs.kind.read(job)[0].nodes.max == 6
    theirs.plan_seen(plan("a", "2026-01-01", 6), gone=True)
    assert theirs.kind.read(job)[0].nodes.max == 4
