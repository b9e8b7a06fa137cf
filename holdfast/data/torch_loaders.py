"""Makes the torch loaders that read, in the training process or in loader processes.

What `ElasticDataLoader` gives to torch are whole batches, as if each were a record: torch keeps their
order, prefetches and pins them, and knows nothing of positions. Without loader processes there is
nothing for torch to do, and batches are read directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, get_worker_info

from holdfast.data.in_process import InProcessBatches
from holdfast.data.lockstep import BatchPlan, Division
from holdfast.data.open_step import StepShare
from holdfast.data.order import Order
from holdfast.data.reading import BatchReader, BatchRequest, Collate
from holdfast.data.stream import StreamReader
from holdfast.errors import UsageError
from holdfast.messages.tuning import LoaderConfig

_CHUNK: Final = 8192
"""Positions that are translated into records at once."""


@dataclass(frozen=True)
class LoadTerms:
    """How data is loaded: all of it may change between two steps without touching the order."""

    batch_size: int
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    multiprocessing_context: Any
    worker_init_fn: Callable[[int], None] | None
    pin_memory: bool
    timeout: float
    generator: torch.Generator

    def __post_init__(self) -> None:
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise UsageError(f"batch_size={self.batch_size!r} is no whole number from 1 on")
        if type(self.num_workers) is not int or self.num_workers < 0:
            raise UsageError(f"num_workers={self.num_workers!r} is no whole number from 0 on")

    def for_job(self) -> LoaderConfig:
        """Return what the job may change, as it is now."""
        return LoaderConfig(
            micro_batch=self.batch_size,
            workers=self.num_workers,
            prefetch=self.prefetch_factor or 2,
        )

    def for_torch(self) -> dict[str, Any]:
        """Return arguments of a DataLoader; it refuses some of them without loader processes."""
        always = {"pin_memory": self.pin_memory, "generator": self.generator}
        if not self.num_workers:
            return always
        return {
            **always,
            "num_workers": self.num_workers,
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": self.persistent_workers,
            "multiprocessing_context": self.multiprocessing_context,
            "worker_init_fn": partial(_prepare_process, self.worker_init_fn),
            "timeout": self.timeout,
        }


BatchSource = Callable[[Iterator[BatchRequest]], Iterator[Any]]
"""Reads the batches that it is asked for, in that order."""


def batch_source(reader: BatchReader, terms: LoadTerms) -> BatchSource:
    """Make a source of batches of a map-style data set; its loader processes may persist in it."""
    if terms.num_workers or terms.pin_memory:
        return WholeBatchLoader(reader, terms)
    return partial(InProcessBatches, reader.__getitem__)


class WholeBatchLoader:
    """A torch loader to which a batch is a record."""

    def __init__(self, reader: BatchReader, terms: LoadTerms) -> None:
        self._requests = _RequestSource()
        self.loader = DataLoader(
            reader,
            batch_size=None,
            sampler=self._requests,
            collate_fn=_as_it_is,
            **terms.for_torch(),
        )

    def __call__(self, requests: Iterator[BatchRequest]) -> Iterator[Any]:
        self._requests.now = requests
        return iter(self.loader)


class _RequestSource:
    """Sampler that iterates over what it was given last."""

    now: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.now


def stream_loader(reader: StreamReader, collate: Collate, drop_last: bool, terms: LoadTerms) -> Any:
    """Make a loader of batches of a stream, each with what it took from which partition."""
    arguments = terms.for_torch()
    arguments.pop(
        "persistent_workers", None
    )  # Loader processes know from where they began to read.
    return DataLoader(
        reader,
        batch_size=terms.batch_size,
        drop_last=drop_last,
        collate_fn=partial(reader.collate, collate),
        **arguments,
    )


def batch_requests(
    division: Division,
    order: Order,
    listed: list[list[Any]] | None,
    ahead: deque[BatchPlan],
) -> Iterator[BatchRequest]:
    """Iterate over a rank's batches; note the plan of each in `ahead`.

    `listed` are the batches of a batch sampler, if positions count these.
    """
    positions, records = division.positions, list[int]()
    start, distance, epoch = positions.start, positions.step, division.epoch
    base = at = 0
    for plan in division.plans():
        end = at + plan.fresh
        if end > base + len(records):
            records = order.records(positions[at : max(end, at + _CHUNK)])
            base = at
        taken: list[Any] = records[at - base : end - base]
        first, listed_at = start + at * distance, None
        if plan.filler is not None:
            listed_at = [*positions[at:end], plan.filler]
            first = listed_at[0]
            taken.append(order.record(plan.filler))
        at = end
        if listed is not None:
            listed_at = [number for number in taken for _ in listed[number]]
            taken = [record for number in taken for record in listed[number]]
        ahead.append(plan)
        yield epoch, first, distance, taken, listed_at


def share_requests(
    share: StepShare,
    order: Order,
    listed: list[list[Any]] | None,
    ahead: deque[BatchPlan],
) -> Iterator[BatchRequest]:
    """Iterate over the batches of a step that was interrupted, as `batch_requests` does."""
    for part, plan in zip(share.parts, share.plans(), strict=True):
        at = list(part or share.filler)
        first, taken = at[0], list[Any](order.records(at))
        if listed is not None:
            at = [number for number in taken for _ in listed[number]]
            taken = [record for number in taken for record in listed[number]]
        ahead.append(plan)
        yield share.step.epoch, first, 1, taken, at


def _prepare_process(init: Callable[[int], None] | None, worker: int) -> None:
    """Make `get_worker_info().dataset` the user's, as in torch's own loader."""
    info = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # torch made it read-only.
    if init is not None:
        init(worker)


def _as_it_is(batch: Any) -> Any:
    return batch
