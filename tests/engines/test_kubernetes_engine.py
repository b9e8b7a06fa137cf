"""The Kubernetes that other tests rely on: a real API server, and nodes that run real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from . import kubernetes
from .conftest import RunPod
from .kube_api import MERGE, Json, KubeApi, Refused
from .kubernetes import Cluster

pytestmark = [
    pytest.mark.platform,
    pytest.mark.skipif(kubernetes.missing() is not None, reason=str(kubernetes.missing())),
    pytest.mark.timeout(300),
]

GROUP = "/apis/holdfast.example/v1"
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "jobs.holdfast.example"},
    "spec": {
        "group": "holdfast.example",
        "scope": "Namespaced",
        "names": {"plural": "jobs", "singular": "job", "kind": "HoldJob"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {"nodes": {"type": "integer", "minimum": 1}},
                            },
                            "status": {
                                "type": "object",
                                "x-kubernetes-preserve-unknown-fields": True,
                            },
                        },
                    }
                },
            }
        ],
    },
}

Pod = Callable[[str], Json]


@pytest.fixture
def pod(cluster: Cluster, space: str) -> Pod:
    return lambda name: cluster.api.request("GET", f"/api/v1/namespaces/{space}/pods/{name}")


@pytest.fixture
def until_phase(cluster: Cluster, pod: Pod) -> Callable[[str, str], Json]:
    """Waits for a pod's phase and returns its status."""

    def wait(name: str, phase: str) -> Json:
        cluster.until(lambda: pod(name)["status"].get("phase") == phase, f"{name} is {phase}")
        status: Json = pod(name)["status"]
        return status

    return wait


UntilPhase = Callable[[str, str], Json]


@pytest.fixture(scope="module")
def crd(cluster: Cluster) -> None:
    cluster.api.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", CRD)
    cluster.until(lambda: cluster.api.find(f"{GROUP}/jobs") is not None, "the resource is served")


def ended(status: Json) -> Json:
    state: Json = status["containerStatuses"][0]["state"]["terminated"]
    return state


def test_the_official_client_can_talk_to_it(cluster: Cluster) -> None:
    client = pytest.importorskip("kubernetes.client")
    config = pytest.importorskip("kubernetes.config")
    api = config.new_client_from_config(str(cluster.kubeconfig))
    assert client.VersionApi(api).get_code().minor.startswith("20")
    names = {node.metadata.name for node in client.CoreV1Api(api).list_node().items}
    assert {"n1", "n2"} <= names


def test_status_is_a_resource_of_its_own(cluster: Cluster, space: str, crd: None) -> None:
    jobs = f"{GROUP}/namespaces/{space}/jobs"
    job = {"apiVersion": "holdfast.example/v1", "kind": "HoldJob", "metadata": {"name": "j"}}
    cluster.api.request("POST", jobs, job | {"spec": {"nodes": 2}, "status": {"phase": "no"}})
    cluster.api.patch(f"{jobs}/j/status", {"spec": {"nodes": 9}, "status": {"phase": "Up"}}, MERGE)
    found = cluster.api.request("GET", f"{jobs}/j")
    assert (found["spec"], found["status"]) == ({"nodes": 2}, {"phase": "Up"})


def test_a_schema_is_enforced(cluster: Cluster, space: str, crd: None) -> None:
    job = {"apiVersion": "holdfast.example/v1", "kind": "HoldJob", "metadata": {"name": "bad"}}
    path = f"{GROUP}/namespaces/{space}/jobs"
    with pytest.raises(Refused, match=r"spec\.nodes") as refused:
        cluster.api.request("POST", path, job | {"spec": {"nodes": 0}})
    assert refused.value.code == 422


def test_a_pod_runs_a_real_command_and_its_exit_code_arrives(
    cluster: Cluster, run_pod: RunPod, until_phase: UntilPhase
) -> None:
    run_pod("p", "echo from $(hostname); echo why > /dev/termination-log; exit 42")
    state = ended(until_phase("p", "Failed"))
    assert (state["exitCode"], state["reason"], state["message"]) == (42, "Error", "why\n")


def test_a_pod_that_ends_well_has_succeeded(run_pod: RunPod, until_phase: UntilPhase) -> None:
    run_pod("p", "true")
    assert ended(until_phase("p", "Succeeded"))["reason"] == "Completed"


def test_a_command_that_does_not_exist_is_a_start_error(
    run_pod: RunPod, until_phase: UntilPhase
) -> None:
    run_pod("p", "", container={"command": ["/no/such/command"]})
    state = ended(until_phase("p", "Failed"))
    assert (state["exitCode"], state["reason"]) == (128, "StartError")
    assert "No such file" in state["message"]


def test_what_a_pod_writes_stays_in_the_pod(
    run_pod: RunPod, until_phase: UntilPhase, tmp_path: Path
) -> None:
    run_pod("p", f"echo x > {tmp_path}/x && test -s {tmp_path}/x")
    until_phase("p", "Succeeded")
    assert list(tmp_path.iterdir()) == []


def test_environment_secrets_and_volumes_are_there(
    cluster: Cluster, space: str, run_pod: RunPod, until_phase: UntilPhase, tmp_path: Path
) -> None:
    body = {"metadata": {"name": "s"}, "stringData": {"token": "t0k"}}
    cluster.api.request("POST", f"/api/v1/namespaces/{space}/secrets", body)
    script = (
        'echo "$NAME $IP $TOKEN $(cat /etc/s/token) $(df --output=target /e | tail -1)" > /out/x'
    )
    run_pod(
        "p",
        script,
        container={
            "env": [
                {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
            ],
            "volumeMounts": [
                {"name": "s", "mountPath": "/etc/s"},
                {"name": "e", "mountPath": "/e"},
                {"name": "o", "mountPath": "/out"},
            ],
        },
        volumes=[
            {"name": "s", "secret": {"secretName": "s"}},
            {"name": "e", "emptyDir": {}},
            {"name": "o", "hostPath": {"path": str(tmp_path)}},
        ],
    )
    status = until_phase("p", "Succeeded")
    assert (tmp_path / "x").read_text() == f"p {status['podIP']} t0k t0k /e\n"


def test_a_claim_is_the_same_folder_for_every_pod(
    cluster: Cluster, space: str, run_pod: RunPod, until_phase: UntilPhase
) -> None:
    claim = {
        "metadata": {"name": "journal"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    cluster.api.request("POST", f"/api/v1/namespaces/{space}/persistentvolumeclaims", claim)
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/var/journal"}]}
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "journal"}}]
    run_pod("writer", "echo kept > /var/journal/x", container=mount, volumes=volumes)
    until_phase("writer", "Succeeded")
    run_pod("reader", "grep kept /var/journal/x", container=mount, volumes=volumes)
    until_phase("reader", "Succeeded")


def test_a_pod_waits_for_a_secret_and_says_which(
    cluster: Cluster, space: str, run_pod: RunPod, pod: Pod, until_phase: UntilPhase
) -> None:
    run_pod("p", "test $K = v", container={"envFrom": [{"secretRef": {"name": "late"}}]})

    def waiting() -> Json:
        statuses = pod("p")["status"].get("containerStatuses") or [{"state": {}}]
        state: Json = statuses[0]["state"].get("waiting", {})
        return state

    cluster.until(lambda: "message" in waiting(), "the pod says what it waits for")
    assert waiting()["reason"] == "CreateContainerConfigError"
    assert "'late' not found" in waiting()["message"]
    body = {"metadata": {"name": "late"}, "stringData": {"K": "v"}}
    cluster.api.request("POST", f"/api/v1/namespaces/{space}/secrets", body)
    until_phase("p", "Succeeded")


def test_a_deleted_pod_gets_sigterm_and_is_gone_when_it_has_ended(
    cluster: Cluster, space: str, run_pod: RunPod, until_phase: UntilPhase, tmp_path: Path
) -> None:
    script = "trap 'sleep 0.5; echo got TERM > /out/x; exit 0' TERM; touch /out/up; "
    script += "while :; do sleep 0.1; done"
    volumes = [{"name": "o", "hostPath": {"path": str(tmp_path)}}]
    run_pod("p", script, {"volumeMounts": [{"name": "o", "mountPath": "/out"}]}, volumes=volumes)
    cluster.until((tmp_path / "up").exists, "the script is up")
    path = f"/api/v1/namespaces/{space}/pods/p"
    cluster.api.request("DELETE", path)
    cluster.until(lambda: cluster.api.find(path) is None, "the pod is gone")
    assert (tmp_path / "x").read_text() == "got TERM\n"


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace_period(
    cluster: Cluster, space: str, run_pod: RunPod, until_phase: UntilPhase
) -> None:
    run_pod("p", "exec sleep 1000", terminationGracePeriodSeconds=1)
    until_phase("p", "Running")
    path = f"/api/v1/namespaces/{space}/pods/p"
    began = time.monotonic()
    cluster.api.request("DELETE", path)
    cluster.until(lambda: cluster.api.find(path) is None, "the pod is gone")
    assert time.monotonic() - began >= 1.0


def test_a_killed_pod_reports_137(
    cluster: Cluster, space: str, run_pod: RunPod, until_phase: UntilPhase
) -> None:
    run_pod("p", "sleep 1000 & wait")
    until_phase("p", "Running")
    cluster.node_of("p", space).kill("p", space)
    state = ended(until_phase("p", "Failed"))
    assert (state["exitCode"], state["reason"]) == (137, "Error")


def test_a_killed_container_is_restarted_if_the_pod_says_so(
    cluster: Cluster, space: str, run_pod: RunPod, pod: Pod, until_phase: UntilPhase
) -> None:
    run_pod("p", "exec sleep 1000", restartPolicy="Always")
    until_phase("p", "Running")
    cluster.node_of("p", space).kill("p", space)

    def container() -> Json:
        status: Json = pod("p")["status"]["containerStatuses"][0]
        return status

    cluster.until(
        lambda: "running" in container()["state"] and container()["restartCount"] == 1, "up"
    )
    assert container()["lastState"]["terminated"]["exitCode"] == 137


@pytest.mark.skipif(
    not Path("/sys/fs/cgroup/memory/memory.oom_control").exists(), reason="needs cgroup v1"
)
def test_a_pod_over_its_memory_limit_is_oom_killed(
    run_pod: RunPod, until_phase: UntilPhase
) -> None:
    words = [sys.executable, "-c", "x = bytearray(300 << 20)"]
    run_pod("p", "", {"command": words, "resources": {"limits": {"memory": "100Mi"}}})
    state = ended(until_phase("p", "Failed"))
    assert (state["exitCode"], state["reason"]) == (137, "OOMKilled")


def test_a_pod_can_be_called_out_of_memory(
    cluster: Cluster, space: str, run_pod: RunPod, until_phase: UntilPhase
) -> None:
    run_pod("p", "exec sleep 1000")
    until_phase("p", "Running")
    cluster.node_of("p", space).oom_kill("p", space)
    state = ended(until_phase("p", "Failed"))
    assert (state["exitCode"], state["reason"]) == (137, "OOMKilled")


def test_an_evicted_pod_says_so_and_its_object_stays(
    cluster: Cluster, space: str, run_pod: RunPod, until_phase: UntilPhase
) -> None:
    run_pod("p", "exec sleep 1000", terminationGracePeriodSeconds=1)
    until_phase("p", "Running")
    cluster.node_of("p", space).evict("p", space)
    assert until_phase("p", "Failed")["reason"] == "Evicted"


def test_pods_find_each_other_by_name(space: str, run_pod: RunPod, until_phase: UntilPhase) -> None:
    run_pod("w-0", "exec sleep 1000", hostname="w-0", subdomain="w")
    address = until_phase("w-0", "Running")["podIP"]
    name = f"w-0.w.{space}.svc"
    run_pod("asks", f"until getent ahostsv4 {name} | grep -q '^{address} '; do sleep 0.1; done")
    until_phase("asks", "Succeeded")


def test_a_pod_can_reach_the_api_server_as_its_service_account(
    run_pod: RunPod, until_phase: UntilPhase
) -> None:
    script = textwrap.dedent("""
        import os, ssl, urllib.request
        here = "/var/run/secrets/kubernetes.io/serviceaccount/"
        url = "https://{KUBERNETES_SERVICE_HOST}:{KUBERNETES_SERVICE_PORT}/api".format_map(os.environ)
        bearer = {"Authorization": "Bearer " + open(here + "token").read()}
        context = ssl.create_default_context(cafile=here + "ca.crt")
        urllib.request.urlopen(urllib.request.Request(url, headers=bearer), context=context)
    """)
    run_pod("p", "", container={"command": [sys.executable, "-c", script]})
    until_phase("p", "Succeeded")


def test_a_service_account_may_only_do_what_its_roles_say(cluster: Cluster, space: str) -> None:
    nobody = KubeApi(cluster.account_kubeconfig("default", space))
    with pytest.raises(Refused, match='cannot list resource "pods"') as refused:
        nobody.request("GET", f"/api/v1/namespaces/{space}/pods")
    assert refused.value.code == 403


def test_the_scheduler_counts_gpus(
    cluster: Cluster, run_pod: RunPod, pod: Pod, until_phase: UntilPhase
) -> None:
    def gpus(count: int) -> Json:
        return {"resources": {"limits": {"nvidia.com/gpu": str(count)}}}

    run_pod("fits", "true", gpus(8))
    until_phase("fits", "Succeeded")
    run_pod("too-big", "true", gpus(9))

    def reason() -> str:
        conditions = pod("too-big")["status"].get("conditions") or [{}]
        return str(conditions[0].get("reason", ""))

    cluster.until(lambda: reason() == "Unschedulable", "the scheduler says no")
    assert "Insufficient nvidia.com/gpu" in pod("too-big")["status"]["conditions"][0]["message"]


def test_300_pods_are_created_and_run(
    cluster: Cluster, space: str, record_property: Callable[[str, object], None]
) -> None:
    box = {"name": "main", "image": "none", "command": ["true"]}
    path = f"/api/v1/namespaces/{space}/pods"

    def create(number: int) -> None:
        spec = {"containers": [box], "restartPolicy": "Never"}
        cluster.api.request("POST", path, {"metadata": {"name": f"p{number}"}, "spec": spec})

    def succeeded() -> int:
        return len(
            cluster.api.request("GET", path, fieldSelector="status.phase=Succeeded")["items"]
        )

    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(create, range(300)))
    created_s = time.monotonic() - began
    cluster.until(lambda: succeeded() == 300, "300 pods have succeeded", limit_s=240.0)
    ran_s = time.monotonic() - began
    record_property("pods_created_per_s", 300 / created_s)
    record_property("all_ran_after_s", ran_s)
    print(
        f"300 pods created in {created_s:.1f} s ({300 / created_s:.0f}/s), all ran by {ran_s:.1f} s"
    )


def test_a_kopf_handler_sees_a_resource_and_writes_its_status(
    cluster: Cluster, space: str, crd: None, tmp_path: Path
) -> None:
    pytest.importorskip("kopf")
    script = tmp_path / "operator.py"
    script.write_text(
        textwrap.dedent("""
            import kopf

            @kopf.on.create("holdfast.example", "v1", "jobs")
            def made(spec, patch, **_):
                patch.status["seen"] = spec["nodes"]
        """)
    )
    words = [sys.executable, "-m", "kopf", "run", "--standalone", "-n", space, str(script)]
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    path = f"{GROUP}/namespaces/{space}/jobs"
    job = {"apiVersion": "holdfast.example/v1", "kind": "HoldJob", "metadata": {"name": "j"}}
    with open(tmp_path / "log", "wb") as log:
        operator = subprocess.Popen(words, env=env, stdout=log, stderr=log)
    try:
        cluster.api.request("POST", path, job | {"spec": {"nodes": 3}})

        def seen() -> bool:
            assert operator.poll() is None, (tmp_path / "log").read_text()
            found = cluster.api.request("GET", f"{path}/j")
            return bool(found.get("status", {}).get("seen") == 3)

        cluster.until(seen, "the handler has run")
    finally:
        operator.terminate()
        operator.wait()


def test_a_silent_node_becomes_not_ready_and_ready_again(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    (node,) = cluster.add_nodes(1)
    began = time.monotonic()
    node.silence()
    cluster.until(lambda: node.name not in cluster.ready_nodes(), "the node is NotReady")
    record_property("not_ready_after_s", time.monotonic() - began)
    node.resume()
    cluster.until(lambda: node.name in cluster.ready_nodes(), "the node is Ready again")


def test_the_pod_of_a_crashed_node_is_deleted_but_stays_until_forced(
    cluster: Cluster, space: str, run_pod: RunPod, pod: Pod, until_phase: UntilPhase
) -> None:
    (node,) = cluster.add_nodes(1, labels={"only": "here"})
    run_pod("p", "exec sleep 1000", nodeSelector={"only": "here"}, terminationGracePeriodSeconds=1)
    until_phase("p", "Running")
    node.crash()
    cluster.until(lambda: "deletionTimestamp" in pod("p")["metadata"], "the pod is to be deleted")
    assert pod("p")["status"]["phase"] == "Running"
    path = f"/api/v1/namespaces/{space}/pods/p"
    cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})
    assert cluster.api.find(path) is None


def test_the_state_survives_the_api_server(
    cluster: Cluster, run_pod: RunPod, pod: Pod, until_phase: UntilPhase, tmp_path: Path
) -> None:
    volumes = [{"name": "o", "hostPath": {"path": str(tmp_path)}}]
    mount = {"volumeMounts": [{"name": "o", "mountPath": "/out"}]}
    run_pod("p", "until test -e /out/go; do sleep 0.1; done; exit 3", mount, volumes=volumes)
    until_phase("p", "Running")
    cluster.stop_server()
    (tmp_path / "go").touch()
    cluster.start_server()
    assert ended(until_phase("p", "Failed"))["exitCode"] == 3


def test_nothing_is_left_of_a_cluster_whose_owner_was_killed(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import signal, sys
        from engines.kubernetes import Cluster
        with Cluster() as cluster:
            cluster.add_nodes(1)
            box = {"name": "c", "image": "none", "command": ["sleep", sys.argv[1]]}
            body = {"metadata": {"name": "p"}, "spec": {"containers": [box]}}
            pods = "/api/v1/namespaces/default/pods"
            cluster.api.request("POST", pods, body)
            def phase():
                return cluster.api.request("GET", pods + "/p")["status"].get("phase")
            cluster.until(lambda: phase() == "Running", "the pod runs")
            print(cluster.folder, cluster.memory, flush=True)
            signal.pause()
    """)
    mark = f"1000.{os.getpid()}"
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    words = [sys.executable, "-c", script, mark]
    owner = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        folders = owner.stdout.readline().split()
        assert len(folders) == 2, "the cluster did not start"
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    end = time.monotonic() + 30.0
    while left := [c for c in _command_lines() if folders[0] in c or c == f"sleep {mark}"]:
        assert time.monotonic() < end, left
        time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(folder)
    group = Path("/sys/fs/cgroup/memory", Path(folders[0]).name)
    if group.exists():
        group.rmdir()


def _command_lines() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode().strip())
        except OSError:
            continue
    return lines
