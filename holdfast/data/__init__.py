"""Gives a training job its data, each record exactly once an epoch: see `docs/data.md`.

Names are imported when they are first used: some need torch, and readers need their libraries.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES: dict[str, str] = {}
"""The module of each public name."""

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # The next use does not come here.
    return value
