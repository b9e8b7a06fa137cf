"""Starts a Kubernetes cluster on this machine: etcd, API server, controller manager, scheduler, nodes.

The binaries are real ones, made by `kubernetes_build.sh`; only the kubelets are ours (`kube_node`).

    with Cluster() as cluster:
        nodes = cluster.add_nodes(4, gpus=8)
        config.load_kube_config(str(cluster.kubeconfig))

Each cluster has its own ports, its own 127.C.0.0/16 for pods and its own temporary folder; all its
processes form one process group, and die with the process that started them. A cluster whose owner was
killed leaves its two folders and its cgroup behind, never a process.

What the author of an operator should know; seen on this server unless it says otherwise:

- It is 1.20.2. There is `policy/v1beta1`, not `policy/v1`. `suspend` and `completionMode` of a Job and
  `schedulingGates` of a pod are dropped without a word, so a pod with a gate is scheduled at once.
  By its age, CEL rules in a schema are unknown too (not tried).
- Suspending, as Kueue does, is therefore the operator's to honour: create no pods. A pod whose
  `schedulerName` nobody serves stays Pending, like one that a gang scheduler holds back.
- A node that falls silent is NotReady about `node_grace_s` (6 s) later, and `toleration_s` (2 s) after
  that its pods get a deletionTimestamp (seen after 8.7 s); by default it is 40 s and 300 s (not tried).
  Phase Running stays and the object too, until the node comes back or a client deletes it with
  gracePeriodSeconds=0. An operator must not wait for such a pod to go.
- The Endpoints API refuses 127.0.0.0/8, so no service has endpoints here; use pod addresses from the
  status, or HOSTNAME.SUBDOMAIN.NAMESPACE.svc (`kube_services`).
- Process 1 of a container ignores a SIGTERM it has no handler for, as on any cluster.
- /dev/shm in a pod is 64 MiB unless an emptyDir with `medium: Memory` is mounted there.
- 1, 8 and 16 threads created 279, 507 and 400 pods a second that no node ran, on two busy cores. With
  nodes that run them, in the same Python process: 32 a second, 300 pods done after 14 s.
- A pod created right after its namespace was accepted (tried once); `namespace` waits for the default
  service account all the same, since admission depends on it.
- `kubernetes` 37.0.2 wants python-dateutil 3, s3fs (botocore) one before 3: both together get 37.0.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import urllib3

from holdfast.kernel import PR_SET_PDEATHSIG, prctl

from .kube_api import Json, KubeApi, Refused
from .kube_node import Machine, Node
from .kube_services import keep_claims, keep_names, write_hosts

BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_CGROUP = Path("/sys/fs/cgroup/memory")
_PATIENCE_S = 90.0
_TREE = Path(__file__).parents[2]


def binaries() -> Path:
    """Folder with the built engine."""
    default = Path.home() / ".cache" / "holdfast-engines"
    return Path(os.environ.get("HOLDFAST_ENGINES") or default) / "kubernetes"


def missing() -> str | None:
    """Why no cluster can be started here, or None if one can."""
    if not (binaries() / "VERSION").exists():
        return "Kubernetes is not built: run tests/engines/kubernetes_build.sh as root"
    if os.geteuid() != 0:
        return "a Kubernetes cluster can only be started by root: pods need namespaces"
    return None


class Cluster:
    """A control plane and its nodes, from `with` to its end."""

    def __init__(
        self, node_grace_s: float = 6.0, toleration_s: int = 2, heartbeat_s: float = 1.5
    ) -> None:
        self._node_grace_s = node_grace_s
        self._toleration_s = toleration_s
        self._heartbeat_s = heartbeat_s
        self._stack = contextlib.ExitStack()
        self._group = 0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._tokens = {"admin": secrets.token_hex(16)}
        self.nodes: dict[str, Node] = {}

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            self._stack = stack
            self._make_folders()
            self._start_control_plane()
            self._start_services()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.show_logs()
        self._stack.close()

    # What tests use.

    def add_nodes(
        self, count: int, gpus: int = 0, labels: dict[str, str] | None = None, **more: str
    ) -> list[Node]:
        """Add nodes and wait until they are Ready; `more` are further capacities, e.g. memory="8Gi"."""
        added = [self._new_node(gpus, labels, more) for _ in range(count)]
        for node in added:
            node.start()
            self._stack.callback(node.close)
        names = {node.name for node in added}
        self.until(lambda: names <= self.ready_nodes(), f"nodes {sorted(names)} are Ready")
        return added

    def ready_nodes(self) -> set[str]:
        """Names of the nodes that are Ready and take pods (no taint of their condition is left)."""
        nodes = self.api.request("GET", "/api/v1/nodes")["items"]
        return {node["metadata"]["name"] for node in nodes if _is_ready(node)}

    def node_of(self, pod_name: str, namespace: str = "default") -> Node:
        """The node that a pod is bound to."""
        pod = self.api.request("GET", f"/api/v1/namespaces/{namespace}/pods/{pod_name}")
        return self.nodes[pod["spec"]["nodeName"]]

    def namespace(self, name: str) -> str:
        """Make a namespace that pods can be created in at once."""
        self.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        self.until(lambda: self._has_account(name), f"namespace {name} has a service account")
        return name

    def account_kubeconfig(self, name: str, namespace: str = "default") -> Path:
        """Make a kubeconfig of a service account: with the rights its roles give it, and no others."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        answer = self.api.request("POST", path, {"spec": {"expirationSeconds": 7200}})
        return self._write_kubeconfig(f"{namespace}-{name}", answer["status"]["token"])

    def until(self, true: Callable[[], bool], what: str, limit_s: float = _PATIENCE_S) -> None:
        """Wait until something is true; a process of the cluster that ends meanwhile is an error."""
        end = time.monotonic() + limit_s
        while not true():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(
                        f"{name} ended with {process.returncode}: {self._tail(name)}"
                    )
            if time.monotonic() > end:
                raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
            time.sleep(0.05)

    def stop_server(self) -> None:
        """Take the API server down; etcd keeps what it knew."""
        server = self._processes.pop("kube-apiserver")
        server.kill()
        server.wait()

    def start_server(self) -> None:
        """Bring the API server up (again)."""
        self._start_api_server()
        self.until(self._is_up, "the API server is ready")

    def show_logs(self) -> None:
        """Print the ends of all logs, for a test that failed."""
        for name in self._processes:
            print(f"--- {name}\n{self._tail(name)}", file=sys.stderr)

    # How it starts.

    def _make_folders(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-kube-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        # etcd syncs each write to disk, which takes longer than all the rest.
        self.memory = Path(tempfile.mkdtemp(prefix="holdfast-kube-", dir="/dev/shm"))
        self._stack.callback(shutil.rmtree, self.memory, ignore_errors=True)
        self._network = self._claim_network()
        self.ports = _free_ports(5)
        self._machine = Machine(
            folder=self.folder,
            memory=self.memory,
            hosts=self.folder / "hosts",
            cgroup=self._make_cgroup(),
            image_env={
                "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
                "PYTHONPATH": str(_TREE),
                "HOME": "/root",
            },
            absent_images=set(),
        )
        write_hosts(self._machine.hosts, [])
        self._make_certificates()
        self.kubeconfig = self._write_kubeconfig("admin", self._tokens["admin"])
        self.api = KubeApi(self.kubeconfig)

    @property
    def image_env(self) -> dict[str, str]:
        """Environment that every container starts with; a test may add to it."""
        return self._machine.image_env

    @property
    def absent_images(self) -> set[str]:
        """Names of images that cannot be pulled; a test may add to it."""
        return self._machine.absent_images

    def _claim_network(self) -> int:
        """Second number of this cluster's addresses; held by a socket, so no other cluster takes it."""
        for number in range(16, 250):
            claim = socket.socket()
            try:
                claim.bind((f"127.{number}.255.254", 10250))
            except OSError:
                claim.close()
                continue
            self._stack.callback(claim.close)
            return number
        raise RuntimeError("no 127.x network is free: 234 clusters seem to run on this machine")

    def _make_cgroup(self) -> Path | None:
        if not (_CGROUP / "memory.oom_control").exists():
            return None
        group = _CGROUP / self.folder.name
        group.mkdir()
        self._stack.callback(_remove_cgroup, group)
        return group

    def _make_certificates(self) -> None:
        def openssl(*words: str) -> None:
            subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)

        new = ("-newkey", "rsa:2048", "-nodes", "-subj")
        openssl("req", "-x509", *new, "/CN=holdfast-kube", "-keyout", "ca.key", "-out", "ca.pem",
                "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
        openssl("req", *new, "/CN=kube-apiserver", "-keyout", "server.key", "-out", "server.csr")
        extensions = "subjectAltName=IP:127.0.0.1,DNS:localhost\nauthorityKeyIdentifier=keyid\n"
        (self.folder / "server.ext").write_text(extensions)
        openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2",
                "-CAcreateserial", "-extfile", "server.ext", "-out", "server.pem")  # fmt: skip
        openssl("genrsa", "-out", "accounts.key", "2048")

    def _write_kubeconfig(self, user: str, token: str) -> Path:
        authority = str(self.folder / "ca.pem")
        server = f"https://127.0.0.1:{self.ports[1]}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "c", "cluster": {"server": server, "certificate-authority": authority}}
            ],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [
                {"name": "c", "context": {"cluster": "c", "user": user, "namespace": "default"}}
            ],
            "current-context": "c",
        }
        path = self.folder / f"{user}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=2))
        return path

    def _start_control_plane(self) -> None:
        self._stack.callback(self._kill_all)
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.ports[0], self.ports[4]))
        self._start(
            "etcd",
            f"--data-dir={self.memory}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        self._start_api_server()
        self.until(self._is_up, "the API server is ready")
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={self.folder}/accounts.key",
            f"--root-ca-file={self.folder}/ca.pem",
            f"--secure-port={self.ports[2]}",
            f"--node-monitor-grace-period={self._node_grace_s}s",
            "--node-monitor-period=500ms",
            "--node-eviction-rate=100",
            *_COMPONENT,
        )
        scheduler = ("--scheduler-name=default-scheduler", f"--secure-port={self.ports[3]}")
        self._start("kube-scheduler", f"--kubeconfig={self.kubeconfig}", *scheduler, *_COMPONENT)
        self.until(lambda: self._has_account("default"), "the controller manager works")
        self.until(lambda: _is_healthy(self.ports[3]), "the scheduler works")

    def _start_api_server(self) -> None:
        (self.folder / "tokens.csv").write_text(f"{self._tokens['admin']},admin,1,system:masters\n")
        wait_s = self._toleration_s
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.ports[0]}",
            f"--secure-port={self.ports[1]}",
            "--bind-address=127.0.0.1",
            f"--tls-cert-file={self.folder}/server.pem",
            f"--tls-private-key-file={self.folder}/server.key",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.folder}/accounts.key",
            f"--service-account-signing-key-file={self.folder}/accounts.key",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            f"--default-not-ready-toleration-seconds={wait_s}",
            f"--default-unreachable-toleration-seconds={wait_s}",
        )

    def _start(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [str(binaries() / name), *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=self._join_group,
            )
        self._group = self._group or process.pid
        self._processes[name] = process

    def _join_group(self) -> None:
        os.setpgid(0, self._group)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def _kill_all(self) -> None:
        self._stop.set()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _start_services(self) -> None:
        works = (
            (keep_names, self._machine.hosts),
            (keep_claims, self.folder / "claims"),
        )
        for work, place in works:
            args = (self.api, place, self._stop)
            threading.Thread(target=work, args=args, name=work.__name__, daemon=True).start()

    def _new_node(self, gpus: int, labels: dict[str, str] | None, more: dict[str, str]) -> Node:
        number = len(self.nodes) + 1
        capacity = {"cpu": "64", "memory": "256Gi", "pods": "250", **more}
        if gpus:
            capacity["nvidia.com/gpu"] = str(gpus)
        subnet = f"127.{self._network}.{number}"
        node = Node(
            self.api, f"n{number}", subnet, self._machine, capacity, labels, self._heartbeat_s
        )
        self.nodes[node.name] = node
        return node

    def _is_up(self) -> bool:
        try:
            return self.api.request("GET", "/readyz").get("text") == "ok"
        except (urllib3.exceptions.HTTPError, Refused):
            return False

    def _has_account(self, namespace: str) -> bool:
        account = self.api.find(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")
        return bool(account and account.get("secrets"))

    def _tail(self, name: str) -> str:
        return "\n".join((self.folder / f"{name}.log").read_text().splitlines()[-15:])


# The defaults of 20 to 50 requests a second would make 300 pods wait for half a minute.
_COMPONENT = (
    "--bind-address=127.0.0.1",
    "--port=0",
    "--cert-dir=certificates",
    "--leader-elect=false",
    "--kube-api-qps=500",
    "--kube-api-burst=1000",
)


def _is_ready(node: Json) -> bool:
    states = {c["type"]: c["status"] for c in node["status"].get("conditions", ())}
    return states.get("Ready") == "True" and not node["spec"].get("taints")


def _is_healthy(port: int) -> bool:
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    try:
        url = f"https://127.0.0.1:{port}/healthz"
        with urllib.request.urlopen(url, context=unverified, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _remove_cgroup(group: Path) -> None:
    end = time.monotonic() + 10.0
    for child in [*group.iterdir(), group]:
        while child.is_dir():
            try:
                child.rmdir()
            except OSError:  # busy until the kernel has reaped what was in it
                if time.monotonic() > end:
                    return
                time.sleep(0.02)
