"""Loads the public names of a package when they are first used, so that importing it costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(
    package: dict[str, Any], homes: Mapping[str, str], modules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package, given its globals.

    `homes` has the module of each name; `modules` are submodules that are names too.
    """
    own_name = package["__name__"]

    def find(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{own_name}.{name}")
        if name not in homes:
            raise AttributeError(f"module {own_name!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        package[name] = value  # The next use does not come here.
        return value

    def names() -> list[str]:
        return sorted({*homes, *modules, *(name for name in package if name.startswith("__"))})

    return find, names
