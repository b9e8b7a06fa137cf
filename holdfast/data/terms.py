"""Checks and names what a loader is asked for."""

from __future__ import annotations

from typing import Any, get_args

from torch.utils.data import IterableDataset

from holdfast.data.reading import Seeding
from holdfast.data.stream import ElasticIterableDataset
from holdfast.errors import UsageError
from holdfast.messages.data import OrderKind, Task

MAX_NAME_CHARS = 128
MAX_SUB_EPOCHS = 1 << 20


def stream_of(dataset: Any) -> ElasticIterableDataset | None:
    """Return the data set if it is a stream, and None if it is map-style; UsageError if neither."""
    if isinstance(dataset, ElasticIterableDataset):
        return dataset
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            f"ElasticDataLoader cannot share {type(dataset).__name__} among ranks exactly: an "
            "IterableDataset has no positions. Make it a holdfast.data.ElasticIterableDataset "
            "(partitions with offsets) or a map-style data set, or give torchdata's "
            "StatefulDataLoader to the Checkpointer, which then resumes only with the same number of "
            "ranks"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{type(dataset).__name__} is no map-style data set: it needs __getitem__ and __len__"
        )
    return None


def checked_name(name: str | None) -> str:
    """Return the name of a data set; "data" if it was given none."""
    if name is None:
        return "data"
    fits = isinstance(name, str) and 1 <= len(name) <= MAX_NAME_CHARS
    if not fits or not name.isprintable():
        raise UsageError(f"name={name!r} is no text of 1 to {MAX_NAME_CHARS} printable characters")
    return name


def checked_task(task: str) -> Task:
    if task not in get_args(Task):
        raise UsageError(f"task={task!r} is none of {', '.join(get_args(Task))}")
    return task  # type: ignore[return-value]


def order_kind(shuffle: bool | str | None) -> OrderKind:
    """Return the order that was asked for."""
    if shuffle in (True, "records"):
        return "records"
    if shuffle == "shards":
        return "shards"
    if shuffle in (None, False):
        return "plain"
    raise UsageError(f'shuffle={shuffle!r} is none of False, True, "records" and "shards"')


def check_batching(
    *,
    batch_size: int,
    global_batch: int | None,
    drop_last: bool,
    pad: bool,
    sub_epochs: int,
    order: OrderKind,
    seeding: Seeding,
    makes_batches: bool,
    stream: bool,
) -> None:
    """Refuse what does not go together; `makes_batches` says whether there is a batch sampler."""
    if drop_last and pad:
        raise UsageError("drop_last and pad exclude each other: leave out the rest, or fill it up")
    if global_batch is not None:
        if type(global_batch) is not int or global_batch < 1:
            raise UsageError(f"global_batch={global_batch!r} is no whole number from 1 on")
        if pad:
            raise UsageError(
                "pad and global_batch exclude each other: a padded step has more records"
            )
    if type(sub_epochs) is not int or not 1 <= sub_epochs <= MAX_SUB_EPOCHS:
        raise UsageError(f"sub_epochs={sub_epochs!r} is no whole number from 1 to {MAX_SUB_EPOCHS}")
    arranged = bool(global_batch) or order != "plain" or pad
    if makes_batches and (batch_size != 1 or arranged or stream):
        raise UsageError(
            "batch_sampler makes the batches itself: it excludes batch_size, global_batch, "
            "shuffle, pad, and data sets that are streams"
        )
    if makes_batches and seeding == "records":
        raise UsageError(
            'seed_workers="records" needs positions of records: it excludes batch_sampler'
        )
    if stream and arranged:
        raise UsageError("a stream has no size: it excludes global_batch, shuffle and pad")


def seeding_asked(asked: bool | str) -> Seeding:
    if asked in (True, "batches"):
        return "batches"
    if asked == "records":
        return "records"
    if asked is False:
        return "off"
    raise UsageError(f'seed_workers={asked!r} is none of True, False, "batches" and "records"')
