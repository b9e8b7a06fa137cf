"""What a pod's status means: the table of ends, and what is no end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_kubernetes import OWNER, SPEC, FakeApi

from holdfast.messages.endnote import EndNote
from holdfast.messages.supply import NodeWish, Sighting
from holdfast.messages.units import RoundNumber, StepNumber
from holdfast.platforms.kubernetes import objects, pods
from holdfast.platforms.kubernetes.spec import read_spec

Json = dict[str, Any]

END = EndNote(
    job="llm",
    code=75,
    reason="why",
    round=RoundNumber(2),
    step=StepNumber(9),
    goodput=0.5,
    requeues=1,
)


def worker() -> Json:
    wish = NodeWish(id="3-2", position=3, attempt=2)
    pod = objects.worker_pod(OWNER, read_spec("llm", SPEC), wish, (), "1:3+0")
    pod["status"] = {"phase": "Pending"}
    return pod


def running() -> Json:
    pod = worker()
    FakeApi().run(pod, node="n7")
    return pod


def seen(pod: Json) -> Sighting:
    return pods.sighting(pod, "train")


def ended(code: int, reason: str = "Error", message: str = "") -> Json:
    pod = running()
    FakeApi().end(pod, code, reason, message)
    return pod


def disrupted(reason: str) -> Json:
    pod = running()
    pod["metadata"]["deletionTimestamp"] = "now"
    pod["status"]["conditions"].append(
        {"type": "DisruptionTarget", "status": "True", "reason": reason}
    )
    return pod


def failed(reason: str) -> Json:
    pod = running()
    FakeApi().fail(pod, reason)
    return pod


@pytest.mark.parametrize(
    ("pod", "status", "reason", "code"),
    [
        (worker(), "pending", None, None),
        (running(), "running", None, None),
        (ended(0, "Completed"), "succeeded", None, 0),
        (ended(1), "failed", None, 1),
        (ended(75), "failed", None, 75),
        (ended(137, "OOMKilled"), "failed", "oom", 137),
        (ended(137), "failed", None, 137),
        (ended(128, "StartError"), "failed", "fatal", 128),
        (failed("Evicted"), "failed", "evicted", None),
        (failed("NodeShutdown"), "failed", "evicted", None),
        (failed("Preempting"), "failed", "preempted", None),
        (failed("OutOfcpu"), "failed", "evicted", None),
        (failed("SomethingNew"), "failed", "unknown", None),
        (disrupted("PreemptionByScheduler"), "deleted", "preempted", None),
        (disrupted("DeletionByTaintManager"), "deleted", "evicted", None),
        (disrupted("EvictionByEvictionAPI"), "deleted", "evicted", None),
        (disrupted("TerminationByKubelet"), "deleted", "evicted", None),
        (disrupted("SomethingNew"), "deleted", None, None),
    ],
)
def test_what_became_of_a_pod(pod: Json, status: str, reason: str | None, code: int | None) -> None:
    found = seen(pod)
    assert (found.request, found.status, found.reason, found.code) == ("3-2", status, reason, code)


def test_a_pod_that_is_being_deleted_is_deleted_at_once() -> None:
    pod = running()
    pod["metadata"]["deletionTimestamp"] = "now"
    assert (seen(pod).status, seen(pod).host) == ("deleted", "n7")


def test_a_pod_whose_node_is_not_ready_is_lost() -> None:
    pod = running()
    FakeApi().mark(pod, ready=False)
    assert (seen(pod).status, seen(pod).reason) == ("failed", "lost")
    assert "n7 is NotReady" in seen(pod).detail
    FakeApi().mark(pod, ready=True)
    assert seen(pod).status == "running"


def test_a_pod_that_is_not_ready_for_a_reason_of_its_own_is_not_lost() -> None:
    pod = running()
    for one in pod["status"]["conditions"]:
        one["status"] = "False"
    assert seen(pod).status == "running", "its containers are not ready"
    pod = running()
    FakeApi().mark(pod, ready=False)
    pod["spec"]["readinessGates"] = [{"conditionType": "x"}]
    assert seen(pod).status == "running", "its gate is closed"


def test_a_node_that_has_ended_is_over_although_a_sidecar_runs() -> None:
    pod = ended(3)
    pod["status"]["phase"] = "Running"
    pod["status"]["containerStatuses"].insert(0, {"name": "logs", "state": {"running": {}}})
    assert (seen(pod).status, seen(pod).code) == ("failed", 3)


def test_a_pending_pod_says_what_it_waits_for() -> None:
    pod = worker()
    pod["status"]["conditions"] = [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        }
    ]
    assert "Unschedulable: 0/3 nodes" in seen(pod).detail
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    pod["status"]["containerStatuses"] = [{"name": "train", "state": waiting}]
    assert seen(pod).detail == "ImagePullBackOff: Back-off pulling image"
    assert seen(pod).status == "pending"


def test_an_image_that_can_never_be_pulled_is_fatal() -> None:
    pod = worker()
    waiting = {"waiting": {"reason": "InvalidImageName", "message": "x"}}
    pod["status"]["containerStatuses"] = [{"name": "train", "state": waiting}]
    assert (seen(pod).status, seen(pod).reason) == ("failed", "fatal")


def test_an_image_without_holdfast_is_named_with_what_to_do() -> None:
    message = 'exec: "holdfast": executable file not found in $PATH'
    assert "install holdfast in its image" in seen(ended(128, "StartError", message)).detail


# ---- the coordinator's ----


def coordinator() -> Json:
    pod = objects.coordinator_pod(OWNER, read_spec("llm", SPEC), "1:3+0", 0)
    pod["status"] = {"phase": "Pending"}
    return pod


def up() -> Json:
    pod = coordinator()
    FakeApi().run(pod)
    return pod


def test_a_coordinators_pod_is_read() -> None:
    assert pods.coordinator(None).state == "absent"
    assert pods.coordinator(coordinator()).state == "starting"
    assert pods.coordinator(up())[:2] == ("up", "10.0.0.1")


def test_the_end_of_the_job_is_in_its_termination_message() -> None:
    pod = up()
    FakeApi().end(pod, 0, "Completed", msgspec.json.encode(END).decode())
    found = pods.coordinator(pod)
    assert (found.state, found.end) == ("ended", END)
    pod["metadata"]["deletionTimestamp"] = "now"
    assert pods.coordinator(pod).state == "ended"


@pytest.mark.parametrize(("code", "message"), [(0, ""), (1, "Traceback"), (137, "")])
def test_a_coordinator_that_ended_without_an_end_of_the_job_is_replaced(
    code: int, message: str
) -> None:
    pod = up()
    FakeApi().end(pod, code, "Error", message)
    assert pods.coordinator(pod).state == "broken"


def test_a_coordinator_on_a_node_that_is_not_ready_is_replaced_even_while_it_is_deleted() -> None:
    pod = up()
    FakeApi().mark(pod, ready=False)
    pod["metadata"]["deletionTimestamp"] = "now"
    assert pods.coordinator(pod).state == "broken"


def test_a_coordinator_that_keeps_crashing_says_why() -> None:
    pod = coordinator()
    before = {"exitCode": 2, "reason": "Error", "message": "\nholdfast coordinator: wrong flag\n"}
    pod["status"]["containerStatuses"] = [
        {
            "name": "coordinator",
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": before},
        }
    ]
    assert "holdfast coordinator: wrong flag" in pods.coordinator(pod).detail
