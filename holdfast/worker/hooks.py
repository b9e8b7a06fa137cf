"""Counts training steps of scripts that never heard of Holdfast.

Torch lets one register a hook that is called after every step of every optimizer. Only the first
optimizer of a process counts, so that a script with two of them (a GAN) does not count twice; when
it is gone, the next one takes its place. A script that resumed from a checkpoint has the number of
its steps in the optimizer's state where the optimizer keeps one (Adam does, plain SGD does not).

The hook is registered when torch's optimizers are imported, and a script that never imports torch
never knows.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from holdfast.worker.runtime import Runtime

_MODULE = "torch.optim.optimizer"


class StepCounter:
    """Called by torch after each optimizer step."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._counted: weakref.ref[Any] | None = None

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._counted is None or self._counted() is not optimizer:
            if self._counted is not None and self._counted() is not None:
                return
            self._counted = weakref.ref(optimizer)
            self._runtime.hook_stepped(_steps_in_state(optimizer) - 1)
            return
        self._runtime.hook_stepped(0)


def _steps_in_state(optimizer: Any) -> int:
    """How many steps the optimizer says it took, this one included; 1 when it does not say."""
    for state in optimizer.state.values():
        if isinstance(state, dict) and "step" in state:
            return max(1, int(state["step"]))
    return 1


def count_steps(runtime: Runtime) -> None:
    """Register the hook now, or as soon as torch is imported."""
    counter = StepCounter(runtime)
    if _MODULE in sys.modules:
        _register(sys.modules[_MODULE], counter)
    else:
        sys.meta_path.insert(0, _Watcher(counter))


def _register(module: ModuleType, counter: StepCounter) -> None:
    module.register_optimizer_step_post_hook(counter)


class _Watcher(MetaPathFinder):
    """Finds nothing itself; adds a last step to the import of torch's optimizers."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _RegisteringLoader(spec.loader, self._counter)
                return spec
        return None


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader, counter: StepCounter) -> None:
        self._loader = loader
        self._counter = counter

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module, self._counter)
