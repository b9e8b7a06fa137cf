"""Shards of a data set, for scripts with a loop of their own.

    client = holdfast.data.ShardClient("clicks", size=1_000_000, shard=1000, shuffle=True)
    ckpt = holdfast.Checkpointer("checkpoints", {"model": model, "data": client})
    ckpt.restore()
    for shard in client:
        for record in shard:             # numbers of records
            ...

Each shard goes to one rank: to the one that asks next. What counts as used is what was handed to the
script, record by record; a shard counts whole when the next one is asked for. If the data set is
*exact*, as training data is, that belongs to the model's state: each rank saves what it used, and the
union of all ranks' parts is restored. If not, the coordinator remembers which shards are finished, and
one that was begun is lent again.

A shard that is used in a `with` block fails when the block raises; it is lent again, and given up for
good at its third failure.

Outside of `holdfast run` one process has all shards for itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.data import link
from holdfast.data.lender import AgentShards, Lender, OwnShards
from holdfast.data.order import Order
from holdfast.errors import DataError, NotUnderHoldfast, UsageError
from holdfast.messages.data import DataSpec, OrderKind, Span, Task, Used
from holdfast.messages.requests import OpenData
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import StepNumber

if TYPE_CHECKING:
    from typing_extensions import Self

_FORMAT = 1


class LeasedShard:
    """A shard that is lent to this rank. Iterating over it yields record numbers, each counted as used
    when it is handed out; of a stream, offsets in its partition."""

    __slots__ = ("_at", "_client", "_open", "_safe", "_span", "_step", "_stepped")

    def __init__(self, client: ShardClient, span: Span, step: int) -> None:
        self._client, self._span, self._step = client, span, step
        self._at = span.start
        self._stepped, self._safe = step, span.start
        """The step at the last count, and the position at the first count after it."""
        self._open = True

    def __repr__(self) -> str:
        where = f"partition {self.partition!r}" if self.is_stream else f"epoch {self.epoch}"
        return f"<shard of {self._client.name!r}: {where}, {self.start} to {self.stop - 1}>"

    def __len__(self) -> int:
        return self._span.stop - self._span.start

    @property
    def is_stream(self) -> bool:
        """Whether it is of a stream."""
        return self._client.spec.size is None

    @property
    def epoch(self) -> int:
        """Epoch that it belongs to, from 0; 0 for a stream."""
        return 0 if self.is_stream else self._span.line

    @property
    def sub_epoch(self) -> int:
        """Part of the epoch that it belongs to."""
        spec = self._client.spec
        if spec.size is None:
            return 0
        return ((self._span.start + 1) * spec.sub_epochs - 1) // spec.size

    @property
    def partition(self) -> str:
        """Partition of a stream."""
        return self._client.spec.partitions[self._span.line] if self.is_stream else ""

    @property
    def start(self) -> int:
        """First position, in the order of the epoch; of a stream, the first offset."""
        return self._span.start

    @property
    def stop(self) -> int:
        """The position, or offset, after its last one."""
        return self._span.stop

    @property
    def records(self) -> Sequence[int]:
        """Numbers of its records, in the order in which they are to be used. Reading this counts
        nothing as used: `advance` does, or `finish`."""
        return self._client._records_of(self._span)

    def __iter__(self) -> Iterator[int]:
        for record in self.records[self._at - self._span.start :]:
            self.advance(1)
            yield record

    def advance(self, records: int) -> None:
        """Count the next `records` as used."""
        if not self._open:
            raise UsageError(f"{self!r} was finished, failed or given back before")
        if not 0 <= records <= self._span.stop - self._at:
            left = self._span.stop - self._at
            raise UsageError(f"{self!r} has {left} records left, not {records}")
        step = _step()
        if step != self._stepped:
            self._stepped, self._safe = step, self._at
        self._at += records

    def finish(self) -> None:
        """Count the whole shard as used."""
        if self._open:
            self._at = self._span.stop
            self._close()

    def give_back(self) -> None:
        """Let others have what is left of it."""
        if self._open:
            self._close()

    def fail(self, error: BaseException | str) -> None:
        """Report that this shard cannot be read or processed, with the `error`: it will be lent again,
        but for what earlier steps have used of it."""
        if self._open:
            self._at = self._safe
            self._close(_sentence(error))

    def _close(self, error: str = "") -> None:
        self._open = False
        rest = Span(self._span.line, self._at, self._span.stop)
        self._client._shard_closed(self, rest, error)

    @property
    def used(self) -> Used:
        """What was used of it so far."""
        span = Span(self._span.line, self._span.start, self._at)
        first, last = StepNumber(self._step), StepNumber(max(self._step, self._stepped))
        return Used(span, first, last, self._at - self._span.start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self.fail(error)
        elif error is None:
            self.finish()


class ShardClient:
    """A data set whose shards are lent to ranks, as each asks for more.

    - `name`: the same on all ranks; names the data set in reports and in the saved state.
    - `size`: number of records; or `partitions`: names of a stream's partitions.
    - `shard`: records of a shard.
    - `epochs`: passes over the data; 0 for no end. `sub_epochs`: parts of an epoch.
    - `shuffle`: True shuffles all records of an epoch, "shards" only the shards, False nothing.
      `seed`: the order of every epoch follows from it.
    - `task`: "training", "evaluation" or "prediction"; shown in reports.
    - `exact`: whether what was used is part of the model's state; by default for training.
    - `failures`, `skip`: failures of one shard at which it is given up; then the job stops, or, with
      `skip=True`, goes on without it, and reports list it.
    """

    merged_by_rank_0 = True

    def __init__(
        self,
        name: str,
        *,
        size: int | None = None,
        shard: int = 1000,
        partitions: Sequence[str] = (),
        epochs: int = 1,
        sub_epochs: int = 1,
        shuffle: bool | Literal["shards"] = False,
        seed: int = 0,
        task: Task = "training",
        exact: bool | None = None,
        failures: int = 3,
        skip: bool = False,
    ) -> None:
        if (size is None) == (not partitions):
            raise UsageError(
                f"ShardClient {name!r}: give the number of records (size=...), or the names of a"
                " stream's partitions (partitions=...)"
            )
        order: OrderKind = "shards" if shuffle == "shards" else "records" if shuffle else "plain"
        self.spec = _checked(
            name,
            sharing="leases",
            size=size,
            partitions=tuple(partitions),
            shard=shard,
            epochs=epochs,
            sub_epochs=sub_epochs,
            order=order if size is not None else "plain",
            seed=seed,
            task=task,
            exact=task == "training" if exact is None else exact,
            failures=failures,
            skip=skip,
        )
        self._restored: Literal["fresh", "part", "whole"] = "fresh"
        self._used = SpanSet()
        """What was used before, and by this rank in this round."""
        self._lender: Lender | None = None
        self._open: list[LeasedShard] = []
        self._orders: dict[int, Order] = {}

    @property
    def name(self) -> str:
        """Name of the data set."""
        return self.spec.name

    # ---- taking shards ----

    def __iter__(self) -> Iterator[LeasedShard]:
        """Yield shards until none is left; each counts as used when the next one is asked for."""
        while (shard := self.fetch()) is not None:
            yield shard
            shard.finish()

    def fetch(self, wait: bool | float = True) -> LeasedShard | None:
        """Return the next shard, to be finished, failed or given back by the caller.

        None if there is none any more; or, with `wait=False` or a number of seconds, none in that
        time: then `finished` tells the two apart.
        """
        lender = self._begun()
        span = lender.take(wait)
        if span is None:
            return None
        shard = LeasedShard(self, span, _step())
        self._open.append(shard)
        return shard

    @property
    def finished(self) -> bool:
        """Whether all shards are used, by all ranks."""
        return self._lender is not None and self._lender.finished

    def records(self) -> Iterator[int]:
        """Yield record numbers, shard after shard; each counts as used when it is handed out."""
        for shard in self:
            yield from shard

    def batches(self, size: int) -> Iterator[list[int]]:
        """Yield record numbers in lists of `size`; the last one may be shorter."""
        batch: list[int] = []
        for record in self.records():
            batch.append(record)
            if len(batch) == size:
                yield batch
                batch = []
        if batch:
            yield batch

    def _begun(self) -> Lender:
        if self._lender is None:
            job = link.current()
            if job is None:
                _refuse_many(self.name)
                self._lender = OwnShards(self.spec, self._used)
            else:
                used = self._used.pack() if self._restored == "whole" else b""
                request = OpenData(
                    spec=self.spec,
                    resumed=self._restored,
                    used=used,
                    step=StepNumber(job.step),
                )
                self._used = SpanSet.unpack(job.open(request).used)
                self._lender = AgentShards(job, self.name)
        return self._lender

    # ---- for shards ----

    def _records_of(self, span: Span) -> Sequence[int]:
        if self.spec.size is None:
            return range(span.start, span.stop)
        order = self._orders.get(span.line)
        if order is None:
            spec = self.spec
            assert spec.size is not None
            order = Order(spec.size, spec.order, spec.seed, span.line, spec.shard)
            self._orders = {span.line: order}
        return order.records(range(span.start, span.stop))

    def _shard_closed(self, shard: LeasedShard, rest: Span, error: str) -> None:
        """Report what was used of a shard, and what became of the rest."""
        self._open.remove(shard)
        lender, used = self._begun(), shard.used
        if used.records:
            self._used.add(used.span)
            lender.used(used)
        if error:
            lender.failed(rest, error)
        elif rest.start < rest.stop:
            lender.returned(rest)

    # ---- the state ----

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has used; the state is what all ranks together have."""
        used = self._used.copy()
        for shard in self._open:
            used.add(shard.used.span)
        job = link.current()
        spec = self.spec
        return {
            "format": _FORMAT,
            "name": spec.name,
            "size": spec.size,
            "partitions": list(spec.partitions),
            "order": spec.order,
            "shard": spec.shard,
            "seed": spec.seed,
            "rank": 0 if job is None else job.rank,
            "of": 1 if job is None else job.world_size,
            "used": used.pack(),
        }

    def merge_state_dicts(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all ranks; `parts` are the states of each of them."""
        used = SpanSet()
        for part in parts:
            used.update(self._checked_state(part))
        ranks = {part["rank"] for part in parts}
        if ranks != set(range(parts[0]["of"])):
            raise DataError(
                f"data set {self.name!r}: {parts[0]['of']} ranks saved parts of its state, and those"
                f" of ranks {sorted(ranks)} are there"
            )
        return {**parts[0], "rank": 0, "of": 1, "used": used.pack()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state` of all ranks: nothing that was used before is lent again."""
        used = self._checked_state(state)
        if state["of"] > 1:
            raise DataError(
                f"data set {self.name!r}: this is what rank {state['rank']} of {state['of']} has used;"
                " save the state of all ranks and restore merge_state_dicts() of them, as"
                " holdfast.Checkpointer does"
            )
        self._forget()
        self._used, self._restored = used, "whole"

    def load_part(self, state: dict[str, Any] | None) -> None:
        """Go on from what rank 0 restores; the `state` is this rank's part of it, None without one."""
        if state is not None:
            self._checked_state(state)
        self._forget()
        self._used, self._restored = SpanSet(), "part"

    def _forget(self) -> None:
        if self._lender is not None and link.current() is not None:
            raise UsageError(
                f"data set {self.name!r}: its state is restored before the first shard is taken"
            )
        self._lender = None
        self._open = []

    def _checked_state(self, state: dict[str, Any]) -> SpanSet:
        """Return what a state says was used; DataError if it is of another data set."""
        spec, name = self.spec, f"data set {self.name!r}"
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise DataError(f"{name}: this is not the state of a ShardClient")
        here = {
            "name": spec.name,
            "size": spec.size,
            "partitions": list(spec.partitions),
            "order": spec.order,
            "seed": spec.seed,
            **({"shard": spec.shard} if spec.order == "shards" else {}),
        }
        for what, value in here.items():
            if state.get(what) != value:
                raise DataError(
                    f"{name}: its {what} was {state.get(what)!r} when the state was saved, and is"
                    f" {value!r} now; positions would stand for other records"
                )
        try:
            return SpanSet.unpack(state["used"])
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(f"{name}: its saved state cannot be read: {error}") from None


def _checked(name: str, **fields: Any) -> DataSpec:
    try:
        return msgspec.convert({"name": name, **fields}, DataSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"ShardClient {name!r}: {error}") from None


def _refuse_many(name: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise NotUnderHoldfast(
            f"data set {name!r} is shared among {os.environ['WORLD_SIZE']} ranks by the coordinator,"
            " and there is none: start the script with `holdfast run`, or use ElasticDataLoader"
        )


def _step() -> int:
    job = link.current()
    return 0 if job is None else job.step


def _sentence(error: BaseException | str) -> str:
    return error if isinstance(error, str) else f"{type(error).__name__}: {error}"
