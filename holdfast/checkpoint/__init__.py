"""Snapshots in memory, checkpoints on storage: see `docs/checkpoints.md`.

`AsyncWriter` and `async_save` stand in for `torch.distributed.checkpoint.async_save`. They are
imported when they are used: the keeper, the agent and the command line live here too, without torch.
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
