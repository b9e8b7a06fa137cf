"""A fake API server: objects in dictionaries, pods that run nothing, and all that real ones do wrong.

`FakeApi` is what `KubeClient` is, for tests that need no cluster; what the real server answers is
tested in tests/engines. `FakeCluster` is an engine for the chaos harness: the platform of one job on
this server, and faults of pods, nodes, requests and watches.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from holdfast.errors import ApiRefused, PlatformError
from holdfast.messages.supply import RequestId
from holdfast.platforms.kubernetes.objects import REQUEST, Owner
from holdfast.platforms.kubernetes.platform import KubernetesPlatform
from holdfast.platforms.kubernetes.spec import read_spec

Json = dict[str, Any]

NOW = "2026-01-01T00:00:00Z"
OWNER = Owner("holdfast.dev/v1alpha1", "HoldfastJob", "space", "llm", "uid-of-llm")
SPEC: Json = {
    "nodes": {"min": 1, "max": 3},
    "template": {"spec": {"containers": [{"name": "train", "image": "mine"}]}},
}
DROPPED = 0.2
"""Share of a watch's events that get lost when it loses some."""


class FakeApi:
    """Objects by the path of their collection and their name."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Json]] = {}
        self.requests: list[tuple[str, str]] = []
        self.missing: set[str] = set()
        """Collections that the server does not have."""
        self.seen: Callable[[Json], None] = lambda _: None
        self._uids = itertools.count(1)

    async def request(
        self, method: str, path: str, body: Json | None = None, content: str = "", **query: str
    ) -> Json:
        self.requests.append((method, path))
        collection, name, sub = _parts(path)
        if collection in self.missing:
            raise ApiRefused("the server has no such resource", 404, "NotFound")
        if method == "POST":
            assert body is not None
            return self._create(collection, copy.deepcopy(body))
        if not name:
            return {"items": self._list(collection, query.get("labelSelector", ""))}
        found = self.objects.get(collection, {}).get(name)
        if found is None:
            raise ApiRefused(f"{name} not found", 404, "NotFound")
        if method == "PATCH":
            assert body is not None
            _merge(found, {"status": body["status"]} if sub == "status" else body)
            self.seen(found)
        elif method == "DELETE":
            self._delete(collection, name, found, query.get("gracePeriodSeconds") == "0")
        return copy.deepcopy(found)

    def _create(self, collection: str, body: Json) -> Json:
        meta, kept = body["metadata"], self.objects.setdefault(collection, {})
        number = next(self._uids)
        meta.setdefault("name", f"{meta.get('generateName', '')}{number}")
        if meta["name"] in kept:
            raise ApiRefused(f"{meta['name']} already exists", 409, "AlreadyExists")
        meta |= {"uid": f"uid-{number}", "creationTimestamp": NOW}
        if "stringData" in body:
            data = body.pop("stringData")
            body["data"] = {k: base64.b64encode(v.encode()).decode() for k, v in data.items()}
        if body["kind"] == "Pod":
            body.setdefault("status", {"phase": "Pending"})
        kept[meta["name"]] = body
        self.seen(body)
        return copy.deepcopy(body)

    def _list(self, collection: str, selector: str) -> list[Json]:
        wanted = dict(word.split("=") for word in selector.split(",") if word)
        found = self.objects.get(collection, {}).values()
        return [
            copy.deepcopy(one)
            for one in found
            if wanted.items() <= (one["metadata"].get("labels") or {}).items()
        ]

    def _delete(self, collection: str, name: str, found: Json, at_once: bool) -> None:
        runs = (found.get("status") or {}).get("phase") == "Running"
        if runs and not at_once:
            found["metadata"]["deletionTimestamp"] = NOW
        else:
            del self.objects[collection][name]
        self.seen(found)

    def watch(
        self, path: str, selector: str, seen: Callable[[Json], None], broken: Callable[[], None]
    ) -> None:
        self.seen = seen

    # ---- what kubelets and controllers do ----

    def pods(self, namespace: str = OWNER.namespace) -> dict[str, Json]:
        return self.objects.setdefault(f"/api/v1/namespaces/{namespace}/pods", {})

    def run(self, pod: Json, node: str = "n1", address: str = "10.0.0.1") -> None:
        """Have a pod run on a node."""
        pod["spec"]["nodeName"] = node
        boxes = [
            {"name": box["name"], "state": {"running": {}}} for box in pod["spec"]["containers"]
        ]
        ready = [{"type": word, "status": "True"} for word in ("Ready", "ContainersReady")]
        pod["status"] = {
            "phase": "Running",
            "podIP": address,
            "containerStatuses": boxes,
            "conditions": ready,
        }
        self.seen(pod)

    def end(self, pod: Json, code: int, reason: str = "Error", message: str = "") -> None:
        """Have all containers of a pod end."""
        ended = {"exitCode": code, "reason": reason, "message": message}
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        pod["status"]["containerStatuses"] = [
            {"name": box["name"], "state": {"terminated": ended}}
            for box in pod["spec"]["containers"]
        ]
        self.seen(pod)

    def fail(self, pod: Json, reason: str) -> None:
        """Have a pod fail as a whole: evicted, preempted, ..."""
        pod["status"] = {"phase": "Failed", "reason": reason, "message": "said the kubelet"}
        self.seen(pod)

    def mark(self, pod: Json, ready: bool) -> None:
        """Have the node controller take the condition Ready away, or the kubelet give it back."""
        for one in pod["status"].get("conditions", ()):
            if one["type"] == "Ready":
                one["status"] = str(ready)
        self.seen(pod)


def _parts(path: str) -> tuple[str, str, str]:
    """Collection, name and subresource that a path names."""
    words = path.strip("/").split("/")
    head = 2 if words[0] == "api" else 3
    head += 2 if words[head : head + 1] == ["namespaces"] else 0
    name, sub = [*words[head + 1 :], "", ""][:2]
    return "/" + "/".join(words[: head + 1]), name, sub


def _merge(into: Json, change: Mapping[str, Any]) -> None:
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


class FaultyApi(FakeApi):
    """A server whose answers get lost, come late, or say no."""

    def __init__(self) -> None:
        super().__init__()
        self.calm()

    def calm(self) -> None:
        self.down = self.lossy = False
        self.forbidden = 0
        self.delay_s = 0.0

    async def request(
        self, method: str, path: str, body: Json | None = None, content: str = "", **query: str
    ) -> Json:
        await asyncio.sleep(self.delay_s)
        if self.down:
            raise PlatformError("the API server cannot be reached")
        if self.forbidden and method == "POST":
            self.forbidden -= 1
            raise ApiRefused("exceeded quota", 403, "Forbidden")
        answer = await super().request(method, path, body, content, **query)
        if self.lossy and method != "GET":
            raise PlatformError("the connection was reset")
        return answer


class FakeCluster:
    """An engine for the chaos harness: the pods of one job."""

    def __init__(self) -> None:
        self.api = FaultyApi()
        self.api.seen = self._seen
        self.faults: Mapping[str, Callable[[Random], None]] = {
            "container ends": self._end_container,
            "pod fails": self._fail,
            "all evicted": self._evict_all,
            "pod deleted": self._delete,
            "pod vanishes": self._vanish,
            "node not ready": self._lose_node,
            "all nodes not ready": self._lose_all,
            "api down": lambda _: setattr(self.api, "down", True),
            "answers lost": lambda _: setattr(self.api, "lossy", True),
            "quota": lambda rng: setattr(self.api, "forbidden", rng.choice((1, 2, 5))),
            "slow": lambda rng: setattr(self.api, "delay_s", rng.choice((0.1, 2.0, 20.0))),
            "watch loses events": self._drop_events,
        }
        self._platform: KubernetesPlatform | None = None
        self._dropping: Random | None = None
        self._hosts = itertools.count(1)
        self.spec = read_spec("llm", SPEC)

    def open(self) -> KubernetesPlatform:
        self._platform = KubernetesPlatform(self.api, OWNER, lambda: self.spec, lambda: "1:3+1")
        return self._platform

    def _seen(self, pod: Json) -> None:
        if self._dropping is not None and self._dropping.random() < DROPPED:
            return
        if self._platform is not None:
            self._platform.wake()

    def nodes(self) -> Sequence[RequestId]:
        return [
            pod["metadata"]["labels"][REQUEST]
            for pod in self.api.pods().values()
            if pod["status"]["phase"] in ("Pending", "Running")
        ]

    def settle(self) -> None:
        self.api.calm()
        self._dropping = None
        for name, pod in list(self.api.pods().items()):
            if "deletionTimestamp" in pod["metadata"]:
                del self.api.pods()[name]
                self._seen(pod)
            elif pod["status"]["phase"] == "Pending":
                self.api.run(pod, node=f"host-{next(self._hosts)}")
            elif pod["status"]["phase"] == "Running":
                self.api.mark(pod, ready=True)

    # ---- faults ----

    def _running(self, rng: Random, most: int) -> list[Json]:
        found = [p for p in self.api.pods().values() if p["status"]["phase"] == "Running"]
        return rng.sample(found, min(len(found), most))

    def _end_container(self, rng: Random) -> None:
        for pod in self._running(rng, 1):
            code, reason = rng.choice(
                ((137, "OOMKilled"), (137, "Error"), (1, "Error"), (75, "Error"), (143, "Error"))
            )
            self.api.end(pod, code, reason)

    def _fail(self, rng: Random) -> None:
        for pod in self._running(rng, 1):
            self.api.fail(pod, rng.choice(("Evicted", "Preempting", "NodeShutdown", "OutOfcpu")))

    def _evict_all(self, rng: Random) -> None:
        for pod in self._running(rng, 100):
            self.api.fail(pod, "Evicted")

    def _delete(self, rng: Random) -> None:
        for pod in self._running(rng, 1):
            pod["metadata"]["deletionTimestamp"] = NOW
            self._seen(pod)

    def _vanish(self, rng: Random) -> None:
        for pod in self._running(rng, 2):
            del self.api.pods()[pod["metadata"]["name"]]
            self._seen(pod)

    def _lose_node(self, rng: Random) -> None:
        for pod in self._running(rng, 1):
            self.api.mark(pod, ready=False)

    def _lose_all(self, rng: Random) -> None:
        for pod in self._running(rng, 100):
            self.api.mark(pod, ready=False)

    def _drop_events(self, rng: Random) -> None:
        self._dropping = Random(rng.random())
