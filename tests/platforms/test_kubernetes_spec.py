"""What users write in a HoldfastJob: read, checked, and described by the schema."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from crd_page import FILE, page
from fake_kubernetes import SPEC

from holdfast.errors import UsageError
from holdfast.platforms.kubernetes import crd
from holdfast.platforms.kubernetes.spec import OURS, JobSpec, read_spec, trainer, variables
from holdfast.platforms.kubernetes.status import JobStatus

Json = dict[str, Any]

FULL: Json = {
    "nodes": {"min": 2, "max": 4, "spares": 1},
    "template": {
        "metadata": {"labels": {"team": "a"}},
        "spec": {"containers": [{"name": "logs"}, {"name": "train"}], "priorityClassName": "p"},
    },
    "container": "train",
    "settings": {"max-restarts": 3, "node-check": True, "safety-factor": 2.5, "memory": "16GiB"},
    "suspend": True,
    "coordinator": {
        "port": 1234,
        "journal": {"size": "2Gi", "storageClassName": "fast", "volume": {"emptyDir": {}}},
        "template": {"spec": {"nodeSelector": {"pool": "cpu"}}},
    },
    "gang": {"scheduler": "volcano", "queue": "q", "minMember": 3},
    "minAvailable": 1,
}


def changed(**changes: Any) -> Json:
    return {**copy.deepcopy(SPEC), **changes}


def refused(spec: Json, name: str = "llm") -> str:
    with pytest.raises(UsageError) as error:
        read_spec(name, spec)
    return str(error.value)


def leaves(schema: Json, path: str = "") -> set[str]:
    """Paths of all fields that a schema describes."""
    found = set()
    for name, one in schema.get("properties", {}).items():
        found |= {f"{path}{name}"} | leaves(one, f"{path}{name}.")
    return found


def paths(value: Json, schema: Json, path: str = "") -> set[str]:
    """Paths of all fields of a value, as deep as its schema goes."""
    found = set()
    for name, one in value.items():
        found.add(f"{path}{name}")
        inner = schema["properties"][name]
        if "properties" in inner:
            found |= paths(one, inner, f"{path}{name}.")
    return found


def test_every_field_that_is_read_is_in_the_schema_and_the_reverse() -> None:
    schema = crd.schema(JobSpec)
    read = msgspec.to_builtins(read_spec("llm", FULL))
    assert paths(FULL, schema) == leaves(schema), "the example above has every field"
    assert read == {**FULL, "settings": read["settings"]}, "nothing of it is lost"


def test_the_status_has_a_schema_for_every_field_that_is_written() -> None:
    described = crd.schema(JobStatus)["properties"]
    written = {one.encode_name for one in msgspec.structs.fields(JobStatus)}
    assert described.keys() == written


def test_the_definition_in_deploy_is_the_one_of_the_code() -> None:
    assert FILE.read_text() == page(), "run python tests/platforms/crd_page.py"


def test_the_printed_definition_is_yaml_of_the_same() -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(page()) == crd.definition()


def test_every_field_has_a_description() -> None:
    def check(schema: Json) -> None:
        for name, one in schema.get("properties", {}).items():
            assert one.get("description"), name
            check(one)

    check(crd.schema(JobSpec))
    check(crd.schema(JobStatus))


def test_printer_columns_and_scale_point_at_fields_that_exist() -> None:
    version = crd.definition()["spec"]["versions"][0]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    scale = version["subresources"]["scale"]
    shown = [column["jsonPath"] for column in version["additionalPrinterColumns"][:-1]]
    for path in [*shown, *scale.values()]:
        found = {"properties": properties}
        for word in path.strip(".").split("."):
            found = found["properties"][word]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (changed(nodes={"min": 3, "max": 2}), "min (3) is more than max (2); lower one of them"),
        (changed(nodes={"min": 0, "max": 2}), "spec.nodes.min"),
        (changed(nodes={"max": 2}), "min"),
        (changed(template={}), "spec.template.spec.containers: is empty; give one container"),
        (changed(template={"spec": {"containers": []}}), "is empty; give one container"),
        (changed(template={"spec": {"containers": [{}]}}), "each needs a name"),
        (changed(container="other"), "no such container, only train; name one of these"),
        (changed(sspend=True), "unknown field `sspend`"),
        (changed(settings={"max-restart": 3}), "did you mean max-restarts?"),
        (changed(settings={"nnodes": 3}), "spec.settings.nnodes: cannot be set here"),
        (changed(settings={"tls-ca": "ca.pem"}), "spec.settings.tls-ca: cannot be set here"),
        (changed(settings={"max-restarts": "x"}), "spec.settings.max-restarts x: a whole number"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(spec: Json, told: str) -> None:
    assert told in refused(spec)


def test_pods_that_the_kubelet_restarts_are_refused() -> None:
    spec = changed()
    spec["template"]["spec"]["restartPolicy"] = "Always"
    assert "must be Never" in refused(spec)


@pytest.mark.parametrize("name", ["Llm", "4llm", "a" * 51, "a.b", "llm-"])
def test_a_name_that_pods_cannot_have_is_refused(name: str) -> None:
    assert "choose another name" in refused(SPEC, name)


def test_settings_become_variables() -> None:
    assert variables(read_spec("llm", FULL)) == {
        "HOLDFAST_MAX_RESTARTS": "3",
        "HOLDFAST_NODE_CHECK": "true",
        "HOLDFAST_SAFETY_FACTOR": "2.5",
        "HOLDFAST_MEMORY": "16GiB",
    }


def test_settings_that_are_not_to_be_given_exist() -> None:
    from holdfast.config.schema import all_settings

    assert {setting.name for setting in all_settings()} >= OURS


def test_the_first_container_trains_unless_another_is_named() -> None:
    assert trainer(read_spec("llm", FULL))["name"] == "train"
    assert trainer(read_spec("llm", {**FULL, "container": ""}))["name"] == "logs"


@pytest.mark.parametrize(
    ("nodes", "given", "budget"),
    [((2, 4), None, 2), ((4, 4), None, 3), ((1, 1), None, 0), ((2, 4), 0, 0), ((2, 4), 3, 3)],
)
def test_a_drain_leaves_enough_workers(
    nodes: tuple[int, int], given: int | None, budget: int
) -> None:
    more = {} if given is None else {"minAvailable": given}
    spec = changed(nodes={"min": nodes[0], "max": nodes[1]}, **more)
    assert read_spec("llm", spec).budget == budget
