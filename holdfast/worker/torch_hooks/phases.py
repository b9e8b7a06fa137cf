"""Marks the phases of a training step from hooks alone: data, forward, backward, optimizer.

The script is not changed. Torch calls hooks around each optimizer step, `DataLoader` and `backward` are
wrapped where they are defined, and the first module that is called after one of those begins the
forward phase. A permanent hook on all modules would cost too much, so it is removed at its first call
and installed again after each other mark, by the training thread only: another thread might do so while
that one iterates over the hooks. In a compiled model such a hook would end up in the graphs and break
them, so there the forward phase begins when the data has arrived.

Steps of a few milliseconds would be slowed by all this, and resemble each other, so only a sample of
them is followed, at a cost of a few thousandths. Of the others only the end is a mark. If one does not
end as soon as usual, because the script does something else, the script is followed again.

Only the training thread is followed: a loader that runs ahead in another thread says nothing about
where training is.

Ranks wait for each other in collectives; a rank's own work is reported without visible waits (`waits`),
and on a GPU as the GPU timed it (`device_times`). With DDP the backward pass includes waiting for the
slowest rank; with a sharded model all phases can be told, unless a compiler fused work and waits.
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
from holdfast.worker.torch_hooks.waits import OwnTimes

COST_S: Final = 60e-6
"""Upper bound of the cost of following one step, without GPU timing."""
SHARE: Final = 0.003
"""Share of the time that following may cost."""
MOST_SKIPPED: Final = 100
WAKE_AFTER_S: Final = 0.2

_OUR_HOOK = -1
"""Key of our hook; torch numbers the others from 0, so none of its numbers is used up."""


class Phases:
    """Hooks that mark the phases of the training thread in the vital signs."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._arm: Callable[[], None] = lambda: None
        """Installs the hook that sees the next call of a module."""
        self._compiles = False
        self._skips = False
        """Whether the current step is not followed."""
        self._to_skip = 0
        self._stepped_at = 0.0
        self._within = False
        """Whether the training thread loads data or computes gradients. Either may nest and call
        modules, as loaders within loaders and activation checkpointing do."""
        self.drag: Callable[[], None] | None = None
        """Slows the forward pass down, as an injected fault."""
        self._own_times = OwnTimes(vitals, self._trains)
        self._root: weakref.ref[Any] | None = None
        """Module that began the last forward pass."""
        self._reduced: weakref.ref[Any] | None = None
        """Module inside the last DDP wrapper, which reduces its gradients."""
        self._stepped: weakref.ref[Any] | None = None
        """Optimizer whose parameters were last inspected."""

    def install(self) -> None:
        when_imported("torch.optim.optimizer", self._on_optimizer)
        when_imported("torch.utils.data.dataloader", self._on_loader)
        when_imported("torch.autograd", self._on_autograd)
        when_imported("torch.nn.modules.module", self._on_module)
        when_imported("torch._dynamo", self._on_compiler)
        self._own_times.install()

    def wake(self) -> None:
        """Follow the script again if its step lasts unusually long. Any thread may call it."""
        if self._skips and time.monotonic() - self._stepped_at > WAKE_AFTER_S:
            self._skips = False

    def _step_ended(self) -> None:
        now = time.monotonic()
        if self._skips:
            self._vitals.go_on(BETWEEN, now)
        else:
            self._mark(BETWEEN)
            self._own_times.step_ended()
        step_s, self._stepped_at = now - self._stepped_at, now
        others = self._skipped_per_followed(step_s)
        if self._to_skip:
            self._to_skip = min(self._to_skip - 1, others)
        elif self._vitals.warm:
            self._to_skip = others
        self._skips = self._to_skip > 0
        if not self._skips:
            self._arm()
            self._own_times.step_begins(now)
            if self._own_times.device is None and uses_device():
                self._own_times.device = DeviceTimes(self._vitals, sys.modules["torch"].cuda)

    def _skipped_per_followed(self, step_s: float) -> int:
        """Return how many steps of that length to skip for each one that is followed."""
        if self.drag is not None:
            return 0
        device = self._own_times.device
        cost_s = COST_S if device is None else device.cost_s
        return min(MOST_SKIPPED, int(cost_s / (SHARE * max(step_s, 1e-6))))

    def _mark(self, phase: int) -> None:
        now = time.monotonic()
        self._vitals.mark(phase, now)
        self._own_times.mark(phase, now)

    def _forward(self) -> None:
        self._mark(FORWARD)
        if self.drag is not None:
            self.drag()

    def _trains(self) -> bool:
        return get_ident() == self._vitals.trainer

    # ---- hooks ----

    def _on_optimizer(self, module: ModuleType) -> None:
        def before(*args: Any) -> None:
            if not self._skips and self._trains():
                self._mark(OPTIMIZER)
                if self._compiles:
                    self._inspect(args[0])

        def after(*_: Any) -> None:
            if self._trains():
                self._step_ended()

        for hook in (before, after):
            hook._torchdynamo_disable = True  # type: ignore[attr-defined]
        module.register_optimizer_step_pre_hook(before)
        module.register_optimizer_step_post_hook(after)

    def _inspect(self, optimizer: Any) -> None:
        """Learn whether a compiled model, whose modules are not seen, is sharded."""
        if self._stepped is None or self._stepped() is not optimizer:
            self._stepped = weakref.ref(optimizer)
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            sharded = any(map(_is_shard, parameters))
            self._vitals.waiting = ALSO_IN_FORWARD if sharded else WITH_GRADIENTS

    def _on_loader(self, module: ModuleType) -> None:
        from holdfast.data.in_process import InProcessBatches  # It needs torch.

        iterators: tuple[Any, Any] = (module._BaseDataLoaderIter, InProcessBatches)
        for iterator in iterators:
            iterator.__next__ = self._marked(iterator.__next__, DATA)

    def _on_autograd(self, module: ModuleType) -> None:
        module.__dict__["backward"] = self._marked(module.backward, BACKWARD)

    def _marked(self, real: Callable[..., Any], phase: int) -> Callable[..., Any]:
        """Wrap a function that is a phase of its own when the training thread calls it."""

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._skips or self._within or not self._trains():
                return real(*args, **kwargs)
            self._within = True
            self._mark(phase)
            try:
                return real(*args, **kwargs)
            finally:
                self._within = False
                if phase == DATA and self._compiles:
                    self._forward()
                else:
                    self._mark(BETWEEN)
                    self._arm()

        return call

    def _on_module(self, module: ModuleType) -> None:
        hooks, torch = module._global_forward_pre_hooks, sys.modules["torch"]

        def called(root: Any, *_: Any) -> None:
            if torch.compiler.is_compiling() or self._within or not self._trains():
                return
            if _is_ddp(root):
                self._reduced = weakref.ref(root.module)
                # DDP waits for rank 0's buffers before it calls its module.
                self._own_times.waits_until_marked(time.monotonic())
                return
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
        """Return which times include invisible waits when that module is trained."""
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
    """Return whether each rank holds only a part of the module's parameters."""
    return any(map(_is_shard, root.parameters())) or any(
        type(module).__name__ == "FullyShardedDataParallel" for module in root.modules()
    )


def _is_shard(parameter: Any) -> bool:
    return hasattr(parameter, "_local_tensor") or type(parameter).__name__ == "FlatParameter"


def _is_ddp(module: Any) -> bool:
    return hasattr(module, "will_sync_module_buffers")
