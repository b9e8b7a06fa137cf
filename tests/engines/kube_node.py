"""Is a node of a Kubernetes cluster: runs the pods that are bound to it as real processes here.

The hollow kubelets of kubemark report pods as running without running anything, so a job could not
train on them. This agent does what a kubelet does for the API: it registers a Node with the capacities
it is told (GPUs too), renews its lease, watches the pods that the scheduler bound to it, starts their
containers (`kube_container` says in what, `kube_pod` what of a specification is supported), reports
their states, and honours deletion: SIGTERM, the grace period, SIGKILL, and the object is gone only
when the processes are.

- Init containers run one after the other; then all containers. `restartPolicy` is honoured, with a
  backoff of 0.5 to 10 s. Exit codes, `Completed`, `Error`, `OOMKilled` and `StartError` arrive in the
  status, and the termination message.
- Each pod has an address 127.C.N.P of its own, which never changes while the pod exists. All pods
  share the machine's ports: a server in a pod should listen on its pod address, not on 0.0.0.0.
- A memory limit is enforced where the machine has cgroup v1; other limits are for the scheduler only.
- Not there: probes (a container is ready when it runs), lifecycle hooks, images (any name will do,
  except those in `absent_images`), users other than root, `activeDeadlineSeconds`, `kubectl exec` and
  `kubectl logs` (see `log`).

The tests do to it what happens to machines: `kill`, `oom_kill`, `evict`, `silence`, `crash`, `drop`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import urllib3

from . import kube_pod
from .kube_api import Json, KubeApi, Refused
from .kube_container import NOT_STARTED

_LAUNCHER = Path(__file__).with_name("kube_container.py")
_SHM_BYTES = 64 << 20
_BACKOFF_S = (0.5, 10.0)
_EVICTED = "The node was low on resource: memory."
_ENDED = ("Succeeded", "Failed")
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


class Machine(NamedTuple):
    """What the nodes of one cluster share on this machine."""

    folder: Path
    memory: Path
    hosts: Path
    cgroup: Path | None
    image_env: dict[str, str]
    absent_images: set[str]


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _now_micro() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _path(pod: Json) -> str:
    meta = pod["metadata"]
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"


class Container:
    """One container of a pod, over all its restarts."""

    def __init__(self, spec: Json, folder: Path, cgroup: Path | None) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.log = folder / f"{self.name}.log"
        self.restarts = 0
        self.state: Json = {"waiting": {"reason": "ContainerCreating"}}
        self.last_state: Json = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.called_out_of_memory = False
        self._folder = folder
        self._cgroup = cgroup
        self._started_at = ""

    def status(self) -> Json:
        running = "running" in self.state
        return {
            "name": self.name,
            "image": self.spec.get("image", ""),
            "imageID": "",
            "containerID": f"process://{self.process.pid}" if self.process else "",
            "ready": running or self.exit_code == 0,
            "started": running,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last_state,
        }

    @property
    def exit_code(self) -> int | None:
        ended = self.state.get("terminated")
        return None if ended is None else int(ended["exitCode"])

    @property
    def _run_folder(self) -> Path:
        return self._folder / f"{self.name}-{self.restarts}"

    def start(self, command: list[str], env: Json, mounts: list[tuple[str, str, bool]]) -> None:
        run = self._run_folder
        run.mkdir(parents=True)
        (run / "message").touch()
        message = self.spec.get("terminationMessagePath", "/dev/termination-log")
        spec = {
            "agent": os.getpid(),
            "folder": str(run),
            "command": command,
            "env": env,
            "cwd": self.spec.get("workingDir") or "/",
            "hostname": env["HOSTNAME"],
            "mounts": [*mounts, (str(run / "message"), message, False)],
            "log": str(self.log),
            "shm_bytes": _SHM_BYTES,
            "cgroups": self._make_cgroup(),
        }
        (run / "spec.json").write_text(json.dumps(spec))
        words = [sys.executable, "-I", "-S", str(_LAUNCHER), str(run / "spec.json")]
        with open(run / "launcher.log", "wb") as said:
            self.process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=said, start_new_session=True
            )
        assert self.process.stdout is not None
        with self.process.stdout as started:
            started.read(1)
        self._started_at = _now()
        self.state = {"running": {"startedAt": self._started_at}}

    def wait(self) -> Json:
        """Wait for the process to end; return its terminated state."""
        assert self.process is not None
        code = self.process.wait()
        code = 128 - code if code < 0 else code
        run = self._run_folder
        trouble = run / "not-started"
        message = (run / "message").read_text(errors="replace")[:4096]
        if self._ran_out_of_memory() and code != 0:
            reason = "OOMKilled"
        elif trouble.exists():
            reason, code, message = "StartError", NOT_STARTED, trouble.read_text()
        else:
            reason = "Error" if code else "Completed"
        ended = {"exitCode": code, "reason": reason, "startedAt": self._started_at}
        ended |= {"finishedAt": _now()} | ({"message": message} if message else {})
        for name in ("upper", "work"):
            shutil.rmtree(run / name, ignore_errors=True)
        return {"terminated": ended}

    def terminate(self) -> None:
        """Send SIGTERM to the first process, as a kubelet does; the launcher passes it on."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """Kill the first process; the kernel kills the rest of its PID namespace."""
        if self.process is None or self.process.poll() is not None:
            return
        try:
            os.kill(int((self._run_folder / "pid").read_text()), signal.SIGKILL)
        except (OSError, ValueError):  # not started yet: its launcher will do
            self.process.kill()

    def abolish(self) -> None:
        """Kill launcher and container, whatever they are doing."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def _make_cgroup(self) -> list[str]:
        limit = self.spec.get("resources", {}).get("limits", {}).get("memory")
        if self._cgroup is None or limit is None:
            return []
        group = self._group()
        group.mkdir(parents=True)
        (group / "memory.limit_in_bytes").write_text(str(int(kube_pod.quantity(limit))))
        return [str(group)]

    def _group(self) -> Path:
        assert self._cgroup is not None
        return self._cgroup / f"{self._folder.name}-{self.name}-{self.restarts}"

    def _ran_out_of_memory(self) -> bool:
        if self.called_out_of_memory:
            return True
        if self._cgroup is None or not self._group().exists():
            return False
        counts = (self._group() / "memory.oom_control").read_text().split()
        with contextlib.suppress(OSError):  # removed with the cluster if it is busy now
            self._group().rmdir()
        return int(counts[counts.index("oom_kill") + 1]) > 0


class PodRun(threading.Thread):
    """One pod on this node, from binding to its end."""

    def __init__(self, node: Node, pod: Json, address: str) -> None:
        super().__init__(name=f"pod {pod['metadata']['name']}", daemon=True)
        self.pod = pod
        self.address = address
        self.dirty = False
        self.stopping = threading.Event()
        self.deleting = False
        self.verdict: Json = {}  # overrides phase, reason and message, e.g. of an eviction
        uid = pod["metadata"]["uid"]
        self.folder = node.machine.folder / "pods" / uid
        self.memory = node.machine.memory / uid
        self.folder.mkdir(parents=True)
        self._node = node
        spec = pod["spec"]
        self.inits = [self._container(c) for c in spec.get("initContainers", ())]
        self.containers = [self._container(c) for c in spec["containers"]]
        self._volumes: dict[str, Path] = {}
        self._phase = "Pending"
        self._started_at = _now()
        self._lock = threading.Lock()

    def _container(self, spec: Json) -> Container:
        return Container(spec, self.folder, self._node.machine.cgroup)

    @property
    def all_containers(self) -> list[Container]:
        return [*self.inits, *self.containers]

    def run(self) -> None:
        for container in self.inits:
            self._keep_running(container, "OnFailure" if self._policy != "Never" else "Never")
            if container.exit_code != 0:
                break
        else:
            threads = [
                threading.Thread(target=self._keep_running, args=(c, self._policy), daemon=True)
                for c in self.containers[1:]
            ]
            for thread in threads:
                thread.start()
            self._keep_running(self.containers[0], self._policy)
            for thread in threads:
                thread.join()
        good = all(c.exit_code == 0 for c in self.all_containers)
        self._phase = "Succeeded" if good else "Failed"
        self.report()
        self._node.ended(self)

    @property
    def _policy(self) -> str:
        return str(self.pod["spec"].get("restartPolicy", "Always"))

    def _keep_running(self, container: Container, policy: str) -> None:
        backoff_s = _BACKOFF_S[0]
        while not self.stopping.is_set():
            if not self._start(container):
                return
            self.report()
            ended = container.wait()
            again = policy == "Always" or (policy == "OnFailure" and _code(ended) != 0)
            if self.stopping.is_set() or not again:
                container.state = ended
                return
            container.last_state = ended
            container.state = {"waiting": {"reason": "CrashLoopBackOff"}}
            container.called_out_of_memory = False
            self.report()
            self.stopping.wait(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
            container.restarts += 1

    def _start(self, container: Container) -> bool:
        """Start a container as soon as what it needs is there; False if the pod is ended before."""
        while not self.stopping.is_set():
            try:
                started = self._launch(container)
            except kube_pod.ConfigError as error:
                reason, message = "CreateContainerConfigError", str(error)
            except _Unpullable as error:
                reason, message = "ErrImagePull", str(error)
            except (urllib3.exceptions.HTTPError, Refused) as error:
                reason, message = "CreateContainerError", str(error)
            else:
                return started
            container.state = {"waiting": {"reason": reason, "message": message}}
            self.report()
            self.stopping.wait(0.5)
        return False

    def _launch(self, container: Container) -> bool:
        """Start a container; False if the pod was told to end meanwhile."""
        image = container.spec.get("image", "")
        if image in self._node.machine.absent_images:
            raise _Unpullable(f"image {image!r} cannot be pulled")
        if not self._volumes:
            self._volumes = kube_pod.make_volumes(self.pod, self.folder, self.memory, self._read)
        itself = self.pod | {"status": {"podIP": self.address, "hostIP": self._node.address}}
        given = self._node.given_env() | {"HOSTNAME": self._hostname()}
        env = kube_pod.environment(itself, container.spec, given, self._read)
        mounts = kube_pod.mounts(container.spec, self._volumes)
        mounts.insert(0, (str(self._node.machine.hosts), "/etc/hosts", True))
        with self._lock:
            if self.stopping.is_set():
                return False
            container.start(kube_pod.command(container.spec, env), env, mounts)
            self._phase = "Running"
            return True

    def _hostname(self) -> str:
        return str(self.pod["spec"].get("hostname") or self.pod["metadata"]["name"])[:63]

    def _read(self, plural: str, name: str) -> Json | None:
        cluster_wide = plural == "persistentvolumes"
        space = "" if cluster_wide else f"namespaces/{self.pod['metadata']['namespace']}/"
        return self._node.api.find(f"/api/v1/{space}{plural}/{name}")

    def stop(self, grace_s: float) -> None:
        """End the pod: SIGTERM now, SIGKILL when the grace period is over."""
        with self._lock:
            self.stopping.set()
        for container in self.all_containers:
            container.terminate()
        timer = threading.Timer(grace_s, self._kill_all)
        timer.daemon = True
        timer.start()

    def _kill_all(self) -> None:
        for container in self.all_containers:
            container.kill()

    def abolish(self) -> None:
        """Kill everything at once and say nothing."""
        with self._lock:
            self.stopping.set()
        for container in self.all_containers:
            container.abolish()

    def status(self) -> Json:
        ready = all("running" in c.state for c in self.containers) and not self.verdict
        initialized = all(c.exit_code == 0 for c in self.inits)
        states = {"Initialized": initialized, "Ready": ready, "ContainersReady": ready}
        return {
            "phase": self._phase,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "hostIP": self._node.address,
            "startTime": self._started_at,
            "conditions": [{"type": t, "status": str(s)} for t, s in states.items()],
            "initContainerStatuses": [c.status() for c in self.inits],
            "containerStatuses": [c.status() for c in self.containers],
            **self.verdict,
        }

    def report(self) -> None:
        """Write the status to the API server; if it cannot be reached, the next heartbeat does."""
        self.dirty = True
        if self._node.silent:
            return
        with self._lock:
            self.dirty = False
            body = {"metadata": {"uid": self.pod["metadata"]["uid"]}, "status": self.status()}
            try:
                self._node.api.patch(_path(self.pod) + "/status", body)
            except urllib3.exceptions.HTTPError:
                self.dirty = True
            except Refused as refused:  # 404, 409: the pod is gone or another one has its name
                self.dirty = refused.code >= 500 or refused.code == 429


class _Unpullable(Exception):
    """There is no such image."""


def _code(state: Json) -> int:
    return int(state["terminated"]["exitCode"])


class Node:
    """A node and its agent; all its processes end with it."""

    def __init__(
        self,
        api: KubeApi,
        name: str,
        subnet: str,
        machine: Machine,
        capacity: dict[str, str],
        labels: dict[str, str] | None = None,
        heartbeat_s: float = 1.0,
    ) -> None:
        self.api = api
        self.name = name
        self.machine = machine
        self.address = f"{subnet}.255"
        self.silent = False
        self._subnet = subnet
        self._capacity = capacity
        self._labels = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            **(labels or {}),
        }
        self._heartbeat_s = heartbeat_s
        self._pods: dict[str, PodRun] = {}
        self._next_address = 0
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=loop, name=f"{name} {loop.__name__}", daemon=True)
            for loop in (self._heartbeats, self._watch)
        ]

    def start(self) -> None:
        """Register with the API server and take pods."""
        meta = {"name": self.name, "labels": self._labels}
        self.api.request("POST", "/api/v1/nodes", {"metadata": meta})
        self._beat()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Kill all pods and stop; the API server is told nothing."""
        self._stop.set()
        self._abolish_all()

    # What happens to machines.

    def kill(self, pod_name: str, namespace: str = "default") -> None:
        """SIGKILL a pod's processes; the agent reports exit code 137."""
        self._run(pod_name, namespace)._kill_all()

    def oom_kill(self, pod_name: str, namespace: str = "default") -> None:
        """Kill a pod as if it had run out of memory: exit code 137, reason OOMKilled."""
        run = self._run(pod_name, namespace)
        for container in run.containers:
            container.called_out_of_memory = True
        run._kill_all()

    def evict(self, pod_name: str, namespace: str = "default") -> None:
        """End a pod as a node under pressure does: phase Failed, reason Evicted, the object stays."""
        run = self._run(pod_name, namespace)
        run.verdict = {"phase": "Failed", "reason": "Evicted", "message": _EVICTED}
        run.stop(float(run.pod["spec"].get("terminationGracePeriodSeconds", 30)))

    def silence(self) -> None:
        """Cut the agent off from the API server; pods run on. The node becomes NotReady."""
        self.silent = True

    def resume(self) -> None:
        """Undo `silence` or `crash`: heartbeats again, and all that was missed is caught up with."""
        self.silent = False
        self._beat()
        path, mine = "/api/v1/pods", f"spec.nodeName={self.name}"
        self._sync_all(self.api.request("GET", path, fieldSelector=mine)["items"])
        for run in self._runs():
            run.report()

    def crash(self) -> None:
        """Lose the machine: silent from now on, and every process is dead."""
        self.silent = True
        self._abolish_all()

    def drop(self) -> None:
        """Lose the machine and its Node object, as when a cloud takes it back."""
        self.crash()
        self._stop.set()
        self.api.request("DELETE", f"/api/v1/nodes/{self.name}")

    # What a test may ask.

    def pods(self) -> list[str]:
        """Names of the pods that have processes here, as NAMESPACE/NAME."""
        alive = [run.pod["metadata"] for run in self._runs() if run.is_alive()]
        return sorted(f"{meta['namespace']}/{meta['name']}" for meta in alive)

    def log(self, pod_name: str, namespace: str = "default", container: str | None = None) -> str:
        """What a container has written so far, over all restarts; the first one if none is named."""
        run = self._run(pod_name, namespace)
        found = [c for c in run.all_containers if c.name == container] or run.containers
        return found[0].log.read_text(errors="replace") if found[0].log.exists() else ""

    def given_env(self) -> dict[str, str]:
        """Environment that every container starts from: the image's, and where the API server is."""
        url = urllib3.util.parse_url(self.api.server)
        where = {"KUBERNETES_SERVICE_HOST": str(url.host), "KUBERNETES_SERVICE_PORT": str(url.port)}
        return self.machine.image_env | where

    def ended(self, run: PodRun) -> None:
        """Confirm the deletion of a pod whose processes have ended."""
        if run.deleting and not self.silent:
            self._confirm_deletion(run.pod)

    def _run(self, pod_name: str, namespace: str) -> PodRun:
        for run in self._runs():
            meta = run.pod["metadata"]
            if (meta["namespace"], meta["name"]) == (namespace, pod_name):
                return run
        wanted = f"{namespace}/{pod_name}"
        raise LookupError(f"pod {wanted} is not on node {self.name}, which has {self.pods()}")

    def _runs(self) -> list[PodRun]:
        with self._lock:
            return list(self._pods.values())

    def _abolish_all(self) -> None:
        with self._lock:
            runs = list(self._pods.values())
            self._pods.clear()
        for run in runs:
            run.abolish()
        for run in runs:
            run.join(10.0)
            shutil.rmtree(run.folder, ignore_errors=True)

    def _heartbeats(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            if self.silent:
                continue
            # The API server may be gone or overloaded: the next beat tries again.
            with contextlib.suppress(urllib3.exceptions.HTTPError, Refused):
                self._beat()
            for run in self._runs():
                if run.dirty:
                    run.report()

    def _beat(self) -> None:
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": _now_micro()}
        try:
            self.api.patch(f"{_LEASES}/{self.name}", {"spec": spec}, "application/merge-patch+json")
        except Refused as refused:
            if refused.code != 404:
                raise
            self.api.request("POST", _LEASES, {"metadata": {"name": self.name}, "spec": spec})
        self.api.patch(f"/api/v1/nodes/{self.name}/status", {"status": self._node_status()})

    def _node_status(self) -> Json:
        fine = {"MemoryPressure": "False", "DiskPressure": "False", "Ready": "True"}
        beat = _now()
        return {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "addresses": [{"type": "InternalIP", "address": self.address}],
            "conditions": [
                {"type": kind, "status": status, "reason": "Agent", "lastHeartbeatTime": beat}
                for kind, status in fine.items()
            ],
        }

    def _watch(self) -> None:
        mine = f"spec.nodeName={self.name}"
        for kind, found in self.api.follow("/api/v1/pods", self._stop, fieldSelector=mine):
            if self.silent:  # what is missed here `resume` catches up with
                continue
            if kind == "LISTED":
                self._sync_all(found["items"])
            elif kind == "DELETED":
                self._forget(found["metadata"]["uid"])
            else:
                self._sync(found)

    def _sync_all(self, pods: list[Json]) -> None:
        there = {pod["metadata"]["uid"] for pod in pods}
        for run in self._runs():
            if run.pod["metadata"]["uid"] not in there:
                self._forget(run.pod["metadata"]["uid"])
        for pod in pods:
            self._sync(pod)

    def _sync(self, pod: Json) -> None:
        """Bring one pod to the state that its object asks for."""
        meta = pod["metadata"]
        ending = "deletionTimestamp" in meta
        with self._lock:
            run = self._pods.get(meta["uid"])
            if run is None and not ending and pod["status"].get("phase") not in _ENDED:
                self._take(pod)
            elif run is None and ending:
                self._confirm_deletion(pod)
            elif run is not None and ending and not run.deleting:
                run.deleting = True
                if run.is_alive():
                    run.stop(float(meta.get("deletionGracePeriodSeconds", 30)))
                if not run.is_alive():  # it may have ended before it could see `deleting`
                    self._confirm_deletion(pod)

    def _take(self, pod: Json) -> None:
        if pod["status"].get("phase") == "Running" and pod["spec"]["restartPolicy"] == "Never":
            self._report_lost(pod)
            return
        run = PodRun(self, pod, self._new_address())
        self._pods[pod["metadata"]["uid"]] = run
        run.start()

    def _report_lost(self, pod: Json) -> None:
        """Say that a pod did not survive a crash of the node."""
        why = {"exitCode": 137, "reason": "ContainerStatusUnknown", "finishedAt": _now()}
        statuses: list[Any] = pod["status"].get("containerStatuses", [])
        lost = [
            s | {"ready": False, "started": False, "state": {"terminated": why}} for s in statuses
        ]
        body = {"status": {"phase": "Failed", "containerStatuses": lost}}
        self.api.patch(_path(pod) + "/status", body)

    def _forget(self, uid: str) -> None:
        with self._lock:
            run = self._pods.pop(uid, None)
        if run is not None:
            run.abolish()
            shutil.rmtree(run.memory, ignore_errors=True)

    def _confirm_deletion(self, pod: Json) -> None:
        now = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        # Gone already, or not reachable: deleted then by whoever asked, or at the next list.
        with contextlib.suppress(urllib3.exceptions.HTTPError, Refused):
            self.api.request("DELETE", _path(pod), now)

    def _new_address(self) -> str:
        taken = {run.address for run in self._pods.values()}
        for _ in range(254):
            self._next_address = self._next_address % 254 + 1
            address = f"{self._subnet}.{self._next_address}"
            if address not in taken:
                return address
        raise RuntimeError(f"node {self.name} has 254 pods; no address is left")
