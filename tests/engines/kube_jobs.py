"""Runs `holdfast operator` against a cluster for tests, and jobs whose pods train for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from e2e.harness import TRAINER

from holdfast.platforms.kubernetes import crd

from .kube_api import MERGE, Json
from .kubernetes import Cluster

JOBS = f"/apis/{crd.GROUP}/{crd.VERSION}"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def define(cluster: Cluster, definition: Json) -> None:
    """Teach the cluster a resource, if it does not know it, and wait until it is served."""
    name = definition["metadata"]["name"]
    if cluster.api.find(f"{CRDS}/{name}") is None:
        cluster.api.request("POST", CRDS, definition)
    spec = definition["spec"]
    path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
    cluster.until(lambda: cluster.api.find(path) is not None, f"{name} is served")


class Operator:
    """One `holdfast operator` for one namespace, as a process."""

    def __init__(self, cluster: Cluster, space: str, folder: Path, *flags: str) -> None:
        self.cluster, self.space, self.folder = cluster, space, folder
        self._flags = flags
        self.log = folder / "operator.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Operator:
        define(self.cluster, crd.definition())
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self, kubeconfig: Path | None = None) -> None:
        env = {**os.environ, "KUBECONFIG": str(kubeconfig or self.cluster.kubeconfig)}
        words = [sys.executable, "-m", "holdfast", "operator", "--namespace", self.space]
        words += self._flags
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(words, env=env, stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def until_ended(self) -> None:
        """Wait until the operator has ended by itself."""
        assert self._process is not None
        self._process.wait(60.0)
        self._process = None

    def _show(self) -> None:
        print(f"--- operator\n{self.log.read_text()[-8000:]}", file=sys.stderr)
        for pod in self.pods():
            name = pod["metadata"]["name"]
            print(f"--- {name}: {json.dumps(pod.get('status'))[:1500]}", file=sys.stderr)
            try:
                text = self.cluster.node_of(name, self.space).log(name, self.space)
                print(text[-3000:], file=sys.stderr)
            except Exception as wrong:  # Whatever it is, the other logs shall be shown.
                print(f"no log: {wrong}", file=sys.stderr)

    # ---- jobs ----

    def apply(self, name: str, spec: Json, **meta: Any) -> Json:
        body = {
            "apiVersion": f"{crd.GROUP}/{crd.VERSION}",
            "kind": crd.KIND,
            "metadata": {"name": name, **meta},
            "spec": spec,
        }
        return self.cluster.api.request("POST", self.path(), body)

    def path(self, name: str = "") -> str:
        path = f"{JOBS}/namespaces/{self.space}/{crd.PLURAL}"
        return f"{path}/{name}" if name else path

    def change(self, name: str, **spec: Any) -> None:
        self.cluster.api.patch(self.path(name), {"spec": spec}, MERGE)

    def status(self, name: str) -> Json:
        found: Json = self.cluster.api.request("GET", self.path(name)).get("status") or {}
        return found

    def condition(self, name: str, type: str) -> Json:
        found: list[Json] = self.status(name).get("conditions") or []
        return next((one for one in found if one["type"] == type), {})

    def pods(self) -> list[Json]:
        path = f"/api/v1/namespaces/{self.space}/pods"
        found: list[Json] = self.cluster.api.request("GET", path)["items"]
        return found

    def names(self) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.pods()}

    def pod(self, name: str) -> Json | None:
        return self.cluster.api.find(f"/api/v1/namespaces/{self.space}/pods/{name}")

    def until(self, true: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
        def holds() -> bool:
            assert self._process is None or self._process.poll() is None, self.log.read_text()
            return bool(true())

        try:
            self.cluster.until(holds, what, limit_s)
        except BaseException:
            self._show()
            raise

    def until_phase(self, name: str, phase: str) -> Json:
        self.until(lambda: self.status(name).get("phase") == phase, f"{name} is {phase}")
        return self.status(name)

    def until_step(self, name: str, more: int = 1) -> int:
        """Wait until the job has made so many more steps; the step that it is at."""
        before = int(self.status(name).get("step", 0))
        self.until(lambda: self.status(name).get("step", 0) >= before + more, f"{more} steps")
        return int(self.status(name)["step"])


def training(folder: Path, min: int = 2, max: int = 2, steps: str = "", **more: Any) -> Json:
    """The spec of a job that trains without torch, in a folder of this machine."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    blocked = work / "blocked"
    blocked.mkdir(exist_ok=True)
    (blocked / "torch.py").write_text("raise ImportError('this test goes without torch')\n")
    (work / "train.py").write_text(textwrap.dedent(TRAINER))
    paths = [str(blocked), str(Path(__file__).parents[2])]
    box = {
        "name": "train",
        "image": "none",
        "command": ["holdfast", "run", "--nproc-per-node=1", "train.py", *steps.split()],
        "workingDir": "/train",
        "env": [{"name": "PYTHONPATH", "value": os.pathsep.join(paths)}],
        "volumeMounts": [{"name": "work", "mountPath": "/train"}],
    }
    pod = {"containers": [box], "volumes": [{"name": "work", "hostPath": {"path": str(work)}}]}
    return {"nodes": {"min": min, "max": max}, "template": {"spec": pod}, **more}


def finish(folder: Path) -> None:
    """Let the trainer come to its end."""
    (folder / "work" / "end").touch()
