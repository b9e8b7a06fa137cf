"""Hands the batches of a stream to the script, and notes for the job what they took from where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from holdfast.data.in_job import LoaderInJob
from holdfast.data.lockstep import BatchInfo, Replicas
from holdfast.data.place import LoaderPlace
from holdfast.data.reading import UnreadBatch
from holdfast.data.stream import ElasticIterableDataset, Taken
from holdfast.messages.data import DataSpec, Task


def stream_spec(stream: ElasticIterableDataset, task: Task) -> DataSpec:
    """Return what the job is told of a stream."""
    return DataSpec(
        name=stream.name,
        sharing="lockstep",
        partitions=tuple(stream.partition_list()),
        task=task,
        exact=task == "training",
    )


def deliver_stream(
    batches: Iterable[tuple[dict[str, Taken], Any]],
    stream: ElasticIterableDataset,
    world: Replicas,
    place: LoaderPlace,
    job: LoaderInJob | None,
) -> Iterator[Any]:
    """Iterate over batches; with each, the offsets of the stream advance."""
    iteration = place.iteration
    lines = {name: line for line, name in enumerate(stream.partition_list())}
    for read, batch in batches:
        if iteration != place.iteration:
            place.refuse(stream.name)
        if isinstance(batch, UnreadBatch):
            raise batch.to_raise()
        count = sum(taken[2] for taken in read.values())
        if job is not None:
            _report(job, read, lines, count)
        stream.delivered(read)
        place.current = BatchInfo(count, count * world.size, 0, 1, 0, 0)
        yield batch
        if iteration != place.iteration:
            place.refuse(stream.name)


def _report(
    job: LoaderInJob, read: Mapping[str, Taken], lines: Mapping[str, int], count: int
) -> None:
    job.report.check()
    job.report.delivered(count)
    for name, (start, stop, records) in read.items():
        job.report.used(lines[name], start, stop, records)
