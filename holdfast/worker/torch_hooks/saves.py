"""Books the saves that a script makes by itself as sections named "checkpoint".

Storage may be slow without a fault, and while rank 0 writes, the other ranks wait for it. So
`torch.save` to a file, and torch's distributed checkpoints, get a deadline of their own and are booked
as checkpoints. A save into memory is not: scripts make those for many reasons.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from holdfast.worker.runtime import Runtime
from holdfast.worker.torch_hooks.imports import when_imported

_DISTRIBUTED = ("save", "async_save", "save_state_dict")


def book_saves(runtime: Runtime) -> None:
    """Wrap the functions that save, now or as soon as they are imported."""

    def on_serialization(module: ModuleType) -> None:
        _wrap(runtime, "save", [module, sys.modules.get("torch")], _is_to_memory)

    def on_distributed(module: ModuleType) -> None:
        package = sys.modules.get("torch.distributed.checkpoint")
        for name in _DISTRIBUTED:
            _wrap(runtime, name, [module, package], lambda *_, **__: False)

    when_imported("torch.serialization", on_serialization)
    when_imported("torch.distributed.checkpoint.state_dict_saver", on_distributed)


def _wrap(
    runtime: Runtime, name: str, homes: list[ModuleType | None], to_memory: Callable[..., bool]
) -> None:
    """Put a section around a function, in each module that has it."""
    real = getattr(homes[0], name, None)
    if real is None:  # Another version of torch.
        return

    @functools.wraps(real)
    def save(*args: Any, **kwargs: Any) -> Any:
        if to_memory(*args, **kwargs):
            return real(*args, **kwargs)
        with runtime.section("checkpoint"):
            return real(*args, **kwargs)

    for home in homes:
        if home is not None and home.__dict__.get(name) is real:
            home.__dict__[name] = save


def _is_to_memory(obj: Any = None, f: Any = None, *_: Any, **__: Any) -> bool:
    return isinstance(f, io.BytesIO)
