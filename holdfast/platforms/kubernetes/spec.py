"""What a user writes in a `HoldfastJob`, as the operator reads it.

The structs here are the only definition: the schema by which the API server checks a resource is
printed from them (`crd`), so no field can be read that the schema lacks, or be promised and not read.
What the schema cannot say is checked by `read_spec`, in sentences that name the field and what to do.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from holdfast.config.schema import Setting, all_settings
from holdfast.config.sources import nearest
from holdfast.errors import UsageError

Json = dict[str, Any]

MAX_NAME = 50
"""A pod's name is the job's, a position and an attempt, and is a host's name: 63 characters."""
PORT = 29400

Anything = Annotated[Json, Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True})]
"""An object whose fields are Kubernetes' own."""
Scalar = str | int | float | bool
Port = Annotated[int, Meta(ge=1, le=65535)]
Nodes = Annotated[int, Meta(ge=1, le=100_000)]


class NodesSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many nodes; changed while the job runs, they scale it."""

    min: Nodes
    """The fewest nodes to train with."""
    max: Nodes
    """The most nodes to train with."""
    spares: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Nodes beyond the maximum that wait for a place."""


class JournalSpec(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Where the coordinator keeps the job's journal, so that it outlives its pod."""

    size: Annotated[str, Meta(min_length=1)] = "1Gi"
    """Size of the claim that is made."""
    storage_class_name: str | None = None
    """Class of the claim; the cluster's default when left out."""
    volume: Anything | None = None
    """A volume to use in place of a claim, written as in a pod: {persistentVolumeClaim: {...}}, ..."""


class CoordinatorSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pod of the job's coordinator."""

    port: Port = PORT
    """Port that it listens on, at its pod's address."""
    journal: JournalSpec = JournalSpec()
    """Volume of the journal."""
    template: Anything = field(default_factory=dict)
    """Pod template; its first container, if it has any, gets what it lacks. Left out, the image is that
    of the workers."""


class GangSpec(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Pods that a gang scheduler starts together or not at all."""

    scheduler: Literal["volcano"] = "volcano"
    """Whose PodGroup is made; pods that name no schedulerName get this one."""
    queue: str = ""
    """Its queue; its default when left out."""
    min_member: Nodes | None = None
    """Pods that must fit at once; nodes.min when left out."""


class JobSpec(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What is run, on how many nodes."""

    nodes: NodesSpec
    """How many nodes."""
    template: Anything
    """Pod template of a node. One container runs `holdfast run ... SCRIPT`; variables and labels are
    added to it, and nothing in it is overwritten."""
    container: str = ""
    """Name of the container that runs `holdfast run`; the first one when left out."""
    settings: dict[str, Scalar] = field(default_factory=dict)
    """Settings of `holdfast run` for the whole job, by the names of holdfast.toml: max-restarts, ..."""
    suspend: bool = False
    """Whether the job shall stand still, without pods; it goes on when this is false again."""
    coordinator: CoordinatorSpec = CoordinatorSpec()
    """The pod of the job's coordinator."""
    gang: GangSpec | None = None
    """Gang scheduling; none when left out."""
    min_available: Annotated[int, Meta(ge=0)] | None = None
    """Workers that a drain must leave running (PodDisruptionBudget); when left out, nodes.min, or one
    less than nodes.max if that is smaller. 0 for no budget."""

    @property
    def nnodes(self) -> str:
        return f"{self.nodes.min}:{self.nodes.max}"

    @property
    def scale(self) -> str:
        """All numbers of nodes in one word, to compare."""
        return f"{self.nnodes}+{self.nodes.spares}"

    @property
    def budget(self) -> int:
        """Workers that must stay available."""
        if self.min_available is not None:
            return self.min_available
        return min(self.nodes.min, self.nodes.max - 1)


OURS = frozenset(
    {
        *("job", "nnodes", "spares", "coordinator", "token", "token_file", "requeued", "request"),
        *("node_name", "home", "standalone", "node_rank", "master_addr", "master_port", "config"),
        *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "local_addr", "fake_node", "infra_rank"),
        *("switch", "block", "domain", "module", "no_python", "run_path"),
        *("tls_cert", "tls_key", "tls_ca"),
    }
)
"""Settings that are not the job's to choose here: the operator does, or the command in the template."""


def read_spec(name: str, spec: Json) -> JobSpec:
    """Read and check a spec; UsageError says which field is wrong, and what to write."""
    if len(name) > MAX_NAME or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise UsageError(
            f"metadata.name {name}: at most {MAX_NAME} of a-z, 0-9 and -, beginning with a letter, are"
            " needed, because pods and addresses are named after it; choose another name"
        )
    try:
        read = msgspec.convert(spec, JobSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"spec: {str(error).replace('$', 'spec')}; correct it") from None
    if read.nodes.min > read.nodes.max:
        raise UsageError(
            f"spec.nodes: min ({read.nodes.min}) is more than max ({read.nodes.max}); lower one of them"
            " or raise the other"
        )
    _check_template(read)
    variables(read)
    return read


def _check_template(spec: JobSpec) -> None:
    pod = spec.template.get("spec")
    containers = pod.get("containers") if isinstance(pod, dict) else None
    if not isinstance(containers, list) or not containers:
        raise UsageError(
            "spec.template.spec.containers: is empty; give one container whose command is"
            " `holdfast run ... SCRIPT`"
        )
    names = [str(box.get("name") or "") for box in containers if isinstance(box, dict)]
    if len(names) != len(containers) or not all(names):
        raise UsageError("spec.template.spec.containers: each needs a name; add it")
    if spec.container and spec.container not in names:
        raise UsageError(
            f"spec.container {spec.container}: spec.template has no such container, only"
            f" {', '.join(names)}; name one of these"
        )
    assert isinstance(pod, dict)
    if pod.get("restartPolicy", "Never") != "Never":
        raise UsageError(
            f"spec.template.spec.restartPolicy {pod['restartPolicy']}: must be Never, because Holdfast"
            " itself replaces pods that fail; leave it out"
        )


def trainer(spec: JobSpec) -> Json:
    """The container of the template that runs `holdfast run`."""
    containers = spec.template["spec"]["containers"]
    found: Json = next((c for c in containers if c["name"] == spec.container), containers[0])
    return found


def variables(spec: JobSpec) -> dict[str, str]:
    """The settings of a spec as environment variables."""
    known: dict[str, Setting[object]] = {setting.key: setting for setting in all_settings()}
    found = {}
    for key, value in spec.settings.items():
        setting = known.get(key.replace("_", "-"))
        if setting is None:
            meant = nearest(key.replace("_", "-"), known)
            hint = f"did you mean {meant}?" if meant else "`holdfast config` lists them"
            raise UsageError(f"spec.settings.{key}: no such setting; {hint}")
        if setting.name in OURS:
            raise UsageError(
                f"spec.settings.{key}: cannot be set here, because the operator or the container's"
                " command decides it; leave it out"
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        setting.read(text, f"spec.settings.{key}")
        found[setting.variables[0]] = text
    return found
