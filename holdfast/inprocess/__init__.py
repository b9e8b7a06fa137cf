"""Functions that are left and entered again when a rank fails: see `docs/inprocess.md`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.errors import StopRestarting as StopRestarting
    from holdfast.errors import UnfitProcess as UnfitProcess
    from holdfast.inprocess import assignment as assignment
    from holdfast.inprocess.composition import compose as compose
    from holdfast.inprocess.context import Context as Context
    from holdfast.inprocess.hooks import FaultCounter as FaultCounter
    from holdfast.inprocess.hooks import HookState as HookState
    from holdfast.inprocess.hooks import RetryLimits as RetryLimits
    from holdfast.inprocess.hooks import check_device as check_device
    from holdfast.inprocess.hooks import on_thread as on_thread
    from holdfast.inprocess.kept.keep import Kept as Kept
    from holdfast.inprocess.kept.keep import keep as keep
    from holdfast.inprocess.leaving import Departure as Departure
    from holdfast.inprocess.restartable import restartable as restartable

_HOMES = {
    "Context": "holdfast.inprocess.context",
    "Departure": "holdfast.inprocess.leaving",
    "FaultCounter": "holdfast.inprocess.hooks",
    "HookState": "holdfast.inprocess.hooks",
    "Kept": "holdfast.inprocess.kept.keep",
    "RetryLimits": "holdfast.inprocess.hooks",
    "StopRestarting": "holdfast.errors",
    "UnfitProcess": "holdfast.errors",
    "check_device": "holdfast.inprocess.hooks",
    "compose": "holdfast.inprocess.composition",
    "keep": "holdfast.inprocess.kept.keep",
    "on_thread": "holdfast.inprocess.hooks",
    "restartable": "holdfast.inprocess.restartable",
}
"""The module of each name."""

__all__ = [*sorted(_HOMES), "assignment"]


def __getattr__(name: str) -> Any:
    if name == "assignment":
        return importlib.import_module("holdfast.inprocess.assignment")
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.inprocess' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # The next use does not come here.
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
