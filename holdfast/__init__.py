"""Keeps distributed training going: the public API of Holdfast, imported lazily.

    import holdfast

    holdfast.progress(step)          # report a finished step; needed only where the hook is wrong
    with holdfast.section("checkpoint"):
        ...                          # booked under its own cause, with its own hang deadline
    with holdfast.evaluating():
        ...                          # no training: not part of the job's speed
    holdfast.rank_info()             # rank, world size, round, restarts
    holdfast.track(writer)           # goodput, incidents and speed into TensorBoard, MLflow, W&B

These also work, at almost no cost, in a process that `holdfast run` did not start. The following ask
the job's coordinator, and raise `holdfast.errors.NotUnderHoldfast` where there is none:

    store = holdfast.store()         # a torch Store; its keys end with the round
    holdfast.barrier("loaded")       # wait for all ranks of the round
    tally = holdfast.vote("stop?", loss < goal)
    if tally.all_yes:
        holdfast.stop_job("converged", code=0)
    holdfast.exclude_this_node("its GPU throttles")
    holdfast.scale((4, 8))           # another number of nodes

`holdfast.data` loads each record of a data set exactly once an epoch, whatever dies.

`docs/api.md` lists everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy_names import lazily

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast import data as data
    from holdfast import errors as errors
    from holdfast import inprocess as inprocess
    from holdfast.checkpoint.storage.retention import KeepAll as KeepAll
    from holdfast.checkpoint.storage.retention import KeepEvery as KeepEvery
    from holdfast.checkpoint.storage.retention import KeepLatest as KeepLatest
    from holdfast.checkpoint.tickets import Result as Result
    from holdfast.checkpoint.tickets import Ticket as Ticket
    from holdfast.messages.requests import Tally as Tally
    from holdfast.messages.timings import Finding as Finding
    from holdfast.worker.api import RankInfo as RankInfo
    from holdfast.worker.api import barrier as barrier
    from holdfast.worker.api import evaluating as evaluating
    from holdfast.worker.api import exclude_this_node as exclude_this_node
    from holdfast.worker.api import heartbeat as heartbeat
    from holdfast.worker.api import is_active as is_active
    from holdfast.worker.api import on_straggler as on_straggler
    from holdfast.worker.api import progress as progress
    from holdfast.worker.api import rank_info as rank_info
    from holdfast.worker.api import restarts as restarts
    from holdfast.worker.api import round as round
    from holdfast.worker.api import scale as scale
    from holdfast.worker.api import section as section
    from holdfast.worker.api import stop_job as stop_job
    from holdfast.worker.api import store as store
    from holdfast.worker.api import track as track
    from holdfast.worker.api import vote as vote
    from holdfast.worker.checkpointer import Checkpointer as Checkpointer
    from holdfast.worker.elastic_trainer import ElasticTrainer as ElasticTrainer

_HOMES = {
    "Checkpointer": "holdfast.worker.checkpointer",
    "ElasticTrainer": "holdfast.worker.elastic_trainer",
    "Finding": "holdfast.messages.timings",
    "KeepAll": "holdfast.checkpoint.storage.retention",
    "KeepEvery": "holdfast.checkpoint.storage.retention",
    "KeepLatest": "holdfast.checkpoint.storage.retention",
    "RankInfo": "holdfast.worker.api",
    "Result": "holdfast.checkpoint.tickets",
    "Tally": "holdfast.messages.requests",
    "Ticket": "holdfast.checkpoint.tickets",
    "barrier": "holdfast.worker.api",
    "evaluating": "holdfast.worker.api",
    "exclude_this_node": "holdfast.worker.api",
    "heartbeat": "holdfast.worker.api",
    "is_active": "holdfast.worker.api",
    "on_straggler": "holdfast.worker.api",
    "progress": "holdfast.worker.api",
    "rank_info": "holdfast.worker.api",
    "restarts": "holdfast.worker.api",
    "round": "holdfast.worker.api",
    "scale": "holdfast.worker.api",
    "section": "holdfast.worker.api",
    "stop_job": "holdfast.worker.api",
    "store": "holdfast.worker.api",
    "track": "holdfast.worker.api",
    "vote": "holdfast.worker.api",
}
"""The module of each name."""

__all__ = [
    "Checkpointer",
    "ElasticTrainer",
    "Finding",
    "KeepAll",
    "KeepEvery",
    "KeepLatest",
    "RankInfo",
    "Result",
    "Tally",
    "Ticket",
    "__version__",
    "barrier",
    "data",
    "errors",
    "evaluating",
    "exclude_this_node",
    "heartbeat",
    "inprocess",
    "is_active",
    "on_straggler",
    "progress",
    "rank_info",
    "restarts",
    "round",
    "scale",
    "section",
    "stop_job",
    "store",
    "track",
    "vote",
]

__getattr__, __dir__ = lazily(globals(), _HOMES, ("data", "errors", "inprocess"))
