"""Functions that are left and entered again when a rank fails: see `docs/inprocess.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy_names import lazily

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
    from holdfast.inprocess.kept.keep import KeptState as KeptState
    from holdfast.inprocess.kept.keep import keep as keep
    from holdfast.inprocess.leaving import Departure as Departure
    from holdfast.inprocess.restarts import restartable as restartable

_HOMES = {
    "Context": "holdfast.inprocess.context",
    "Departure": "holdfast.inprocess.leaving",
    "FaultCounter": "holdfast.inprocess.hooks",
    "HookState": "holdfast.inprocess.hooks",
    "KeptState": "holdfast.inprocess.kept.keep",
    "RetryLimits": "holdfast.inprocess.hooks",
    "StopRestarting": "holdfast.errors",
    "UnfitProcess": "holdfast.errors",
    "check_device": "holdfast.inprocess.hooks",
    "compose": "holdfast.inprocess.composition",
    "keep": "holdfast.inprocess.kept.keep",
    "on_thread": "holdfast.inprocess.hooks",
    "restartable": "holdfast.inprocess.restarts",
}
"""The module of each name."""

__all__ = [*sorted(_HOMES), "assignment"]

__getattr__, __dir__ = lazily(globals(), _HOMES, ("assignment",))
