"""Counts training steps, and hands rank 0's store its socket, in scripts that do not know Holdfast.

**Steps.** Torch calls global hooks around every step of every optimizer. Only the first optimizer of a
process counts, so that a script with two (a GAN) is not counted twice; when it is gone, the next one
takes its place. After a resume the number of earlier steps is read from the optimizer's state, if it
keeps one (Adam does, plain SGD does not).

**Store.** The agent created the socket of rank 0's store before the round was agreed, so no other
process can have its port, and ranks that are faster than rank 0 wait in its backlog; after a refused
connection they would wait a second before the next attempt.

Both are installed when the module concerned is imported, if it is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from holdfast.worker.runtime import Runtime
from holdfast.worker.torch_hooks.imports import when_imported

_OPTIMIZER = "torch.optim.optimizer"
_RENDEZVOUS = "torch.distributed.rendezvous"


class StepCounter:
    """Hooks that torch calls before and after each optimizer step."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._counted: weakref.ref[Any] | None = None
        self._outermost: FrameType | None = None
        """Frame of the outermost step in progress, or of one that failed."""

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._outermost is None:
            self._outermost = sys._getframe(1)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        wrapper = sys._getframe(1)  # torch's, which called the hook
        if wrapper is not self._outermost and _is_inner(optimizer, wrapper):
            return
        self._outermost = None
        if self._counted is None or self._counted() is not optimizer:
            if self._counted is not None and self._counted() is not None:
                return
            self._counted = weakref.ref(optimizer)
            self._runtime.hook_stepped(_steps_in_state(optimizer) - 1)
        else:
            self._runtime.hook_stepped(0)


# A script may compile its optimizer's step: torch's compiler must skip these, without a warning.
for _hook in (StepCounter.before, StepCounter.after):
    _hook._torchdynamo_disable = True  # type: ignore[attr-defined]


def _is_inner(optimizer: Any, wrapper: FrameType) -> bool:
    """Return whether this step is part of another one of the same optimizer: `super().step()`."""
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is wrapper.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _steps_in_state(optimizer: Any) -> int:
    """Return the optimizer's own count of steps, including this one; 1 if it keeps none."""
    try:
        for state in optimizer.state.values():
            if isinstance(state, dict) and "step" in state:
                return max(1, int(state["step"]))
    except Exception:  # A user's own optimizer may keep anything under that name.
        pass
    return 1


def count_steps(runtime: Runtime) -> None:
    """Register the hooks, now or as soon as torch is imported."""
    counter = StepCounter(runtime)

    def register(module: ModuleType) -> None:
        module.register_optimizer_step_pre_hook(counter.before)
        module.register_optimizer_step_post_hook(counter.after)

    when_imported(_OPTIMIZER, register)


def host_store(listener_fd: int, port: int) -> None:
    """Make the store that rank 0 creates at that port use the socket that already listens there."""
    unused = [listener_fd]

    def patch(module: ModuleType) -> None:
        make: Callable[..., Any] = module.TCPStore

        def make_store(**arguments: Any) -> Any:
            if unused and arguments.get("is_master") and arguments.get("port") == port:
                arguments["master_listen_fd"] = unused.pop()
            return make(**arguments)

        module.__dict__["TCPStore"] = make_store

    when_imported(_RENDEZVOUS, patch)
