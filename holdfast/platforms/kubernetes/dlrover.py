"""DLRover's resources in terms of ours: `ElasticJob` and `ScalePlan` of elastic.iml.github.io/v1alpha1.

Both are converted by pure functions; the operator then treats an ElasticJob as a HoldfastJob. `FIELDS`
has one row for each field of theirs and says what becomes of it; docs/kubernetes.md shows the same
table, and a test compares them. A field that is not in the table, or has no effect here, is named in a
warning on the resource. What would change the training (roles that do not exist here) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from holdfast.errors import UsageError
from holdfast.platforms.kubernetes.spec import Json
from holdfast.platforms.kubernetes.status import JobStatus

GROUP, VERSION = "elastic.iml.github.io", "v1alpha1"
JOBS, PLANS = "elasticjobs", "scaleplans"

WORKER, MASTER = "worker", "dlrover-master"
_ROLES_NOT_HERE: Final = ("ps", "chief", "evaluator")
_ALLREDUCE: Final = ("", "AllreduceStrategy")
_FLAGS: Final = {
    "--network-check": "--node-check",
    "--network_check": "--node-check",
    "--exclude-straggler": "--exclude-stragglers",
    "--exclude_straggler": "--exclude-stragglers",
}
"""Flags of dlrover-run that are spelt otherwise here."""
_FLAGS_WITHOUT_EFFECT: Final = (
    *("--auto-config", "--auto_config", "--auto-tunning", "--auto_tunning"),
    *("--save-at-breakpoint", "--save_at_breakpoint", "--comm-perf-test", "--comm_perf_test"),
)

FIELDS: Final[Mapping[str, str]] = {
    "ElasticJob.spec.distributionStrategy": "AllreduceStrategy only; any other is refused",
    "ElasticJob.spec.resourceLimits.memory": "the setting memory-limit",
    "ElasticJob.spec.resourceLimits.cpu": "no effect, and a warning",
    "ElasticJob.spec.resourceLimits.gpu": "no effect, and a warning",
    "ElasticJob.spec.optimizeMode": "manual; any other has no effect, and a warning",
    "ElasticJob.spec.brainService": "no effect, and a warning",
    "ElasticJob.spec.envs": "variables of the training container, where it has none of that name",
    "ElasticJob.spec.suspend": "suspend",
    "ElasticJob.spec.replicaSpecs.worker.replicas": "nodes.max; nodes.min too, unless --nnodes of the "
    "command names a smaller one",
    "ElasticJob.spec.replicaSpecs.worker.template": "template; `dlrover-run` becomes `holdfast run`",
    "ElasticJob.spec.replicaSpecs.worker.restartPolicy": "Never; any other has no effect, "
    "and a warning",
    "ElasticJob.spec.replicaSpecs.worker.restartCount": "the setting relaunches",
    "ElasticJob.spec.replicaSpecs.worker.autoScale": "no effect, and a warning if true",
    "ElasticJob.spec.replicaSpecs.worker.restartTimeout": "the setting pending-limit; 0 has no effect",
    "ElasticJob.spec.replicaSpecs.worker.criticalNodes": "the setting critical",
    "ElasticJob.spec.replicaSpecs.worker.priority": "the setting priority",
    "ElasticJob.spec.replicaSpecs.worker.BatchScheduler": "gang: volcano; any other is refused",
    "ElasticJob.spec.replicaSpecs.dlrover-master": "where the coordinator's pod may run, and its "
    "resources; image and command are ours, with a warning",
    "ElasticJob.spec.replicaSpecs.ps": "refused: there are no parameter servers",
    "ElasticJob.spec.replicaSpecs.chief": "refused",
    "ElasticJob.spec.replicaSpecs.evaluator": "refused",
    "ElasticJob.status.phase": "Pending, Running, Suspended, Succeeded, Failed",
    "ElasticJob.status.conditions": "the conditions of a HoldfastJob",
    "ElasticJob.status.replicaStatuses": "worker.active: nodes that are in the job",
    "ScalePlan.spec.ownerJob": "the job; a plan for one that is not there has no effect",
    "ScalePlan.spec.replicaResourceSpecs.worker.replicas": "nodes.max, and nodes.min if that is larger",
    "ScalePlan.spec.replicaResourceSpecs.worker.resource": "no effect, and a warning",
    "ScalePlan.spec.createPods": "no effect, and a warning: numbers of nodes decide",
    "ScalePlan.spec.removePods": "no effect, and a warning: numbers of nodes decide",
    "ScalePlan.spec.migratePods": "no effect, and a warning: a node that is lost is replaced",
    "ScalePlan.spec.psHosts": "no effect, and a warning",
    "ScalePlan.status.phase": "Succeeded once it counts",
    "ScalePlan.status.finishTime": "when that was",
}


class Converted(NamedTuple):
    """A spec of ours, and one sentence for each thing that was left out."""

    spec: Json
    warnings: tuple[str, ...]


class PlannedNodes(NamedTuple):
    """What a ScalePlan asks for."""

    job: str
    nodes: int | None
    warnings: tuple[str, ...]


def convert_job(given: Mapping[str, Any]) -> Converted:
    """Convert the spec of an ElasticJob; UsageError if it could not train as it says."""
    warnings = list(_unknown("ElasticJob.spec", given, ("replicaSpecs", "resourceLimits")))
    _check_strategy(given)
    roles = given.get("replicaSpecs") or {}
    worker = roles.get(WORKER)
    if not isinstance(worker, Mapping) or not worker.get("template"):
        raise UsageError(
            "spec.replicaSpecs.worker: has no template; give one, with the container that trains"
        )
    warnings += _unknown("ElasticJob.spec.replicaSpecs.worker", worker)
    spec = _nodes_and_template(worker, given.get("envs") or ())
    spec["suspend"] = bool(given.get("suspend", False))
    settings = _settings(worker, given.get("resourceLimits") or {}, warnings)
    if settings:
        spec["settings"] = settings
    if worker.get("BatchScheduler"):
        spec["gang"] = _gang(worker["BatchScheduler"])
    master = roles.get(MASTER)
    if isinstance(master, Mapping) and master.get("template"):
        spec["coordinator"] = {"template": _master(master["template"], warnings)}
    warnings += _of_roles(roles)
    warnings += _without_effect(given, worker)
    return Converted(spec, tuple(warnings))


def _check_strategy(given: Mapping[str, Any]) -> None:
    strategy = str(given.get("distributionStrategy") or "")
    if strategy not in _ALLREDUCE:
        raise UsageError(
            f"spec.distributionStrategy {strategy}: only AllreduceStrategy exists here; change it, or "
            "run this job with DLRover"
        )
    for role in _ROLES_NOT_HERE:
        if (given.get("replicaSpecs") or {}).get(role, {}).get("replicas", 0):
            raise UsageError(
                f"spec.replicaSpecs.{role}: there is no such role here; take it out, or run this job "
                "with DLRover"
            )


def _nodes_and_template(worker: Mapping[str, Any], envs: Any) -> Json:
    replicas = int(worker.get("replicas", 1))
    template, asked = _template(worker["template"], list(envs))
    fewest = min(asked or replicas, replicas)
    return {"nodes": {"min": fewest, "max": replicas}, "template": template}


def _template(template: Mapping[str, Any], envs: list[Json]) -> tuple[Json, int | None]:
    """The template with our command; also the fewest nodes that its command names."""
    pod = dict(template.get("spec") or {})
    pod.pop("restartPolicy", None)
    boxes = [dict(box) for box in pod.get("containers") or ()]
    fewest: int | None = None
    if boxes:
        box = boxes[0]
        for key in ("command", "args"):
            words = [str(word) for word in box.get(key) or ()]
            found = re.search(r"--nnodes[= ]+[\"']?(\d+)", " ".join(words))
            fewest = int(found[1]) if found else fewest
            if words:
                box[key] = _command(words)
        names = {one["name"] for one in box.get("env") or ()}
        box["env"] = [*(box.get("env") or ()), *(e for e in envs if e["name"] not in names)]
    pod["containers"] = boxes
    return {**template, "spec": pod}, fewest


def _command(words: list[str]) -> list[str]:
    """A command line of dlrover-run as one of ours; words in one string of a shell, too."""
    if words[0].rpartition("/")[2] == "dlrover-run":
        words = ["holdfast", "run", *words[1:]]
    made: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("--nnodes", "--nnodes="):
            skip = True
        elif not word.startswith("--nnodes=") and word not in _FLAGS_WITHOUT_EFFECT:
            made.append(_in_shell(_FLAGS.get(word, word)))
    return made


def _in_shell(text: str) -> str:
    if "dlrover-run" not in text:
        return text
    text = text.replace("dlrover-run", "holdfast run")
    text = re.sub(r"\s--nnodes[= ]+\S+", "", text)
    for theirs, ours in _FLAGS.items():
        text = re.sub(rf"{theirs}(?=\s|$)", ours, text)
    for flag in _FLAGS_WITHOUT_EFFECT:
        text = re.sub(rf"\s{flag}(?=\s|$)", "", text)
    return text


def _settings(worker: Mapping[str, Any], limits: Mapping[str, Any], warnings: list[str]) -> Json:
    settings: Json = {}
    if "restartCount" in worker:
        settings["relaunches"] = int(worker["restartCount"])
    if worker.get("restartTimeout"):
        settings["pending-limit"] = int(worker["restartTimeout"])
    if worker.get("priority"):
        settings["priority"] = str(worker["priority"])
    critical = str(worker.get("criticalNodes") or "")
    if critical:
        settings["critical"] = _critical(critical)
    if limits.get("memory"):
        settings["memory-limit"] = _memory(str(limits["memory"]))
    for name in ("cpu", "gpu"):
        if limits.get(name):
            warnings.append(
                f"spec.resourceLimits.{name} has no effect: nodes are never made larger"
            )
    return settings


def _critical(text: str) -> str:
    """Positions without the numbers of restarts that DLRover allows each: "0:3,1:2" -> "0,1"."""
    if text in ("all", "none"):
        return text
    return ",".join(part.partition(":")[0].strip() for part in text.split(","))


def _memory(text: str) -> str:
    """An amount of memory as the setting takes it: DLRover writes 1024Mi, 16Gi or plain MiB."""
    return text + "B" if text.endswith(("Mi", "Gi", "Ti")) else text


def _gang(scheduler: Any) -> Json:
    if scheduler != "volcano":
        raise UsageError(
            f"spec.replicaSpecs.worker.BatchScheduler {scheduler}: only volcano is known; for another "
            "one set schedulerName in the template"
        )
    return {"scheduler": "volcano"}


def _master(template: Mapping[str, Any], warnings: list[str]) -> Json:
    """Where the coordinator may run: all of a template but what is run in it."""
    pod = dict(template.get("spec") or {})
    boxes = pod.pop("containers", None) or [{}]
    pod.pop("restartPolicy", None)
    resources = boxes[0].get("resources")
    if resources:
        pod["containers"] = [{"name": "coordinator", "resources": resources}]
    dropped = [key for key in ("image", "command", "args") if boxes[0].get(key)]
    if dropped:
        warnings.append(
            f"spec.replicaSpecs.dlrover-master: {' and '.join(dropped)} has no effect: the coordinator"
            " is Holdfast's"
        )
    meta = {"metadata": template["metadata"]} if template.get("metadata") else {}
    return {**meta, "spec": pod}


def _of_roles(roles: Mapping[str, Any]) -> Iterator[str]:
    for role in roles:
        if role not in (WORKER, MASTER, *_ROLES_NOT_HERE):
            yield f"spec.replicaSpecs.{role} has no effect: there is no such role here"


def _without_effect(given: Mapping[str, Any], worker: Mapping[str, Any]) -> Iterator[str]:
    if given.get("optimizeMode", "manual") not in ("manual", ""):
        yield (
            f"spec.optimizeMode {given['optimizeMode']} has no effect: numbers of nodes and their "
            "resources stay as they are written"
        )
    if given.get("brainService"):
        yield "spec.brainService has no effect: there is no such service here"
    boxes = (worker["template"].get("spec") or {}).get("containers") or [{}]
    words = " ".join(map(str, [*(boxes[0].get("command") or ()), *(boxes[0].get("args") or ())]))
    for flag in _FLAGS_WITHOUT_EFFECT:
        if flag in words.split():
            yield f"{flag} of dlrover-run has no effect, and was taken out of the command"
    if worker.get("autoScale"):
        yield "spec.replicaSpecs.worker.autoScale has no effect: change replicas, or make a ScalePlan"
    if worker.get("restartPolicy", "Never") not in ("Never", ""):
        yield (
            f"spec.replicaSpecs.worker.restartPolicy {worker['restartPolicy']} has no effect: Holdfast "
            "replaces pods that fail"
        )


def _unknown(prefix: str, given: Mapping[str, Any], nested: tuple[str, ...] = ()) -> Iterator[str]:
    """One warning for each field that the table does not have."""
    for name in given:
        path = f"{prefix}.{name}"
        if not any(row == path or row.startswith(path + ".") for row in FIELDS):
            yield f"{path.partition('.')[2]} is not known and has no effect"
    for name in nested:
        inner = given.get(name)
        if name != "replicaSpecs" and isinstance(inner, Mapping):
            yield from _unknown(f"{prefix}.{name}", inner)


def convert_plan(given: Mapping[str, Any]) -> PlannedNodes:
    """Say how many nodes a ScalePlan asks for, of which job."""
    warnings = list(_unknown("ScalePlan.spec", given, ()))
    roles = given.get("replicaResourceSpecs") or {}
    worker = roles.get(WORKER) or {}
    nodes = int(worker["replicas"]) if worker.get("replicas") else None
    for role in roles:
        if role != WORKER:
            warnings.append(
                f"spec.replicaResourceSpecs.{role} has no effect: there is no such role"
            )
    for name in worker:
        if name not in ("replicas", "resource"):
            warnings.append(
                f"spec.replicaResourceSpecs.worker.{name} is not known and has no effect"
            )
    if worker.get("resource"):
        warnings.append(
            "spec.replicaResourceSpecs.worker.resource has no effect: resources are those of the"
            " job's template"
        )
    for name in ("createPods", "removePods", "migratePods", "psHosts"):
        if given.get(name):
            why = FIELDS[f"ScalePlan.spec.{name}"].partition(": ")[2]
            warnings.append(f"spec.{name} has no effect{': ' + why if why else ''}")
    return PlannedNodes(str(given.get("ownerJob") or ""), nodes, tuple(warnings))


def with_plan(spec: Json, plan: PlannedNodes | None) -> Json:
    """The spec of a job with the numbers of nodes that its newest plan asks for."""
    if plan is None or plan.nodes is None:
        return spec
    fewest = min(spec["nodes"]["min"], plan.nodes)
    return {**spec, "nodes": {"min": fewest, "max": plan.nodes}}


def job_status(status: JobStatus) -> Json:
    """The status of a job as an ElasticJob has it."""
    phase = "Running" if status.phase == "Suspending" else status.phase
    return {
        "phase": phase,
        "conditions": [
            {
                "type": one.type,
                "status": one.status,
                "reason": one.reason,
                "message": one.message,
                "lastTransitionTime": one.last_transition_time,
            }
            for one in status.conditions
        ],
        "replicaStatuses": {WORKER: {"active": status.nodes}},
    }
