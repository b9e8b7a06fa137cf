"""The phases of a training step, from hooks alone: data, forward, backward, optimizer.

Nothing of the script is changed and nothing is asked of it. Torch calls hooks before and after each
optimizer step; `DataLoader` and `backward` are wrapped where they are defined; and the first module
that is called after those begins the forward phase. A hook on all modules would cost more than it
tells, so it is there only until its first call, and again after each other mark. It is put there by the
training thread and by no other, which might do so while that one goes through the hooks. A script that
uses torch's compiler has no such hook, which would end up in its graphs and break them: there the
forward phase begins when the data is there.

Only the thread that trains is followed: a loader that runs ahead in another one says nothing about
where the script stands.

The times of waiting phases (backward, where gradients are reduced; optimizer, for sharded ones) are
the whole world's; a rank's own work shows in the others.
"""

from __future__ import annotations

import functools
import sys
import time
from _thread import get_ident
from collections.abc import Callable
from types import ModuleType
from typing import Any

from holdfast.vitals import BACKWARD, BETWEEN, DATA, FORWARD, OPTIMIZER, Vitals
from holdfast.worker.imports import when_imported

_OUR_HOOK = -1
"""Torch numbers hooks from 0 on; with a number of our own none of its numbers is used up."""


class Phases:
    """Marks where a script stands."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._arm: Callable[[], None] = _nothing
        """Have the next call of a module noted."""
        self._compiles = False
        self._backwards = 0
        """How many backward passes of the training thread are under way, one within the other."""
        self.drag: Callable[[], None] | None = None
        """Makes the forward pass slow, where somebody asked for that."""

    def install(self) -> None:
        when_imported("torch.optim.optimizer", self._on_optimizer)
        when_imported("torch.utils.data.dataloader", self._on_loader)
        when_imported("torch.autograd", self._on_autograd)
        when_imported("torch.nn.modules.module", self._on_module)
        when_imported("torch._dynamo", self._on_compiler)

    def _mark(self, phase: int) -> None:
        self._vitals.mark(phase, time.monotonic())

    def _forward(self) -> None:
        self._mark(FORWARD)
        if self.drag is not None:
            self.drag()

    def _between(self) -> None:
        self._mark(BETWEEN)
        self._arm()

    def _trains(self) -> bool:
        return get_ident() == self._vitals.trainer

    # ---- hooks ----

    def _on_optimizer(self, module: ModuleType) -> None:
        def before(*_: Any) -> None:
            if self._trains():
                self._mark(OPTIMIZER)

        def after(*_: Any) -> None:
            if self._trains():
                self._between()

        for hook in (before, after):
            hook._torchdynamo_disable = True  # type: ignore[attr-defined]
        module.register_optimizer_step_pre_hook(before)
        module.register_optimizer_step_post_hook(after)

    def _on_loader(self, module: ModuleType) -> None:
        real = module._BaseDataLoaderIter.__next__

        @functools.wraps(real)
        def fetch(iterator: Any) -> Any:
            if not self._trains():
                return real(iterator)
            self._mark(DATA)
            try:
                return real(iterator)
            finally:
                if self._compiles:
                    self._forward()
                else:
                    self._between()

        module._BaseDataLoaderIter.__next__ = fetch

    def _on_autograd(self, module: ModuleType) -> None:
        real = module.backward

        @functools.wraps(real)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._backwards or not self._trains():  # Within another: reentrant checkpointing.
                return real(*args, **kwargs)
            self._backwards += 1
            self._mark(BACKWARD)
            try:
                return real(*args, **kwargs)
            finally:
                self._backwards -= 1
                self._between()

        module.__dict__["backward"] = backward

    def _on_module(self, module: ModuleType) -> None:
        hooks, torch = module._global_forward_pre_hooks, sys.modules["torch"]

        def called(*_: Any) -> None:
            if torch.compiler.is_compiling() or self._backwards or not self._trains():
                return  # In a backward pass a module is computed again.
            hooks.pop(_OUR_HOOK, None)
            self._forward()

        def arm() -> None:
            if not self._compiles:
                hooks[_OUR_HOOK] = called

        self._arm = arm
        arm()

    def _on_compiler(self, module: ModuleType) -> None:
        real = module.optimize

        @functools.wraps(real)
        def optimize(*args: Any, **kwargs: Any) -> Any:
            self._compiles = True
            modules: Any = sys.modules.get("torch.nn.modules.module")
            if modules is not None:
                modules._global_forward_pre_hooks.pop(_OUR_HOOK, None)
            return real(*args, **kwargs)

        module.__dict__["optimize"] = optimize


def _nothing() -> None:
    pass
