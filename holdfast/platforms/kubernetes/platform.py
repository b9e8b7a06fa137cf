"""The platform of one job: its requests are pods.

Request "3-2" of job llm is the pod llm-3-2. The API server lets a name be taken once, so a request that
two suppliers make is made once, and one that exists is left alone. `changed` returns when the watch of
the operator has seen one of the job's pods; nothing depends on that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from holdfast.errors import ApiRefused, PlatformError
from holdfast.messages.supply import Cordon, NodeWish, RequestId, Sighting
from holdfast.platforms.kubernetes import pods
from holdfast.platforms.kubernetes.client import KubeApi
from holdfast.platforms.kubernetes.objects import POSITION, REQUEST, Owner, pod_name, worker_pod
from holdfast.platforms.kubernetes.spec import JobSpec, Json, trainer

MOST_LOST = 0.55
"""If more than this share of a job's pods are on nodes that are said to be NotReady, it is not
believed: then the control plane has lost sight of nodes that train on. Kubernetes stops its evictions
likewise."""


class KubernetesPlatform:
    """The pods of one job."""

    name = "kubernetes"

    def __init__(
        self, api: KubeApi, owner: Owner, spec: Callable[[], JobSpec], opened: Callable[[], str]
    ) -> None:
        """`spec` is the job's newest; `opened` the numbers of nodes that it was opened with."""
        self._api, self._owner, self._spec, self._opened = api, owner, spec, opened
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Say that something may have changed."""
        self._changed.set()

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def list(self) -> Sequence[Sighting]:
        container = trainer(self._spec())["name"]
        found = await self.list_pods()
        lost = [pod for pod in found if pods.node_is_lost(pod)]
        alive = [pod for pod in found if (pod.get("status") or {}).get("phase") == "Running"]
        believed = len(lost) <= MOST_LOST * len(alive)
        return [pods.sighting(pod if believed else _unmarked(pod), container) for pod in found]

    async def list_pods(self) -> Sequence[Json]:
        """All worker pods of this very job."""
        listed = await self._api.request(
            "GET", self._owner.path("pods"), labelSelector=self._owner.selector
        )
        return [
            pod
            for pod in listed["items"]
            if self._owner.owns(pod) and REQUEST in pod["metadata"]["labels"]
        ]

    async def ask(self, wishes: Sequence[NodeWish], avoid: Sequence[Cordon]) -> None:
        made = await asyncio.gather(
            *(self._create(wish, avoid) for wish in wishes), return_exceptions=True
        )
        await self._tidy(wishes)
        _raise_first(wishes, made)

    async def _create(self, wish: NodeWish, avoid: Sequence[Cordon]) -> None:
        owner = self._owner
        pod = worker_pod(owner, self._spec(), wish, avoid, self._opened())
        try:
            await self._api.request("POST", owner.path("pods"), pod)
        except ApiRefused as refused:
            if refused.reason != "AlreadyExists":
                raise
            await self._check_own(wish.id)

    async def _check_own(self, request: RequestId) -> None:
        """Refuse a pod of the same name that is not this job's."""
        name = pod_name(self._owner.name, request)
        try:
            found = await self._api.request("GET", self._owner.path("pods", name))
        except ApiRefused as refused:
            if refused.code != 404:
                raise
            raise PlatformError(f"pod {name} went away just now; asking again") from None
        if not self._owner.owns(found):
            raise PlatformError(
                f"there is a pod {name} that is not this job's; delete it, or rename the job"
            )

    async def _tidy(self, wishes: Sequence[NodeWish]) -> None:
        """Delete pods that are over and were replaced; the newest of each position has the logs."""
        attempts = {wish.position: wish.attempt for wish in wishes if wish.attempt > 2}
        if not attempts:
            return
        old = []
        for pod in await self.list_pods():
            labels, phase = pod["metadata"]["labels"], (pod.get("status") or {}).get("phase")
            attempt = int(labels[REQUEST].rpartition("-")[2])
            over = phase in ("Succeeded", "Failed")
            if over and attempt < attempts.get(int(labels[POSITION]), 0) - 1:
                old.append(labels[REQUEST])
        await self.release(old)

    async def release(self, requests: Sequence[RequestId]) -> None:
        deleted = await asyncio.gather(
            *(self._delete(request) for request in requests), return_exceptions=True
        )
        for error in deleted:
            if isinstance(error, BaseException):
                raise error

    async def _delete(self, request: RequestId) -> None:
        name = pod_name(self._owner.name, request)
        try:
            await self._api.request("DELETE", self._owner.path("pods", name))
        except ApiRefused as refused:
            if refused.code != 404:
                raise


def _unmarked(pod: Json) -> Json:
    """A pod as it would be if its node were Ready."""
    if not pods.node_is_lost(pod):
        return pod
    status = pod["status"]
    conditions = [one for one in status["conditions"] if one["type"] != "Ready"]
    return {**pod, "status": {**status, "conditions": conditions}}


def _raise_first(wishes: Sequence[NodeWish], made: Sequence[object]) -> None:
    """Raise what went wrong, with the requests that are concerned; what is invalid, for good."""
    failed = [(w.id, e) for w, e in zip(wishes, made, strict=True) if isinstance(e, BaseException)]
    if not failed:
        return
    _, first = failed[0]
    if not isinstance(first, PlatformError):
        raise first
    for_good = isinstance(first, ApiRefused) and first.code in (400, 422)
    requests = tuple(request for request, error in failed if str(error) == str(first) or for_good)
    raise PlatformError(str(first), requests, for_good=for_good)
