"""Prints docs/api.md from the code: every public name with its signature and docstring.

python tests/api_page.py     # writes the page anew, after the public API has changed
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import holdfast

PAGE = Path(__file__).parent.parent / "docs" / "api.md"

TOP = """\
# The Python API

Everything that `import holdfast` offers, printed from the code by `tests/api_page.py`. Names that are
not listed here are internal and may change at any time. Importing `holdfast` imports nothing else;
each name is loaded when it is first used.
"""


MADE_BY_USERS = {
    *("Checkpointer", "ElasticTrainer", "KeepAll", "KeepEvery", "KeepLatest"),
    *("data.ElasticDataLoader", "data.ElasticDataset", "data.ElasticIterableDataset"),
    *("data.ElasticSampler", "data.LeasedLoader", "data.Order", "data.ShardClient"),
    *("inprocess.RetryLimits", "inprocess.FaultCounter", "inprocess.assignment.Layer"),
}
"""Classes that a script constructs; the others are only returned to it."""


def parameters(function: Any) -> list[inspect.Parameter]:
    """Parameters that a caller can pass."""
    found = inspect.signature(function).parameters.values()
    return [p for p in found if p.name not in ("self", "cls")]


def methods(cls: type) -> dict[str, Any]:
    """Public methods and properties of a class, by name. Class methods are constructors of ours."""
    found = {name: inspect.getattr_static(cls, name) for name in dir(cls) if name[0] != "_"}
    return {
        name: each.fget if isinstance(each, property) else each
        for name, each in found.items()
        if (inspect.isfunction(each) or isinstance(each, property)) and _is_ours(each)
    }


def _is_ours(each: Any) -> bool:
    """Whether a method is of Holdfast, and not inherited from a class of torch."""
    function = each.fget if isinstance(each, property) else each
    return str(function.__module__).startswith("holdfast")


def field_docs(cls: type) -> dict[str, str]:
    """Docstrings of a struct's fields; empty where a field has none."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for each, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            value = text.value if isinstance(text, ast.Constant) else ""
            found[each.target.id] = inspect.cleandoc(str(value))
    return found


def _signature(name: str, function: Any) -> str:
    listed, named = [], False
    for each in parameters(function):
        if each.kind is each.KEYWORD_ONLY and not named:
            listed.append("*")
            named = True
        default = "" if each.default is each.empty else f"={each.default!r}"
        listed.append(f"{each.name}{default}")
    return f"{name}({', '.join(listed)})"


def _section(name: str, value: Any) -> Iterator[str]:
    if name == "errors":
        yield "## `errors`\n\nThe module with every exception that Holdfast raises on purpose.\n"
        yield f"```\n{inspect.cleandoc(value.__doc__ or '')}\n```\n"
    elif inspect.ismodule(value):
        yield f"## `{name}`\n\n{inspect.getdoc(value)}\n"
        for each in value.__all__:
            yield from _section(f"{name}.{each}", getattr(value, each))
    elif inspect.isclass(value):
        title = _signature(name, value) if name in MADE_BY_USERS else name
        yield f"## `{title}`\n\n{inspect.getdoc(value)}\n"
        lines = [f"- `{field}`: {text}" for field, text in field_docs(value).items() if text]
        if lines:
            yield "\n".join(lines) + "\n"
        for method, function in methods(value).items():
            is_property = isinstance(inspect.getattr_static(value, method), property)
            title = method if is_property else _signature(method, function)
            yield f"### `{name}.{title}`\n\n{inspect.getdoc(function) or ''}\n"
    elif callable(value):
        yield f"## `{_signature(name, value)}`\n\n{inspect.getdoc(value)}\n"
    else:
        yield f"## `{name}`\n\nThe version of Holdfast, as a string.\n"


def render() -> str:
    names = sorted(holdfast.__all__, key=str.lower)
    parts = [part for name in names for part in _section(name, getattr(holdfast, name))]
    return "\n".join([TOP, *parts])


if __name__ == "__main__":
    PAGE.write_text(render())
