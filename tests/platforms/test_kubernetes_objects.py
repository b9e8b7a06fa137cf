"""The objects of a job on Kubernetes: what is added to what the user wrote, and what never is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from fake_kubernetes import OWNER, SPEC

from holdfast.messages.supply import Cordon, NodeWish
from holdfast.platforms.kubernetes import objects
from holdfast.platforms.kubernetes.spec import read_spec

Json = dict[str, Any]

WISH = NodeWish(id="3-2", position=3, attempt=2)


def job(template: Json | None = None, **more: Any) -> Any:
    spec = {**copy.deepcopy(SPEC), **more}
    if template is not None:
        spec["template"] = template
    return read_spec("llm", spec)


def worker(
    template: Json | None = None, wish: NodeWish = WISH, avoid: Any = (), **more: Any
) -> Json:
    return objects.worker_pod(OWNER, job(template, **more), wish, avoid, "1:3+0")


def pod_of(**spec: Any) -> Json:
    return {"spec": {"containers": [{"name": "train"}], **spec}}


def env_of(pod: Json) -> dict[str, Any]:
    box = pod["spec"]["containers"][0]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in box["env"]}


def test_a_request_is_a_pod_of_that_name_with_an_address_of_its_position() -> None:
    pod = worker()
    assert pod["metadata"]["name"] == "llm-3-2"
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("llm-3", "llm")
    assert pod["metadata"]["labels"][objects.REQUEST] == "3-2"
    assert pod["spec"]["restartPolicy"] == "Never"


def test_a_pod_belongs_to_the_resource() -> None:
    (owner,) = worker()["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["kind"], owner["controller"]) == (OWNER.uid, "HoldfastJob", True)
    assert OWNER.owns(worker())
    assert not OWNER._replace(uid="another").owns(worker())


def test_a_node_is_told_its_job_by_variables_and_its_token_by_a_secret() -> None:
    env = env_of(worker())
    assert env["HOLDFAST_COORDINATOR"] == "llm-coordinator.llm.space.svc:29400"
    assert (env["HOLDFAST_JOB"], env["HOLDFAST_REQUEST"]) == ("llm", "3-2")
    assert (env["HOLDFAST_NNODES"], env["HOLDFAST_SPARES"]) == ("1:3", "0")
    assert env["HOLDFAST_NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert env["HOLDFAST_TOKEN"] == {"secretKeyRef": {"name": "llm", "key": "token"}}


def test_what_the_user_wrote_is_left_as_it_is() -> None:
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"x": "y"}},
        "spec": {
            "containers": [
                {
                    "name": "train",
                    "image": "mine",
                    "command": ["holdfast", "run", "train.py"],
                    "env": [{"name": "HOLDFAST_LOCAL_ADDR", "value": "10.1.1.1"}],
                    "resources": {"limits": {"nvidia.com/gpu": "8"}},
                },
                {"name": "sidecar", "image": "other"},
            ],
            "hostname": "mine",
            "schedulerName": "volcano",
            "priorityClassName": "low",
            "terminationGracePeriodSeconds": 7,
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"operator": "Exists"}],
        },
    }
    before = copy.deepcopy(template)
    wish = NodeWish(id="3-2", position=3, attempt=2, priority="high")
    pod = worker(template, wish)
    assert template == before, "the template itself is not changed"
    for key, value in before["spec"].items():
        if key != "containers":
            assert pod["spec"][key] == value, key
    for theirs, ours in zip(before["spec"]["containers"], pod["spec"]["containers"], strict=True):
        assert {**theirs, "env": 0, "terminationMessagePolicy": 0} == {
            **ours,
            "env": 0,
            "terminationMessagePolicy": 0,
        }
    assert env_of(pod)["HOLDFAST_LOCAL_ADDR"] == "10.1.1.1"
    assert "env" not in pod["spec"]["containers"][1], "only the container that trains is told"
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"]["x"] == "y"


def test_more_memory_leaves_other_resources_alone() -> None:
    template = pod_of()
    template["spec"]["containers"][0]["resources"] = {"limits": {"memory": "1Gi", "cpu": "2"}}
    wish = NodeWish(id="0-2", position=0, attempt=2, memory_mib=2048)
    resources = worker(template, wish)["spec"]["containers"][0]["resources"]
    assert resources == {
        "limits": {"memory": "2048Mi", "cpu": "2"},
        "requests": {"memory": "2048Mi"},
    }


@pytest.mark.parametrize(
    ("limit", "memory", "most"),
    [("1Gi", "1024M", None), ("512Gi", "524288M", "524288M"), (None, None, None)],
)
def test_the_memory_of_the_template_is_what_a_node_has_at_first(
    limit: str | None, memory: str | None, most: str | None
) -> None:
    template = pod_of()
    if limit:
        template["spec"]["containers"][0]["resources"] = {"limits": {"memory": limit}}
    env = env_of(worker(template))
    assert (env.get("HOLDFAST_MEMORY"), env.get("HOLDFAST_MEMORY_LIMIT")) == (memory, most)


@pytest.mark.parametrize(
    ("text", "value"), [("500m", 0.5), ("2Gi", 2 << 30), ("1", 1), ("3k", 3000), ("1e3", 1000)]
)
def test_quantities_are_read(text: str, value: float) -> None:
    assert objects.quantity(text) == value


def test_a_priority_is_the_name_of_a_class() -> None:
    wish = NodeWish(id="0-1", position=0, attempt=1, priority="high")
    assert worker(pod_of(), wish)["spec"]["priorityClassName"] == "high"


AVOID = [Cordon(host="n7", why="hardware"), Cordon(host="n8", why="hardware")]
BARRED = [{"key": "metadata.name", "operator": "NotIn", "values": [h]} for h in ("n7", "n8")]


def terms_of(pod: Json) -> list[Json]:
    found: list[Json] = pod["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    return found


def test_hosts_that_are_to_be_avoided_are() -> None:
    assert terms_of(worker(avoid=AVOID)) == [{"matchFields": BARRED}]


def test_avoided_hosts_are_barred_in_every_alternative_of_the_users_affinity() -> None:
    ours = [{"matchExpressions": [{"key": k, "operator": "Exists"}]} for k in ("a", "b")]
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": ours}
        }
    }
    found = terms_of(worker(pod_of(affinity=affinity), avoid=AVOID))
    assert found == [{**term, "matchFields": BARRED} for term in ours]


# ---- the coordinator ----


def coordinator(**more: Any) -> Json:
    return objects.coordinator_pod(OWNER, job(**more), "1:3+0", requeues=2)


def test_the_coordinator_listens_at_its_pods_address_and_keeps_its_journal_on_a_claim() -> None:
    pod = coordinator()
    box = pod["spec"]["containers"][0]
    assert box["command"] == ["holdfast"]
    assert box["args"] == [
        "coordinator",
        "--job=llm",
        "--listen=[$(HOLDFAST_LOCAL_ADDR)]:29400",
        "--end-file=/dev/termination-log",
        "--requeues=2",
    ]
    assert env_of(pod)["HOLDFAST_HOME"] == f"/var/lib/holdfast/{OWNER.uid}"
    assert box["volumeMounts"] == [{"name": "holdfast-journal", "mountPath": "/var/lib/holdfast"}]
    claim = {"persistentVolumeClaim": {"claimName": "llm-coordinator"}}
    assert pod["spec"]["volumes"] == [{"name": "holdfast-journal", **claim}]
    assert pod["spec"]["restartPolicy"] == "OnFailure"
    assert box["image"] == "mine", "that of the workers"


def test_the_coordinators_pod_is_where_the_user_wants_it() -> None:
    template = {"spec": {"nodeSelector": {"pool": "cpu"}, "containers": [{"image": "own"}]}}
    pod = coordinator(coordinator={"template": template})
    assert pod["spec"]["nodeSelector"] == {"pool": "cpu"}
    assert pod["spec"]["containers"][0]["image"] == "own"


def test_a_volume_that_the_user_gives_takes_the_place_of_the_claim() -> None:
    given = {"journal": {"volume": {"hostPath": {"path": "/x"}}}}
    pod = coordinator(coordinator=given)
    assert pod["spec"]["volumes"][0] == {"name": "holdfast-journal", "hostPath": {"path": "/x"}}
    assert objects.journal_claim(OWNER, job(coordinator=given)) is None


def test_the_token_is_in_no_spec() -> None:
    secret = objects.secret(OWNER, job(), "s3cret")
    assert secret["stringData"] == {"token": "s3cret"}
    for made in (worker(), coordinator(), objects.service(OWNER, job())):
        assert "s3cret" not in str(made)


def test_names_are_found_before_pods_are_ready() -> None:
    body = objects.service(OWNER, job())["spec"]
    assert (body["clusterIP"], body["publishNotReadyAddresses"]) == ("None", True)


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_disruption_budget_is_for_workers(version: str) -> None:
    budget = objects.disruption_budget(OWNER, job(nodes={"min": 2, "max": 3}), version)
    assert budget is not None
    assert budget["apiVersion"] == f"policy/{version}"
    assert budget["spec"]["minAvailable"] == 2
    assert budget["spec"]["selector"]["matchLabels"][objects.ROLE] == "worker"
    assert objects.disruption_budget(OWNER, job(minAvailable=0), version) is None


def test_a_gang_has_a_group_and_its_pods_a_scheduler() -> None:
    spec = job(gang={"queue": "q"}, nodes={"min": 2, "max": 3})
    group = objects.pod_group(OWNER, spec)
    assert group is not None
    assert group["spec"] == {"minMember": 2, "queue": "q"}
    pod = worker(gang={})
    assert pod["spec"]["schedulerName"] == "volcano"
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "llm"
    assert objects.pod_group(OWNER, job()) is None
