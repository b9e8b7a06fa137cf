"""What we add to torch in a worker, for scripts that never heard of Holdfast.

**Steps are counted.** Torch lets one register a hook that is called after every step of every
optimizer. Only the first
optimizer of a process counts, so that a script with two of them (a GAN) does not count twice; when
it is gone, the next one takes its place. A script that resumed from a checkpoint has the number of
its steps in the optimizer's state where the optimizer keeps one (Adam does, plain SGD does not).

**Rank 0's store takes over a socket that listens already.** The agent made it before the round was
agreed, so its port can be nobody else's, and ranks that are quicker than rank 0 wait in its queue for
a moment, where a refused connection would have made them wait a second before they try again.

Both are added when the module concerned is imported, and a script that never imports torch never
knows.
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
    """Called by torch before and after each optimizer step."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._counted: weakref.ref[Any] | None = None
        self._outermost: FrameType | None = None
        """Where the step that is under way was called; or one was that failed."""

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


# A script may compile its optimizer's step: torch's compiler is to leave these out, without a word.
for _hook in (StepCounter.before, StepCounter.after):
    _hook._torchdynamo_disable = True  # type: ignore[attr-defined]


def _is_inner(optimizer: Any, wrapper: FrameType) -> bool:
    """Whether this step is part of another of the same optimizer: a subclass's `super().step()`."""
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is wrapper.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _steps_in_state(optimizer: Any) -> int:
    """How many steps the optimizer says it took, this one included; 1 when it does not say."""
    try:
        for state in optimizer.state.values():
            if isinstance(state, dict) and "step" in state:
                return max(1, int(state["step"]))
    except Exception:  # The user's own optimizer may keep anything under that name.
        pass
    return 1


def count_steps(runtime: Runtime) -> None:
    """Register the hook now, or as soon as torch is imported."""
    counter = StepCounter(runtime)

    def register(module: ModuleType) -> None:
        module.register_optimizer_step_pre_hook(counter.before)
        module.register_optimizer_step_post_hook(counter.after)

    when_imported(_OPTIMIZER, register)


def host_store(listener_fd: int, port: int) -> None:
    """Let the store that rank 0 makes at that port use the socket that listens there already."""
    unused = [listener_fd]

    def patch(module: ModuleType) -> None:
        make: Callable[..., Any] = module.TCPStore

        def make_store(**arguments: Any) -> Any:
            if unused and arguments.get("is_master") and arguments.get("port") == port:
                arguments["master_listen_fd"] = unused.pop()
            return make(**arguments)

        module.__dict__["TCPStore"] = make_store

    when_imported(_RENDEZVOUS, patch)
