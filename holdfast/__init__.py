"""Training that does not stop.

    import holdfast

    holdfast.progress(step)          # this step is finished; needed only where the hook is wrong
    with holdfast.section("checkpoint"):
        ...                          # this is neither training nor lost: book it as what it is

These do nothing, at no cost, in a process that `holdfast run` did not start. What follows asks the
job's coordinator, and raises `holdfast.errors.NotUnderHoldfast` where there is none:

    store = holdfast.store()         # a torch Store; its keys live and die with the round
    holdfast.barrier("loaded")       # wait for all ranks of the round
    tally = holdfast.vote("stop?", loss < goal)
    if tally.all_yes:
        holdfast.stop_job("converged", code=0)
    holdfast.exclude_this_node("its GPU throttles")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast.checkpoint.storage.retention import KeepAll as KeepAll
    from holdfast.checkpoint.storage.retention import KeepEvery as KeepEvery
    from holdfast.checkpoint.storage.retention import KeepLatest as KeepLatest
    from holdfast.worker.api import Tally as Tally
    from holdfast.worker.api import barrier as barrier
    from holdfast.worker.api import exclude_this_node as exclude_this_node
    from holdfast.worker.api import heartbeat as heartbeat
    from holdfast.worker.api import on_straggler as on_straggler
    from holdfast.worker.api import progress as progress
    from holdfast.worker.api import section as section
    from holdfast.worker.api import stop_job as stop_job
    from holdfast.worker.api import store as store
    from holdfast.worker.api import vote as vote
    from holdfast.worker.checkpointer import Checkpointer as Checkpointer

_LAZY = {
    "Checkpointer": "holdfast.worker.checkpointer",
    "KeepAll": "holdfast.checkpoint.storage.retention",
    "KeepEvery": "holdfast.checkpoint.storage.retention",
    "KeepLatest": "holdfast.checkpoint.storage.retention",
    "Tally": "holdfast.worker.api",
    "barrier": "holdfast.worker.api",
    "exclude_this_node": "holdfast.worker.api",
    "heartbeat": "holdfast.worker.api",
    "on_straggler": "holdfast.worker.api",
    "progress": "holdfast.worker.api",
    "section": "holdfast.worker.api",
    "stop_job": "holdfast.worker.api",
    "store": "holdfast.worker.api",
    "vote": "holdfast.worker.api",
}

__all__ = [
    "Checkpointer",
    "KeepAll",
    "KeepEvery",
    "KeepLatest",
    "Tally",
    "__version__",
    "barrier",
    "exclude_this_node",
    "heartbeat",
    "on_straggler",
    "progress",
    "section",
    "stop_job",
    "store",
    "vote",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
