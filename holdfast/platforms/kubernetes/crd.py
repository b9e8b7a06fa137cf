"""The definition of the resource `HoldfastJob`, printed into deploy/kubernetes/crd.yaml.

The schema of the spec is made from the structs that the operator reads it with (`spec`), and that of
the status from those it writes (`status`); the text under each field there is its description here.
"""

from __future__ import annotations

import ast
import textwrap
from inspect import getsource
from typing import Any

from msgspec import Struct, inspect

from holdfast.platforms.kubernetes.spec import JobSpec, Json
from holdfast.platforms.kubernetes.status import JobStatus

GROUP, VERSION, PLURAL, KIND = "holdfast.dev", "v1alpha1", "holdfastjobs", "HoldfastJob"

COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Nodes", "integer", ".status.nodes", 0),
    ("Round", "integer", ".status.round", 0),
    ("Step", "integer", ".status.step", 0),
    ("Goodput", "string", ".status.goodput", 0),
    ("Last incident", "string", ".status.lastIncident", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
"""What `kubectl get` prints: name, type, path, and 1 if only with -o wide."""


def definition() -> Json:
    """The CustomResourceDefinition."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.nodes.max",
                "statusReplicasPath": ".status.nodes",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority}
            for name, kind, path, priority in COLUMNS
        ],
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "required": ["spec"],
                "properties": {"spec": schema(JobSpec), "status": schema(JobStatus)},
            }
        },
    }
    names = {"plural": PLURAL, "singular": "holdfastjob", "kind": KIND, "shortNames": ["hfj"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def schema(kind: type[Struct]) -> Json:
    """The structural schema of a struct."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    docs = _field_docs(kind)
    properties = {
        one.encode_name: {**_of_type(one.type), "description": docs[one.name]}
        for one in info.fields
    }
    found: Json = {"type": "object", "properties": properties}
    required = [one.encode_name for one in info.fields if one.required]
    return {**found, "required": required} if required else found


def _of_type(info: Any) -> Json:
    if isinstance(info, inspect.Metadata):
        return {**_of_type(info.type), **(info.extra_json_schema or {})}
    if isinstance(info, inspect.UnionType):
        kinds = [one for one in info.types if not isinstance(one, inspect.NoneType)]
        if len(kinds) == 1:
            return _of_type(kinds[0])
        return {"x-kubernetes-preserve-unknown-fields": True}
    if isinstance(info, inspect.StructType):
        return schema(info.cls)
    if isinstance(info, inspect.LiteralType):
        return {"type": "string", "enum": list(info.values)}
    if isinstance(info, inspect.DictType):
        if isinstance(info.value_type, inspect.AnyType):
            return {"type": "object"}
        return {"type": "object", "additionalProperties": _of_type(info.value_type)}
    if isinstance(info, inspect.BoolType):
        return {"type": "boolean"}
    if isinstance(info, inspect.StrType):
        limits = {"minLength": info.min_length} if info.min_length else {}
        return {"type": "string", **limits}
    if isinstance(info, inspect.ListType | inspect.VarTupleType):
        return {"type": "array", "items": _of_type(info.item_type)}
    assert isinstance(info, inspect.IntType), info
    limits = {"minimum": info.ge} if info.ge is not None else {}
    return {"type": "integer", **limits, **({"maximum": info.le} if info.le is not None else {})}


def _field_docs(kind: type[Struct]) -> dict[str, str]:
    """The text under each field of a struct, read from the source."""
    (definition,) = ast.parse(textwrap.dedent(getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for one, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            assert isinstance(after, ast.Expr), one.target.id
            assert isinstance(after.value, ast.Constant), one.target.id
            docs[one.target.id] = " ".join(str(after.value.value).split())
    return docs
