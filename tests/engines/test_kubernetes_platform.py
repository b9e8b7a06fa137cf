"""Jobs on Kubernetes: a real API server, the operator as a process, pods that train."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from holdfast.platforms.kubernetes import crd, dlrover
from holdfast.platforms.kubernetes.client import KubeClient
from holdfast.platforms.kubernetes.kinds import HOLDFAST
from holdfast.platforms.kubernetes.objects import JOB
from holdfast.platforms.kubernetes.operator import Jobs

from .kube_api import MERGE, Json, Refused
from .kube_jobs import Operator, define, finish, training
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
    scale = f"{operator.path('llm')}/scale"  # As kubectl scale does it.
    assert operator.cluster.api.request("GET", scale)["spec"]["replicas"] == 2
    operator.cluster.api.patch(scale, {"spec": {"replicas": 1}}, MERGE)
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


def end_by(how: str, operator: Operator, pod: str) -> None:
    """Have a pod end in one of the ways in which pods do."""
    cluster, space = operator.cluster, operator.space
    node = cluster.node_of(pod, space)
    if how == "out of memory":
        node.oom_kill(pod, space)
    elif how == "evicted":
        node.evict(pod, space)
    elif how == "deleted":
        cluster.api.request("DELETE", f"/api/v1/namespaces/{space}/pods/{pod}")
    else:
        node.silence()


@pytest.mark.parametrize("how", ["out of memory", "evicted", "deleted", "node not ready"])
def test_a_pod_that_is_lost_is_replaced_and_the_reason_is_known(
    operator: Operator, tmp_path: Path, how: str
) -> None:
    spec = training(tmp_path, min=1, max=2)
    box = spec["template"]["spec"]["containers"][0]
    box["resources"] = {"limits": {"memory": "1Gi"}}
    operator.cluster.add_nodes(1, labels={"for": operator.space})
    spec["template"]["spec"]["terminationGracePeriodSeconds"] = 5
    operator.apply("llm", spec)
    operator.until_step("llm", 10)
    victim = "llm-1-1"
    node = operator.cluster.node_of(victim, operator.space)
    if how == "node not ready" and operator.cluster.node_of("llm-0-1", operator.space) is node:
        pytest.skip("both pods are on one node, so it is not believed to be lost")
    end_by(how, operator, victim)
    operator.until(lambda: operator.pod("llm-1-2") is not None, "the next attempt")
    made = operator.pod("llm-1-2")
    assert made is not None
    memory = made["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert memory == ("2Gi" if how == "out of memory" else "1Gi")
    if how == "node not ready":
        node.resume()
    operator.until_step("llm", 20)
    operator.until(lambda: operator.pod(victim) is None or ended(operator, victim), "no old pod")
    finish(tmp_path)
    operator.until_phase("llm", "Succeeded")


def ended(operator: Operator, pod: str) -> bool:
    found = operator.pod(pod)
    return found is not None and found["status"].get("phase") in ("Failed", "Succeeded")


def test_the_rights_in_deploy_are_enough_for_a_whole_job(
    cluster: Cluster, space: str, tmp_path: Path
) -> None:
    yaml = pytest.importorskip("yaml")
    account = f"operator-{space}"
    page = Path(__file__).parents[2] / "deploy" / "kubernetes" / "rbac.yaml"
    role = next(one for one in yaml.safe_load_all(page.read_text()) if one["kind"] == "ClusterRole")
    role["metadata"]["name"] = account
    subject = {"kind": "ServiceAccount", "name": account, "namespace": space}
    binding = {
        "metadata": {"name": account},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": account,
        },
        "subjects": [subject],
    }
    accounts = f"/api/v1/namespaces/{space}/serviceaccounts"
    cluster.api.request("POST", accounts, {"metadata": {"name": account}})
    roles = "/apis/rbac.authorization.k8s.io/v1"
    cluster.api.request("POST", f"{roles}/clusterroles", role)
    operator = Operator(cluster, space, tmp_path)
    kubeconfig = cluster.account_kubeconfig(account, space)
    with operator:
        operator.kill()
        operator.start(kubeconfig)
        operator.until_ended()
        assert "no permission in namespace" in operator.log.read_text()
        assert "create pods" in operator.log.read_text()
        cluster.api.request("POST", f"{roles}/clusterrolebindings", binding)
        operator.start(kubeconfig)
        operator.apply("llm", training(tmp_path, min=1, max=2, steps="50"))
        operator.until_phase("llm", "Succeeded")
        assert "no permission" not in operator.log.read_text().rpartition("authentication has")[2]
        events = cluster.api.request("GET", f"/api/v1/namespaces/{space}/events")["items"]
        reasons = {one["reason"] for one in events if one["involvedObject"]["name"] == "llm"}
        assert {"CoordinatorStarted", "Succeeded"} <= reasons


def test_deleting_the_resource_deletes_all_of_the_job(operator: Operator, tmp_path: Path) -> None:
    operator.apply("llm", training(tmp_path))
    operator.until_step("llm", 5)
    api, space = operator.cluster.api, operator.space
    api.request("DELETE", operator.path("llm"))
    operator.until(lambda: not operator.pods(), "no pods")
    for plural in ("services", "secrets", "persistentvolumeclaims"):
        path = f"/api/v1/namespaces/{space}/{plural}"
        operator.until(
            lambda path=path: (
                not [  # type: ignore[misc]
                    one
                    for one in api.request("GET", path)["items"]
                    if one["metadata"]["name"].startswith("llm")
                ]
            ),
            f"no {plural}",
        )


def test_the_schema_is_taken_by_the_server_and_enforced(operator: Operator, tmp_path: Path) -> None:
    for path, value in (("max", 0), ("min", "two")):
        spec = training(tmp_path)
        spec["nodes"][path] = value
        with pytest.raises(Refused, match=rf"spec\.nodes\.{path}"):
            operator.apply("llm", spec)
    operator.apply("llm", training(tmp_path, min=3, max=2))
    operator.until(lambda: operator.condition("llm", "Accepted").get("status") == "False", "no")
    assert "min (3) is more than max (2)" in operator.condition("llm", "Accepted")["message"]
    assert not operator.pods()


def test_an_image_without_holdfast_ends_the_job_with_what_to_do(
    operator: Operator, tmp_path: Path
) -> None:
    spec = training(tmp_path)
    spec["template"]["spec"]["containers"][0]["command"][0] = "/nowhere/holdfast"
    operator.apply("llm", spec)
    status = operator.until_phase("llm", "Failed")
    assert status["exitCode"] == 93
    assert "install holdfast in its image" in status["reason"]


def test_a_server_that_cannot_be_reached_is_one_sentence(tmp_path: Path) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    file = tmp_path / "config"
    file.write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "operator"],
        env={**os.environ, "KUBECONFIG": str(file)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "the API server at http://127.0.0.1:9 cannot be reached" in line
    assert "check that it runs" in line


ELASTIC = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
}


def theirs(plural: str, kind: str) -> Json:
    """DLRover's resources, with a schema that takes anything."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "properties": {"spec": anything, "status": anything},
            }
        },
    }
    return {
        **ELASTIC,
        "metadata": {"name": f"{plural}.{dlrover.GROUP}"},
        "spec": {
            "group": dlrover.GROUP,
            "names": {"plural": plural, "kind": kind, "singular": kind.lower()},
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def test_an_elastic_job_trains_and_a_scale_plan_changes_its_nodes(
    cluster: Cluster, space: str, tmp_path: Path
) -> None:
    define(cluster, theirs("elasticjobs", "ElasticJob"))
    define(cluster, theirs("scaleplans", "ScalePlan"))
    spec = training(tmp_path)
    box = spec["template"]["spec"]["containers"][0]
    box["command"] = ["dlrover-run", "--nnodes=1:1", "--nproc_per_node=1", "train.py"]
    worker = {"replicas": 1, "template": spec["template"], "autoScale": True}
    base = f"/apis/{dlrover.GROUP}/{dlrover.VERSION}/namespaces/{space}"
    head = {"apiVersion": f"{dlrover.GROUP}/{dlrover.VERSION}"}
    with Operator(cluster, space, tmp_path, "--dlrover") as operator:

        def status(path: str) -> Json:
            found: Json = cluster.api.request("GET", f"{base}/{path}").get("status") or {}
            return found

        def active() -> int:
            statuses = status("elasticjobs/llm").get("replicaStatuses") or {}
            return int(statuses.get("worker", {}).get("active", 0))

        job = {"kind": "ElasticJob", "metadata": {"name": "llm"}}
        cluster.api.request(
            "POST",
            f"{base}/elasticjobs",
            {**head, **job, "spec": {"replicaSpecs": {"worker": worker}}},
        )
        operator.until(lambda: active() == 1, "one node")
        accepted = next(
            one for one in status("elasticjobs/llm")["conditions"] if one["type"] == "Accepted"
        )
        assert "autoScale has no effect" in accepted["message"]
        wanted = {"ownerJob": "llm", "replicaResourceSpecs": {"worker": {"replicas": 2}}}
        plan = {"kind": "ScalePlan", "metadata": {"name": "more"}, "spec": wanted}
        cluster.api.request("POST", f"{base}/scaleplans", {**head, **plan})
        operator.until(lambda: active() == 2, "two nodes")
        operator.until(lambda: status("scaleplans/more").get("phase") == "Succeeded", "it counts")
        finish(tmp_path)
        operator.until(lambda: status("elasticjobs/llm")["phase"] == "Succeeded", "the end")


class LossyClient(KubeClient):
    """A client whose watch loses one event in five."""

    def watch(
        self, path: str, selector: str, seen: Callable[[Json], None], broken: Callable[[], None]
    ) -> None:
        chance = Random(7)
        super().watch(
            path, selector, lambda found: seen(found) if chance.random() > 0.2 else None, broken
        )


def test_a_watch_that_loses_events_leads_to_the_same_end(
    cluster: Cluster, space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    define(cluster, crd.definition())
    names = Operator(cluster, space, tmp_path)  # Only for its names and paths: it is not started.
    spec = training(tmp_path, min=1, max=4)
    spec["template"]["spec"]["containers"][0]["command"] = ["sleep", "1000"]
    spec["template"]["spec"]["terminationGracePeriodSeconds"] = 1

    async def scenario() -> None:
        api = LossyClient()
        jobs = Jobs(api)
        api.watch(f"/api/v1/namespaces/{space}/pods", JOB, jobs.pod_seen, jobs.look_again)
        jobs.seen(HOLDFAST, names.apply("llm", spec), gone=False)

        async def until_there(*pods: str) -> None:
            for _ in range(1200):
                found = await asyncio.to_thread(names.pods)
                alive = {
                    one["metadata"]["name"]
                    for one in found
                    if one["status"].get("phase") in ("Pending", "Running")
                    and "deletionTimestamp" not in one["metadata"]
                }
                if alive == {"llm-coordinator", *pods}:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(f"{sorted(alive)} instead of {pods}")

        await until_there("llm-0-1", "llm-1-1", "llm-2-1", "llm-3-1")
        for number in range(4):
            path = f"/api/v1/namespaces/{space}/pods/llm-{number}-1"
            await asyncio.to_thread(cluster.api.request, "DELETE", path)
        await until_there("llm-0-2", "llm-1-2", "llm-2-2", "llm-3-2")
        await jobs.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_the_manifests_in_deploy_run_an_operator_that_runs_a_job(
    cluster: Cluster, space: str, tmp_path: Path
) -> None:
    yaml = pytest.importorskip("yaml")
    define(cluster, crd.definition())
    folder = Path(__file__).parents[2] / "deploy" / "kubernetes"
    groups = {
        "Namespace": "/api/v1/namespaces",
        "ServiceAccount": "/api/v1/namespaces/holdfast/serviceaccounts",
        "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        "Deployment": "/apis/apps/v1/namespaces/holdfast/deployments",
    }
    for page in ("rbac.yaml", "operator.yaml"):
        for body in yaml.safe_load_all((folder / page).read_text()):
            cluster.api.request("POST", groups[body["kind"]], body)
    jobs = Operator(cluster, space, tmp_path)  # Only for its names and paths: it is not started.
    jobs.apply("llm", training(tmp_path, min=1, max=2, steps="30"))
    try:
        jobs.until_phase("llm", "Succeeded")
    finally:
        cluster.api.request("DELETE", f"{groups['Deployment']}/holdfast-operator")
