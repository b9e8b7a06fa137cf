"""Extends torch for scripts that do not know Holdfast.

**Steps are counted.** Torch calls global hooks around every step of every optimizer. Only the first
optimizer of a process counts, so that a script with two (a GAN) is not counted twice; when it is gone,
the next one takes its place. After a resume the number of earlier steps is read from the optimizer's
state, if it keeps one (Adam does, plain SGD does not); else see `worker.resumption`, which is told of
what the script saves and loads.

**Saves are sections.** Storage may be slow without a fault, and while rank 0 writes, the other ranks
wait for it. So `torch.save` to a file, and torch's distributed checkpoints, are sections named
"checkpoint", with a deadline of their own. A save into memory is not: scripts make those for many
reasons.

**Rank 0's store has its socket.** The agent created it before the round was agreed, so no other process
can have its port, and ranks that are faster than rank 0 wait in its backlog; after a refused connection
they would wait a second before the next attempt.

Each patch is applied when the module concerned is imported, if it is.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType, ModuleType
from typing import Any

from holdfast.worker.runtime import Runtime
from holdfast.worker.torch_hooks.imports import when_imported

Call = Callable[..., Any]


def count_steps(runtime: Runtime) -> None:
    """Register hooks that count optimizer steps."""
    counter = StepCounter(runtime)
    runtime.when_renewed.append(counter.forget)

    def register(module: ModuleType) -> None:
        module.register_optimizer_step_pre_hook(counter.before)
        module.register_optimizer_step_post_hook(counter.after)

    when_imported("torch.optim.optimizer", register)


class StepCounter:
    """Hooks that torch calls before and after each optimizer step."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._counted: weakref.ref[Any] | None = None
        self._outermost: FrameType | None = None
        """Frame of the outermost step in progress, or of one that failed."""

    def forget(self) -> None:
        """Count any optimizer from now on."""
        self._counted = self._outermost = None

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


def book_saves(runtime: Runtime) -> None:
    """Wrap the functions that save in sections, in each module that has them."""

    def book(real: Call, written: Call) -> Call:
        def save(*args: Any, **kwargs: Any) -> Any:
            target = written(args, kwargs)
            if isinstance(target, io.BytesIO):
                return real(*args, **kwargs)
            note = runtime.noting()
            with runtime.section("checkpoint"):
                result = real(*args, **kwargs)
            pending = getattr(result, "upload_completion", result)
            if isinstance(pending, Future):
                pending.add_done_callback(lambda _: note(target))
            else:
                note(target)
            return result

        return save

    def on_distributed(module: ModuleType) -> None:
        for name in ("save", "async_save", "save_state_dict"):
            homes = (module, sys.modules.get("torch.distributed.checkpoint"))
            _wrap(name, lambda real: book(real, _metadata_file), *homes)

    def on_torch(module: ModuleType) -> None:
        _wrap("save", lambda real: book(real, _second("f")), module, sys.modules["torch"])

    def on_safetensors(module: ModuleType) -> None:
        _wrap("save_file", lambda real: book(real, _second("filename")), module)

    when_imported("torch.serialization", on_torch)
    when_imported("torch.distributed.checkpoint.state_dict_saver", on_distributed)
    when_imported("safetensors.torch", on_safetensors)


def note_loads(runtime: Runtime) -> None:
    """Note loads that do not open a file in Python."""

    def tell(real: Call, name: str, note: Callable[[Any], None]) -> Call:
        def load(*args: Any, **kwargs: Any) -> Any:
            note(kwargs.get(name, args[0] if args else None))
            return real(*args, **kwargs)

        return load

    def note_source(source: Any) -> None:
        if not isinstance(source, (str, bytes, os.PathLike)) and not _is_file(source):
            runtime.resumption.read_unknown()

    def on_torch(module: ModuleType) -> None:
        homes = (module, sys.modules["torch"])
        _wrap("load", lambda real: tell(real, "f", note_source), *homes)

    def on_safetensors(module: ModuleType) -> None:
        _wrap("load_file", lambda real: tell(real, "filename", runtime.resumption.read), module)

    when_imported("torch.serialization", on_torch)
    when_imported("safetensors.torch", on_safetensors)


def _wrap(name: str, make: Callable[[Call], Call], *homes: ModuleType | None) -> None:
    """Replace a function by a wrapper in each module that has it."""
    real = getattr(homes[0], name, None)
    if real is None:  # Another version of torch.
        return
    wrapper = functools.wraps(real)(make(real))
    for home in homes:
        if home is not None and home.__dict__.get(name) is real:
            home.__dict__[name] = wrapper


def _second(name: str) -> Call:
    """Return a function that finds a call's second argument, by its name or its place."""
    return lambda args, kwargs: kwargs.get(name, args[1] if len(args) > 1 else None)


def _metadata_file(args: Any, kwargs: Any) -> str | None:
    """Return the file that a distributed checkpoint has once it is whole, and every rank reads."""
    writer = kwargs.get("storage_writer", args[1] if len(args) > 1 else None)
    folder = kwargs.get("checkpoint_id") or getattr(writer, "path", None)
    return None if folder is None else os.path.join(os.fspath(folder), ".metadata")


def _is_file(source: Any) -> bool:
    try:
        return isinstance(source.fileno(), int)
    except (AttributeError, OSError, ValueError):
        return False


class StoreSocket:
    """Makes the store that rank 0 creates use the socket that already listens at its port."""

    def __init__(self) -> None:
        self._offered: tuple[int, int] | None = None
        self._served: Any = None
        self._patched = False

    def offer(self, listener_fd: int, port: int) -> None:
        """Offer a socket for the next store at that port."""
        self.withdraw()
        self._offered = port, listener_fd
        if not self._patched:
            self._patched = True
            when_imported("torch.distributed.rendezvous", self._patch)

    def serve(self) -> None:
        """Serve the store in this process, if it has the socket, and have no rank do so."""
        offered, self._offered = self._offered, None
        if offered is not None:
            import torch.distributed as dist

            port, listener_fd = offered
            address = os.environ["MASTER_ADDR"]
            self._served = dist.TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener_fd
            )
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def withdraw(self) -> None:
        """Close a socket that no store was made for, and end the store that this process serves."""
        self._served = None
        if self._offered is not None:
            os.close(self._offered[1])
            self._offered = None

    def _patch(self, module: ModuleType) -> None:
        make: Callable[..., Any] = module.TCPStore

        def make_store(host_name: str, port: int, *args: Any, **more: Any) -> Any:
            offered = self._offered
            if offered is not None and more.get("is_master") and port == offered[0]:
                self._offered = None
                more["master_listen_fd"] = offered[1]
            return make(host_name, port, *args, **more)

        module.__dict__["TCPStore"] = make_store
