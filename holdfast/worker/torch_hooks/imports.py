"""Runs a callback on a module as soon as the script imports it, without importing it.

A version of the module that lacks what the callback patches is left as it is.

Callbacks replace functions of the module, and a module that is imported later takes over the replaced
ones (`from torch import save`). One that was preloaded has taken over the originals, so these are
replaced there too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, ClassVar


def when_imported(name: str, act: Callable[[ModuleType], object]) -> None:
    """Call `act` on the module, now or when it is imported."""
    if name in sys.modules:
        module = sys.modules[name]
        before = dict(vars(module))
        _act_on(module, act)
        _Replaced.functions |= _replaced(module, before)
    else:
        sys.meta_path.insert(0, _Watcher(name, act))


class _Replaced:
    """Holder of the functions that callbacks have replaced, by the identity of the original."""

    functions: ClassVar[dict[int, tuple[FunctionType, object]]] = {}


def _replaced(module: ModuleType, before: dict[str, Any]) -> dict[int, tuple[FunctionType, object]]:
    """Return the module's own functions that are others now."""
    now = vars(module)
    return {
        id(old): (old, now[name])
        for name, old in before.items()
        if now.get(name) is not old and isinstance(old, FunctionType)
    }


@contextmanager
def replacing_captured(names: Collection[str]) -> Iterator[None]:
    """Replace functions, within this context, also in these modules if they have them."""
    _Replaced.functions = {}
    yield
    replaced, _Replaced.functions = _Replaced.functions, {}
    for name in names:
        module = sys.modules.get(name)
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replaced:
                vars(module)[key] = _newest(value, replaced)


def _newest(function: object, replaced: dict[int, tuple[FunctionType, object]]) -> object:
    """Return what a function was replaced by in the end: several callbacks may wrap it."""
    while id(function) in replaced:
        function = replaced[id(function)][1]
    return function


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
