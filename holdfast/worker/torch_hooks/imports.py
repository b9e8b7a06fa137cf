"""Runs a callback on a module as soon as the script imports it, without importing it.

A version of the module that lacks what the callback patches is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, act: Callable[[ModuleType], object]) -> None:
    """Call `act` on the module, now or when it is imported."""
    if name in sys.modules:
        _act_on(sys.modules[name], act)
    else:
        sys.meta_path.insert(0, _Watcher(name, act))


class _Watcher(MetaPathFinder):
    """Import hook that finds nothing itself, and adds a last step to the import of one module."""

    def __init__(self, name: str, act: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)  # Old finders have none.
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None and spec.loader is not None:
                self._extend(spec.loader)
                return spec
        return None

    def _extend(self, loader: Any) -> None:
        real = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # Nothing is left for the script to see.
            real(module)
            _act_on(module, self._act)

        loader.exec_module = exec_module


def _act_on(module: ModuleType, act: Callable[[ModuleType], object]) -> None:
    try:
        act(module)
    except AttributeError:
        pass
