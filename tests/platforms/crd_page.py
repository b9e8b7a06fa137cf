"""Prints the definition of HoldfastJob into deploy/kubernetes/crd.yaml.

    python tests/platforms/crd_page.py

JSON is YAML, too, so no package is needed for it; what stands there is laid out to be read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.platforms.kubernetes import crd

FILE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "crd.yaml"
HEAD = "# Printed from holdfast/platforms/kubernetes: run python tests/platforms/crd_page.py\n"


def page() -> str:
    return HEAD + "\n".join(_lines(crd.definition(), 0)) + "\n"


def _lines(value: Any, depth: int) -> list[str]:
    """Lay out as YAML, one line a value, strings quoted as in JSON."""
    pad = "  " * depth
    found: list[str] = []
    if isinstance(value, dict):
        for key, one in value.items():
            found += _entry(f"{pad}{key}:", one, depth)
    else:
        for one in value:
            first, *rest = _lines(one, depth + 1) if _nests(one) else [_scalar(one)]
            found += [f"{pad}- {first.strip()}", *rest]
    return found


def _entry(head: str, value: Any, depth: int) -> list[str]:
    if _nests(value):
        return [head, *_lines(value, depth + 1)]
    return [f"{head} {_scalar(value)}"]


def _nests(value: Any) -> bool:
    return isinstance(value, dict | list) and bool(value)


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(page())
