"""Keeps snapshots in memory and checkpoints on storage: see `docs/checkpoints.md`.

`AsyncWriter` and `async_save` replace `torch.distributed.checkpoint.async_save`. They are imported when
first used, because the keeper, the agent and the command line import this package without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.async_writer import AsyncWriter as AsyncWriter
    from holdfast.checkpoint.async_writer import async_save as async_save

_LAZY = {
    "AsyncWriter": "holdfast.checkpoint.async_writer",
    "async_save": "holdfast.checkpoint.async_writer",
}

__all__ = ["AsyncWriter", "async_save"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
