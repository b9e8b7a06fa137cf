"""The operator: one `JobRun` for each resource, woken by watches.

kopf watches the resources and keeps the process going; only its plain event handlers are used, so it
writes nothing into resources and holds none back from being deleted. Pods are watched here, with a
selector, because a cluster has many that are not ours.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Sequence
from typing import Any

from holdfast.errors import PlatformError, UsageError
from holdfast.platforms.kubernetes import crd, dlrover
from holdfast.platforms.kubernetes.client import MERGE, Json, KubeApi, KubeClient
from holdfast.platforms.kubernetes.dlrover import PlannedNodes
from holdfast.platforms.kubernetes.job import JobRun, now
from holdfast.platforms.kubernetes.kinds import HOLDFAST, Body, ElasticJobs, ResourceKind
from holdfast.platforms.kubernetes.objects import JOB, ROLE, Owner, event
from holdfast.tasks import BackgroundTasks

log = logging.getLogger("holdfast.operator")

Key = tuple[str, str]
"""Namespace and name of a job."""


class Jobs:
    """All jobs of an operator, each with its task."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._tasks = BackgroundTasks(lambda failure: None)  # It logs failures, and starts again.
        self._runs: dict[Key, tuple[JobRun, asyncio.Task[None]]] = {}

    def seen(self, kind: ResourceKind, body: Body, gone: bool) -> None:
        """Take in the newest state of a resource."""
        meta = body["metadata"]
        key = (meta["namespace"], meta["name"])
        run, _ = self._runs.get(key, (None, None))
        same = run is not None and run.owner.uid == meta["uid"]
        if gone or meta.get("deletionTimestamp"):
            if same:
                self._drop(key)
            return
        if run is not None and same:
            run.changed(body)
            return
        self._drop(key)
        made = JobRun(self._api, kind, body)
        self._runs[key] = made, self._tasks.keep(f"job {key[0]}/{key[1]}", made.run)

    def _drop(self, key: Key) -> None:
        _, task = self._runs.pop(key, (None, None))
        if task is not None:
            task.cancel()

    def pod_seen(self, pod: Json) -> None:
        """Wake the job that a pod belongs to."""
        labels = pod["metadata"].get("labels") or {}
        found = self._runs.get((pod["metadata"]["namespace"], labels.get(JOB, "")))
        if found is not None:
            found[0].pod_changed(labels.get(ROLE, ""))

    def plan_seen(self, namespace: str, job: str) -> bool:
        """Wake the job that a plan is for; False if there is none."""
        found = self._runs.get((namespace, job))
        if found is not None:
            found[0].pod_changed("coordinator")
        return found is not None

    def look_again(self) -> None:
        """Wake all jobs: changes may have been missed."""
        for run, _ in self._runs.values():
            run.pod_changed("")

    async def close(self) -> None:
        tasks = [task for _, task in self._runs.values()]
        for key in list(self._runs):
            self._drop(key)
        if tasks:
            await asyncio.wait(tasks)
        self._tasks.close()


RIGHTS: Sequence[tuple[str, str, str]] = (
    *((crd.GROUP, crd.PLURAL, verb) for verb in ("list", "watch")),
    (crd.GROUP, f"{crd.PLURAL}/status", "patch"),
    *(("", "pods", verb) for verb in ("get", "list", "watch", "create", "delete")),
    *(("", plural, verb) for plural in ("services", "secrets") for verb in ("get", "create")),
    *(("", "persistentvolumeclaims", verb) for verb in ("get", "create")),
    ("", "events", "create"),
    *(("policy", "poddisruptionbudgets", verb) for verb in ("get", "create", "patch", "delete")),
)
"""What the operator must be allowed to do: API group, resource, verb."""


async def check_rights(api: KubeApi, namespace: str) -> None:
    """Refuse to start without a right that will be needed; the message names all that are missing."""
    missing = []
    for group, resource, verb in RIGHTS:
        plural, _, sub = resource.partition("/")
        attributes = {"group": group, "resource": plural, "subresource": sub, "verb": verb}
        if namespace:
            attributes["namespace"] = namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = await api.request("POST", path, review)
        if not answer["status"].get("allowed"):
            missing.append(f"{verb} {resource}")
    if missing:
        where = f"in namespace {namespace}" if namespace else "in all namespaces"
        raise PlatformError(
            f"no permission {where} to {', '.join(missing)}; give these rights to the account that the"
            " operator runs as (deploy/kubernetes/rbac.yaml)"
        )


async def check_resource(api: KubeApi) -> None:
    """Refuse to start on a cluster that does not know our resource."""
    served = await api.request("GET", "/apis")
    if not any(group["name"] == crd.GROUP for group in served["groups"]):
        raise PlatformError(
            f"the API server does not know {crd.KIND}; kubectl apply -f deploy/kubernetes/crd.yaml"
        )


def run_operator(namespace: str, liveness: str | None, with_dlrover: bool) -> int:
    """Serve all jobs of a namespace (empty: of all) until the process is told to end."""
    try:
        import kopf
    except ImportError:
        raise UsageError(
            "the packages for Kubernetes are not installed; pip install 'holdfast[kubernetes]'"
        ) from None
    api = KubeClient()

    async def operate() -> None:
        await check_resource(api)
        await check_rights(api, namespace)
        jobs = Jobs(api)
        where = f"/namespaces/{namespace}" if namespace else ""
        api.watch(f"/api/v1{where}/pods", JOB, jobs.pod_seen, jobs.look_again)
        try:
            await kopf.operator(
                registry=_registry(kopf, api, jobs, with_dlrover),
                settings=_settings(kopf),
                standalone=True,
                clusterwide=not namespace,
                namespaces=[namespace] if namespace else (),
                liveness_endpoint=liveness,
            )
        finally:
            await jobs.close()

    asyncio.run(operate())
    return 0


def _settings(kopf: Any) -> Any:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.batching.batch_window = 0.02
    settings.batching.idle_timeout = 1.0
    return settings


def _registry(kopf: Any, api: KubeApi, jobs: Jobs, with_dlrover: bool) -> Any:
    """The handlers: all of them only tell the jobs."""
    registry = kopf.get_default_registry()  # It knows how to log in.

    async def job_seen(event: Any, body: Any, **_: Any) -> None:
        jobs.seen(HOLDFAST, _plain(body), event["type"] == "DELETED")

    kopf.on.event(crd.GROUP, crd.VERSION, crd.PLURAL, registry=registry)(job_seen)
    if with_dlrover:
        _register_dlrover(kopf, registry, api, jobs)
    return registry


def _register_dlrover(kopf: Any, registry: Any, api: KubeApi, jobs: Jobs) -> None:
    theirs = ElasticJobs()

    async def elastic_job_seen(event: Any, body: Any, **_: Any) -> None:
        jobs.seen(theirs.kind, _plain(body), event["type"] == "DELETED")

    async def scale_plan_seen(event: Any, body: Any, **_: Any) -> None:
        gone = event["type"] == "DELETED"
        plan = theirs.plan_seen(_plain(body), gone)
        namespace = body["metadata"]["namespace"]
        if jobs.plan_seen(namespace, plan.job) and not gone:
            await _finish_plan(api, _plain(body), plan)

    where = (dlrover.GROUP, dlrover.VERSION)
    kopf.on.event(*where, dlrover.JOBS, registry=registry)(elastic_job_seen)
    kopf.on.event(*where, dlrover.PLANS, registry=registry)(scale_plan_seen)


async def _finish_plan(api: KubeApi, body: Json, plan: PlannedNodes) -> None:
    """Say in a plan that it counts now, and what of it was left out; once."""
    if (body.get("status") or {}).get("phase") == "Succeeded":
        return
    owner = Owner.of(body)
    path = owner.path_in(f"{dlrover.GROUP}/{dlrover.VERSION}", dlrover.PLANS, owner.name)
    done = {"status": {"phase": "Succeeded", "finishTime": now()}}
    try:
        await api.request("PATCH", f"{path}/status", done, MERGE)
        if plan.warnings:
            posted = event(owner, "Warning", "LeftOut", "; ".join(plan.warnings), now())
            await api.request("POST", owner.path("events"), posted)
    except PlatformError as error:
        log.warning("%s", error)


def _plain(body: Any) -> Json:
    """A copy that nobody changes."""
    return copy.deepcopy(dict(body))
