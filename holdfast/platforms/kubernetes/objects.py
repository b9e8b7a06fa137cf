"""Makes the objects of a job: pods, service, secret, claim, disruption budget, gang.

All functions here are pure. What the user wrote stays as it is: labels, variables and fields are added
where there are none. Every object belongs to the job's resource (an owner reference), so that deleting
the resource deletes all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.messages.supply import Cordon, NodeWish, RequestId
from holdfast.platforms.kubernetes.spec import JobSpec, Json, trainer, variables

PREFIX = "holdfast.dev/"
JOB, ROLE, REQUEST, POSITION = (PREFIX + word for word in ("job", "role", "request", "position"))
OPENED, REQUEUES = PREFIX + "opened", PREFIX + "requeues"
"""Annotations: the numbers of nodes that the job was opened with; how often it was resumed."""
HOME = "/var/lib/holdfast"
TOKEN_KEY = "token"
GRACE_S = 90
"""For ranks to end and their newest snapshots to reach storage, where the template does not say."""
MIB = 1 << 20
_UNITS = {
    **{unit: 1 << (10 * power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1)},
    **{unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T", "P"), 1)},
}


class Owner(NamedTuple):
    """The resource that a job is described by."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Owner:
        meta = body["metadata"]
        return cls(body["apiVersion"], body["kind"], meta["namespace"], meta["name"], meta["uid"])

    @property
    def selector(self) -> str:
        """Label selector of the job's worker pods."""
        return f"{JOB}={self.name},{ROLE}=worker"

    def path(self, plural: str, name: str = "") -> str:
        """Path of an object of the core API in the job's namespace."""
        return _joined(f"/api/v1/namespaces/{self.namespace}/{plural}", name)

    def path_in(self, group: str, plural: str, name: str = "") -> str:
        """Path of an object of another API group."""
        return _joined(f"/apis/{group}/namespaces/{self.namespace}/{plural}", name)

    def owns(self, found: Mapping[str, Any]) -> bool:
        """Whether an object is this very resource's, not one of the same name before it."""
        owners = found["metadata"].get("ownerReferences") or ()
        return any(one["uid"] == self.uid for one in owners)


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if name else path


def coordinator_name(job: str) -> str:
    return f"{job}-coordinator"


def pod_name(job: str, request: RequestId) -> str:
    return f"{job}-{request}"


def address_of(owner: Owner, host: str) -> str:
    """The name by which pods of the job find each other; it outlives the pod behind it."""
    return f"{host}.{owner.name}.{owner.namespace}.svc"


# ---- pods ----


def worker_pod(
    owner: Owner, spec: JobSpec, wish: NodeWish, avoid: Sequence[Cordon], opened: str
) -> Json:
    """The pod of one request; `opened` are the numbers of nodes that the job was opened with."""
    pod = _pod(spec.template, "worker", owner, pod_name(owner.name, wish.id))
    pod["metadata"]["labels"] |= {REQUEST: wish.id, POSITION: str(wish.position)}
    body = pod["spec"]
    body["restartPolicy"] = "Never"
    body.setdefault("hostname", f"{owner.name}-{wish.position}")
    body.setdefault("subdomain", owner.name)
    body.setdefault("terminationGracePeriodSeconds", GRACE_S)
    if wish.priority:
        body.setdefault("priorityClassName", wish.priority)
    if spec.gang is not None:
        body.setdefault("schedulerName", spec.gang.scheduler)
        pod["metadata"]["annotations"].setdefault("scheduling.k8s.io/group-name", owner.name)
    if avoid:
        _avoid(body, [cordon.host for cordon in avoid])
    box = next(one for one in body["containers"] if one["name"] == trainer(spec)["name"])
    box.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    coordinator = address_of(owner, coordinator_name(owner.name))
    add_variables(
        box,
        {
            **job_variables(owner, spec, opened),
            "HOLDFAST_COORDINATOR": f"{coordinator}:{spec.coordinator.port}",
            "HOLDFAST_REQUEST": wish.id,
        },
        fields={"HOLDFAST_NODE_NAME": "spec.nodeName", "HOLDFAST_LOCAL_ADDR": "status.podIP"},
        secret=owner.name,
    )
    if wish.memory_mib:
        _give_memory(box, wish.memory_mib)
    return pod


def coordinator_pod(owner: Owner, spec: JobSpec, opened: str, requeues: int) -> Json:
    """The pod of a job's coordinator. It is restarted in place when it crashes, and ends with 0 when
    the job is over, however that ended: its termination message says it."""
    name = coordinator_name(owner.name)
    pod = _pod(spec.coordinator.template, "coordinator", owner, name)
    pod["metadata"]["annotations"][REQUEUES] = str(requeues)
    body = pod["spec"]
    body["restartPolicy"] = "OnFailure"
    body |= {"hostname": name, "subdomain": owner.name}
    body.setdefault("terminationGracePeriodSeconds", 1)
    boxes = body.setdefault("containers", [{}])
    box = boxes[0]
    worker = trainer(spec)
    box.setdefault("name", "coordinator")
    for key in ("image", "imagePullPolicy"):
        if key in worker:
            box.setdefault(key, worker[key])
    if "imagePullSecrets" in spec.template["spec"]:
        body.setdefault("imagePullSecrets", spec.template["spec"]["imagePullSecrets"])
    box.setdefault("resources", {"requests": {"cpu": "250m", "memory": "256Mi"}})
    box.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    box.setdefault("command", ["holdfast"])
    message = box.get("terminationMessagePath", "/dev/termination-log")
    box["args"] = [
        "coordinator",
        f"--job={owner.name}",
        f"--listen=[$(HOLDFAST_LOCAL_ADDR)]:{spec.coordinator.port}",
        f"--end-file={message}",
        f"--requeues={requeues}",
    ]
    add_variables(
        box,
        {**job_variables(owner, spec, opened), "HOLDFAST_HOME": f"{HOME}/{owner.uid}"},
        fields={"HOLDFAST_LOCAL_ADDR": "status.podIP"},
        secret=owner.name,
    )
    box.setdefault("volumeMounts", []).append({"name": "holdfast-journal", "mountPath": HOME})
    body.setdefault("volumes", []).append(
        {"name": "holdfast-journal", **journal_volume(owner, spec)}
    )
    return pod


def _pod(template: Mapping[str, Any], role: str, owner: Owner, name: str) -> Json:
    """A pod as a template has it, with the job's labels and owner."""
    pod = copy.deepcopy(dict(template))
    meta = pod.get("metadata") or {}
    labels = {JOB: owner.name, ROLE: role}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": {**(meta.get("labels") or {}), **labels},
            "annotations": dict(meta.get("annotations") or {}),
            "ownerReferences": [_reference(owner, controller=True)],
        },
        "spec": pod.get("spec") or {},
    }


def _reference(owner: Owner, controller: bool = False) -> Json:
    return {
        "apiVersion": owner.api_version,
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.uid,
        **({"controller": True} if controller else {}),
    }


def job_variables(owner: Owner, spec: JobSpec, opened: str) -> dict[str, str]:
    """The job's terms, as variables that its coordinator and its nodes have alike."""
    nnodes, _, spares = opened.partition("+")
    memory_mib = memory_of(trainer(spec))
    memory = {"HOLDFAST_MEMORY": f"{memory_mib}M"} if memory_mib else {}
    if memory_mib > 65_536:
        memory["HOLDFAST_MEMORY_LIMIT"] = f"{memory_mib}M"
    return {
        **memory,
        **variables(spec),
        "HOLDFAST_JOB": owner.name,
        "HOLDFAST_NNODES": nnodes,
        "HOLDFAST_SPARES": spares or "0",
    }


def add_variables(
    box: Json, values: Mapping[str, str], fields: Mapping[str, str], secret: str
) -> None:
    """Add environment variables to a container, before its own, which win."""
    own = list(box.get("env") or ())
    names = {one["name"] for one in own}
    added: list[Json] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    added += [{"name": name, "value": value} for name, value in values.items()]
    token = {"secretKeyRef": {"name": secret, "key": TOKEN_KEY}}
    added.append({"name": "HOLDFAST_TOKEN", "valueFrom": token})
    box["env"] = [one for one in added if one["name"] not in names] + own


def _give_memory(box: Json, memory_mib: int) -> None:
    """Give a container so much memory; what it asks of other things stays."""
    resources = copy.deepcopy(box.get("resources") or {})
    for kind in ("requests", "limits"):
        resources.setdefault(kind, {})["memory"] = f"{memory_mib}Mi"
    box["resources"] = resources


def memory_of(box: Mapping[str, Any]) -> int:
    """Memory limit of a container in MiB; 0 if it has none."""
    limits = (box.get("resources") or {}).get("limits") or {}
    return int(quantity(str(limits["memory"])) // MIB) if "memory" in limits else 0


def quantity(text: str) -> float:
    """Value of a quantity, such as 500m, 2Gi or 1."""
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return float(text[: -len(unit)]) * float(factor)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _avoid(body: Json, hosts: Iterable[str]) -> None:
    """Keep a pod off these nodes, whatever else its affinity asks for."""
    barred = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in hosts]
    affinity = body.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in required.setdefault("nodeSelectorTerms", []) or [{}]:
        term["matchFields"] = [*term.get("matchFields", ()), *barred]
        if term not in required["nodeSelectorTerms"]:
            required["nodeSelectorTerms"].append(term)


# ---- the others ----


def _object(owner: Owner, api_version: str, kind: str, name: str, **more: Any) -> Json:
    meta = {
        "name": name,
        "namespace": owner.namespace,
        "labels": {JOB: owner.name},
        "ownerReferences": [_reference(owner)],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **more}


def service(owner: Owner, spec: JobSpec) -> Json:
    """The headless service that gives pods their names."""
    body = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB: owner.name},
        "ports": [{"name": "coordinator", "port": spec.coordinator.port}],
    }
    return _object(owner, "v1", "Service", owner.name, spec=body)


def secret(owner: Owner, spec: JobSpec, token: str) -> Json:
    """The job's token, and what it was opened with."""
    made = _object(owner, "v1", "Secret", owner.name, stringData={TOKEN_KEY: token}, type="Opaque")
    made["metadata"]["annotations"] = {OPENED: spec.scale}
    return made


def journal_claim(owner: Owner, spec: JobSpec) -> Json | None:
    """The claim for the journal's volume; None if the user gives a volume."""
    journal = spec.coordinator.journal
    if journal.volume is not None:
        return None
    body: Json = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": journal.size}},
    }
    if journal.storage_class_name is not None:
        body["storageClassName"] = journal.storage_class_name
    name = coordinator_name(owner.name)
    return _object(owner, "v1", "PersistentVolumeClaim", name, spec=body)


def journal_volume(owner: Owner, spec: JobSpec) -> Json:
    given = spec.coordinator.journal.volume
    return given or {"persistentVolumeClaim": {"claimName": coordinator_name(owner.name)}}


def disruption_budget(owner: Owner, spec: JobSpec, version: str) -> Json | None:
    """How many workers a drain must leave; `version` is v1 or v1beta1, as the server has it."""
    if spec.budget < 1:
        return None
    body = {
        "minAvailable": spec.budget,
        "selector": {"matchLabels": {JOB: owner.name, ROLE: "worker"}},
    }
    return _object(owner, f"policy/{version}", "PodDisruptionBudget", owner.name, spec=body)


def pod_group(owner: Owner, spec: JobSpec) -> Json | None:
    """The gang of a job's workers, for Volcano."""
    if spec.gang is None:
        return None
    body: Json = {"minMember": spec.gang.min_member or spec.nodes.min}
    if spec.gang.queue:
        body["queue"] = spec.gang.queue
    return _object(owner, "scheduling.volcano.sh/v1beta1", "PodGroup", owner.name, spec=body)


def event(owner: Owner, kind: str, reason: str, message: str, at: str) -> Json:
    """An event on the job's resource, as `kubectl describe` shows it."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{owner.name}.", "namespace": owner.namespace},
        "involvedObject": {
            "apiVersion": owner.api_version,
            "kind": owner.kind,
            "name": owner.name,
            "namespace": owner.namespace,
            "uid": owner.uid,
        },
        "type": kind,
        "reason": reason,
        "message": message[:1000],
        "source": {"component": "holdfast"},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
