"""The phases of a training step, from hooks alone: data, forward, backward, optimizer.

Nothing of the script is changed and nothing is asked of it. Torch calls hooks before and after each
optimizer step; `DataLoader` and `backward` are wrapped where they are defined; and the first module
that is called after those begins the forward phase. A hook on all modules would cost more than it
tells, so it is there only until its first call, and again after each other mark. It is put there by the
training thread and by no other, which might do so while that one goes through the hooks. A script that
uses torch's compiler has no such hook, which would end up in its graphs and break them: there the
forward phase begins when the data is there.

Steps of a few milliseconds would be slowed by that, and are like one another: of those only some are
followed, so many that it costs a few thousandths of the time. What happens in the others is not booked;
that they end is a mark. Should one not end as soon as they do, because the script has begun something
else, then whatever it does next is followed.

Only the thread that trains is followed: a loader that runs ahead in another one says nothing about
where the script stands.

Ranks wait for each other in collectives, and what a rank does itself is told without that as far as it
can be seen (`waits`); on a GPU it is the times there that count (`devicetimes`). With DDP the backward
pass is as long as the slowest rank's; with a sharded model all phases can be told, unless torch's
compiler made one piece of work and waiting.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from _thread import get_ident
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from holdfast.shm.vital_signs import (
    ALSO_IN_FORWARD,
    BACKWARD,
    BETWEEN,
    DATA,
    FORWARD,
    LEFT_OUT,
    OPTIMIZER,
    WITH_GRADIENTS,
    Vitals,
)
from holdfast.worker.heartbeat import uses_device
from holdfast.worker.torch_hooks.device_times import DeviceTimes
from holdfast.worker.torch_hooks.imports import when_imported
from holdfast.worker.torch_hooks.waits import HostTimes, Waits

COST_S: Final = 60e-6
"""Of following one step, at most, where nothing is timed on a GPU."""
SHARE: Final = 0.003
"""So much of the time may be spent on that."""
MOST_SKIPPED: Final = 100
WAKE_AFTER_S: Final = 0.2

_OUR_HOOK = -1
"""Torch numbers hooks from 0 on; with a number of our own none of its numbers is used up."""


class Phases:
    """Marks where a script stands."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._arm: Callable[[], None] = _nothing
        """Have the next call of a module noted."""
        self._compiles = False
        self._skips = False
        """Nothing of the step under way is followed."""
        self._to_skip = 0
        self._stepped_at = 0.0
        self._backwards = 0
        """How many backward passes of the training thread are under way, one within the other."""
        self.drag: Callable[[], None] | None = None
        """Makes the forward pass slow, where somebody asked for that."""
        self._waits = Waits(self._trains)
        self._host = HostTimes(vitals, self._waits)
        self._root: weakref.ref[Any] | None = None
        """The module that began the last forward pass."""
        self._reduced: weakref.ref[Any] | None = None
        """The module that DDP was last seen to have, and whose gradients it reduces."""
        self._stepped: weakref.ref[Any] | None = None
        """The optimizer that was last asked what it optimizes."""

    def install(self) -> None:
        when_imported("torch.optim.optimizer", self._on_optimizer)
        when_imported("torch.utils.data.dataloader", self._on_loader)
        when_imported("torch.autograd", self._on_autograd)
        when_imported("torch.nn.modules.module", self._on_module)
        when_imported("torch._dynamo", self._on_compiler)
        self._waits.install()

    def wake(self) -> None:
        """Called now and then, by any thread."""
        if self._skips and time.monotonic() - self._stepped_at > WAKE_AFTER_S:
            self._skips = False

    def _step_ended(self) -> None:
        now = time.monotonic()
        if self._skips:
            self._vitals.go_on(BETWEEN, now)
        else:
            self._mark(BETWEEN)
        step_s, self._stepped_at = now - self._stepped_at, now
        others = self._not_worth_while(step_s)
        if self._to_skip:
            self._to_skip = min(self._to_skip - 1, others)
        elif self._vitals.warm:
            self._to_skip = others
        self._skips = self._to_skip > 0
        if not self._skips:
            self._arm()
            if self._waits.device is None and uses_device():
                self._waits.device = DeviceTimes(self._vitals, sys.modules["torch"].cuda)

    def _not_worth_while(self, step_s: float) -> int:
        """How many steps as long as that are not followed, for each one that is."""
        if self.drag is not None:
            return 0
        device = self._waits.device
        cost_s = COST_S if device is None else device.cost_s
        return min(MOST_SKIPPED, int(cost_s / (SHARE * max(step_s, 1e-6))))

    def _mark(self, phase: int) -> None:
        now = time.monotonic()
        self._vitals.mark(phase, now)
        (self._waits.device or self._host).mark(phase, now)

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
        def before(*args: Any) -> None:
            if not self._skips and self._trains():
                self._mark(OPTIMIZER)
                if self._compiles:
                    self._ask(args[0])

        def after(*_: Any) -> None:
            if self._trains():
                self._step_ended()

        for hook in (before, after):
            hook._torchdynamo_disable = True  # type: ignore[attr-defined]
        module.register_optimizer_step_pre_hook(before)
        module.register_optimizer_step_post_hook(after)

    def _ask(self, optimizer: Any) -> None:
        """No module is looked at when they are compiled; their optimizer knows them too."""
        if self._stepped is None or self._stepped() is not optimizer:
            self._stepped = weakref.ref(optimizer)
            of_all = (p for group in optimizer.param_groups for p in group["params"])
            sharded = any(map(_is_shard, of_all))
            self._vitals.waiting = ALSO_IN_FORWARD if sharded else WITH_GRADIENTS

    def _on_loader(self, module: ModuleType) -> None:
        real = module._BaseDataLoaderIter.__next__

        @functools.wraps(real)
        def fetch(iterator: Any) -> Any:
            if self._skips or not self._trains():
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
            # Within another: reentrant checkpointing.
            if self._skips or self._backwards or not self._trains():
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

        def called(root: Any, *_: Any) -> None:
            if torch.compiler.is_compiling() or self._backwards or not self._trains():
                return  # In a backward pass a module is computed again.
            if _is_ddp(root):
                self._reduced = weakref.ref(root.module)
                return  # It waits for rank 0's buffers before it calls the module that it has.
            hooks.pop(_OUR_HOOK, None)
            if self._skips:
                return
            if self._root is None or self._root() is not root:
                self._root = weakref.ref(root)
                self._vitals.waiting = self._waiting_in(root)
            self._forward()

        def arm() -> None:
            if not self._compiles:
                hooks[_OUR_HOOK] = called

        self._arm = arm
        arm()

    def _waiting_in(self, root: Any) -> int:
        """Which times have waiting in them that is not seen, when that module is trained."""
        reduced = self._reduced is not None and self._reduced() is root
        if reduced or not _is_sharded(root) or any(map(_is_ddp, root.modules())):
            return WITH_GRADIENTS
        return LEFT_OUT

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


def _is_sharded(root: Any) -> bool:
    """Whether ranks have to give each other parts of the module before they can compute it."""
    return any(map(_is_shard, root.parameters())) or any(
        type(module).__name__ == "FullyShardedDataParallel" for module in root.modules()
    )


def _is_shard(parameter: Any) -> bool:
    return hasattr(parameter, "_local_tensor") or type(parameter).__name__ == "FlatParameter"


def _is_ddp(module: Any) -> bool:
    return hasattr(module, "will_sync_module_buffers")


def _nothing() -> None:
    pass
