"""The phases of a training step, from hooks alone: data, forward, backward, optimizer.

Nothing of the script is changed and nothing is asked of it. Torch calls hooks before and after each
optimizer step; `DataLoader` and `backward` are wrapped where they are defined; and the first module
that is called after those begins the forward phase. A hook on all modules would cost more than it
tells, so it is there only until its first call, and again after each other mark.

The times of waiting phases (backward, where gradients are reduced; optimizer, for sharded ones) are
the whole world's; a rank's own work shows in the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from holdfast.vitals import BACKWARD, BETWEEN, DATA, FORWARD, OPTIMIZER, Vitals
from holdfast.worker.imports import when_imported


class Phases:
    """Marks where a script stands."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._arm: Callable[[], None] = lambda: None
        self._depth = 0

    def install(self) -> None:
        when_imported("torch.optim.optimizer", self._on_optimizer)
        when_imported("torch.utils.data.dataloader", self._on_loader)
        when_imported("torch.autograd", self._on_autograd)
        when_imported("torch.nn.modules.module", self._on_module)

    def mark(self, phase: int) -> None:
        self._vitals.mark(phase, time.monotonic())

    # ---- hooks ----

    def _on_optimizer(self, module: ModuleType) -> None:
        module.register_optimizer_step_pre_hook(lambda *_: self.mark(OPTIMIZER))
        module.register_optimizer_step_post_hook(lambda *_: self._between())

    def _between(self) -> None:
        self.mark(BETWEEN)
        self._arm()

    def _on_loader(self, module: ModuleType) -> None:
        base = module._BaseDataLoaderIter
        real = base.__next__

        def fetch(iterator: Any) -> Any:
            self.mark(DATA)
            try:
                return real(iterator)
            finally:
                self._between()

        base.__next__ = fetch

    def _on_autograd(self, module: ModuleType) -> None:
        real = module.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # Within another: reentrant checkpointing.
                return real(*args, **kwargs)
            self._depth += 1
            self.mark(BACKWARD)
            try:
                return real(*args, **kwargs)
            finally:
                self._depth -= 1
                self._between()

        module.__dict__["backward"] = backward

    def _on_module(self, module: ModuleType) -> None:
        register = module.register_module_forward_pre_hook
        armed: list[Any] = []

        def called(*_: Any) -> None:
            if armed:
                armed.pop().remove()
                self.mark(FORWARD)

        def arm() -> None:
            if not armed:
                armed.append(register(called))

        self._arm = arm
        arm()
