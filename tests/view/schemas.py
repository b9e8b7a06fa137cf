"""Writes the JSON schemas of reports, from the structs that define them.

`python tests/view/schemas.py` writes one file per document into `docs/schema`; a test holds the files
equal to the structs. The text under a field of a struct becomes the description of its property.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct

from holdfast.messages.chaos import InjectionReport
from holdfast.messages.evidence import Verdict
from holdfast.messages.reports import DataAccount, GoodputReport, IncidentReport, StatusReport
from holdfast.messages.wire import Why

FOLDER = Path(__file__).parents[2] / "docs" / "schema"

DOCUMENTS: dict[str, tuple[str, Any]] = {
    "status": ("holdfast status --json", StatusReport),
    "incidents": ("holdfast incidents --json", list[IncidentReport]),
    "goodput": ("holdfast goodput --json", GoodputReport),
    "data": ("holdfast data audit --json", list[DataAccount]),
    "why": ("holdfast why --json", Why),
    "why_incident": ("holdfast why --incident N --json", Verdict),
    "chaos": ("holdfast chaos ... --json", list[InjectionReport]),
}
"""By file name: the command that prints the document, and its type."""


def schema(name: str) -> dict[str, Any]:
    """Describe a document in JSON schema 2020-12."""
    command, kind = DOCUMENTS[name]
    described: dict[str, Any] = msgspec.json.schema(kind)
    for struct in set(_structs(kind)):
        properties = described["$defs"][struct.__name__]["properties"]
        for field, text in _field_docstrings(struct).items():
            properties[field]["description"] = text
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": f"What `{command}` prints", **described}


def text(name: str) -> str:
    """Render a document's schema as its file holds it."""
    return json.dumps(schema(name), indent=1, ensure_ascii=False) + "\n"


def _structs(kind: Any) -> Iterator[type[Struct]]:
    """Find every struct that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from _structs(field.type)
    for argument in get_args(kind):
        yield from _structs(argument)


def _field_docstrings(struct: type[Struct]) -> dict[str, str]:
    """Read the string literals that follow a struct's fields, which Python itself discards."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(ast.literal_eval(following.value).split())
    return found


if __name__ == "__main__":
    for name in DOCUMENTS:
        (FOLDER / f"{name}.json").write_text(text(name))
