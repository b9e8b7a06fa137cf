"""Loads batches for ranks that step together: a torch DataLoader whose place survives anything.

    data = ElasticDataLoader(dataset, batch_size=32, shuffle=True, seed=7, num_workers=4)
    for epoch in data.epochs(10):
        for batch in data:
            ...

The state is the epoch and the position, the same on all ranks, and says what was handed to the
script: not what loader processes have read ahead. Everything else follows from it and the world
size of the moment (`holdfast.data.lockstep`), so no state is ever tied to a world, a number of
loader processes or a batch size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final, Literal
from weakref import proxy

import torch
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from holdfast.data.dataset import ElasticDataset
from holdfast.data.link import JobLink
from holdfast.data.link import current as current_link
from holdfast.data.lockstep import BatchInfo, BatchPlan, Division, Replicas, bounds
from holdfast.data.order import MAX_SIZE, Order
from holdfast.data.reading import (
    BatchReader,
    BatchRequest,
    Collate,
    UnreadBatch,
    derived_seed,
)
from holdfast.data.state import VERSION, check_agreement, count_in
from holdfast.data.stream import ElasticIterableDataset, StreamReader
from holdfast.data.terms import checked_name, checked_task, order_kind, seeding_asked, stream_of
from holdfast.data.torch_loaders import LoadTerms, batch_requests, stream_loader, whole_batch_loader
from holdfast.data.tuning import Tuning
from holdfast.data.use import UseReport, claim_name, report_of
from holdfast.errors import DataError, UsageError
from holdfast.messages.data import DataSpec, Span, Task
from holdfast.messages.spans import SpanSet
from holdfast.messages.tuning import LoaderConfig

_LINES_TOLD: Final = 1000
"""Epochs before this one that are told to the coordinator as used; the packed set is bounded."""


class ElasticDataLoader(DataLoader):  # type: ignore[misc]
    """Loads each record of a data set once an epoch, across faults and changes of the world size.

    Put it into the `Checkpointer` beside the model. All ranks get the same number of batches.

    - `dataset`: a map-style data set, or an `ElasticIterableDataset`. If it has state_dict and
      load_state_dict, its state is saved too: that of the object in the training process, so what
      reading changes in loader processes is not in it.
    - `batch_size`: records of a batch of one rank. `global_batch`: records of a step of all ranks,
      kept whatever the number of ranks is; a step then has several batches of at most `batch_size`
      on each rank (`current.index`, `current.of`).
    - `shuffle`: True or "records" shuffles all records, "shards" shuffles shards of `shard`
      records. `seed`: the order of every epoch follows from it.
    - `name`: name of the data set in states, errors and reports; "data" if it is not given. Under
      `holdfast run`, loaders of other data or another order need other names.
    - `sub_epochs`: number of parts of an epoch; each iteration is one of them.
    - `drop_last`: leave out what is left after the last full step. `pad`: repeat records so that
      the batches of the last step are of the same size on all ranks. By default neither: the last
      batches are smaller, or one record larger.
    - `batch_sampler`: an object with a length that iterates over lists of records, the same on all
      ranks; its set_epoch is called if it has one. Its batches are shared among the ranks as
      records are otherwise. It excludes batch_size, global_batch, shuffle and pad.
    - `num_replicas`, `rank`: who shares the data, if that is not all ranks: with tensor
      parallelism, the data-parallel group. By default torch.distributed is asked when an iteration
      begins, else the launcher's RANK and WORLD_SIZE.
    - `seed_workers`: seed the generators of `random`, torch and numpy in loader processes:
      "batches" (or True) from seed, epoch and position of each batch, so that a replay draws the
      same numbers with any number of loader processes; "records" for each record, so that it does
      with any number of ranks and any batch size, too, at some 10 µs a record; False leaves them to
      torch. Data read in the training process (num_workers=0) draws from the training's own
      generators.
    - `tune`: "auto" searches for the fastest batch size that fits in memory, if there is a
      `global_batch`, so that results stay the same. In any case `holdfast tune` can change the
      settings while the job runs, at the same step on all ranks.
    - `task`: "training", "evaluation" or "prediction"; shown in reports. Only what training uses is
      expected to go back with the model: after a fault, other data may be used again.
    - `num_workers`, `collate_fn`, `pin_memory`, `timeout`, `worker_init_fn`,
      `multiprocessing_context`, `generator`, `prefetch_factor`, `persistent_workers`: as in torch.
      Without a `generator` the loader draws from one of its own, never from the training's.

    If fewer records are left than there are ranks, those without one get a record of another rank
    again, with `current.records == 0`, so that all of them take the step.

    `len` is the number of batches of the whole epoch (or sub-epoch), wherever the loader is in it.
    """

    _is_accelerate_prepared = True
    """accelerate leaves it as it is: it would share among ranks once more what is shared already."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool | Literal["shards", "records"] | None = None,
        seed: int | None = None,
        shard: int = 1,
        global_batch: int | None = None,
        name: str | None = None,
        sub_epochs: int = 1,
        batch_sampler: Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        pad: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed_workers: bool | Literal["batches", "records"] = True,
        tune: Literal["auto"] | None = None,
        task: Task = "training",
    ) -> None:
        self._stream = stream_of(dataset)
        self._batches = batch_sampler
        self._user_generator = generator
        self._own_generator = generator or torch.Generator()
        self._terms = LoadTerms(
            batch_size=batch_size,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            generator=self._own_generator,
        )
        self._global_batch, self._pad = global_batch, pad
        told = dataset if isinstance(dataset, ElasticDataset) else None
        self._seed = seed if seed is not None else (told.seed if told else 0)
        self._order = order_kind(shuffle if shuffle is not None or not told else told.shuffle)
        self._shard = shard
        source = told or self._stream
        self.name = checked_name(name if name is not None or source is None else source.name)
        self._sub_epochs = sub_epochs
        self._replicas = num_replicas, rank
        self._seeding = seeding_asked(seed_workers)
        self._task = checked_task(task)
        self._check_terms(drop_last)
        self._epoch, self._position = 0, 0
        self._finished = False
        """Whether this process iterated to the end of the epoch, so that the next one comes next."""
        self._resumed = False
        self._iteration = 0
        """Number of the iteration that may deliver; every other one is out of date."""
        self._loads = 0
        self._current: BatchInfo | None = None
        self._report: UseReport | None = None
        self._tune = tune
        self._tuning: Tuning | None = None
        self._tuned_round: int | None = None
        self._steps = 0
        """Steps of this process, over all epochs."""
        self._inner: Any = None
        super().__init__(
            dataset,
            **self._batching(batch_size, batch_sampler),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=False,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=self._own_generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self._user_collate = collate_fn or default_collate
        self.__dict__["batch_size"] = batch_size  # torch guards its attributes against assignment.
        self.__dict__["drop_last"] = drop_last
        if self._stream is not None:
            self._stream.name = self.name
            self.merge_state_dicts = self._stream.merge_state_dicts
        else:
            self._order_of(0)  # Checks the size and the seed.
        link = current_link()
        if link is not None:
            self._claim_name(link)

    def _batching(self, batch_size: int, batch_sampler: Any) -> dict[str, Any]:
        """Return what torch's constructor is told of samplers; frameworks look at what it keeps."""
        if self._stream is not None:
            return {"batch_size": None}
        if batch_sampler is not None:
            return {"batch_sampler": batch_sampler}
        return {"batch_size": batch_size, "sampler": LoaderSampler(self)}

    def _check_terms(self, drop_last: bool) -> None:
        if drop_last and self._pad:
            raise UsageError(
                "drop_last and pad exclude each other: leave out the rest, or fill it up"
            )
        if self._global_batch is not None:
            if type(self._global_batch) is not int or self._global_batch < 1:
                raise UsageError(
                    f"global_batch={self._global_batch!r} is no whole number from 1 on"
                )
            if self._pad:
                raise UsageError(
                    "pad and global_batch exclude each other: a padded step has more records"
                )
        if type(self._sub_epochs) is not int or not 1 <= self._sub_epochs <= 1 << 20:
            raise UsageError(
                f"sub_epochs={self._sub_epochs!r} is no whole number from 1 to {1 << 20}"
            )
        taken = self._terms.batch_size != 1 or self._global_batch or self._pad
        if self._batches is not None and (taken or self._order != "plain" or self._stream):
            raise UsageError(
                "batch_sampler makes the batches itself: it excludes batch_size, global_batch, "
                "shuffle, pad, and data sets that are streams"
            )
        if self._batches is not None and self._seeding == "records":
            raise UsageError(
                'seed_workers="records" needs positions of records: it excludes batch_sampler'
            )
        if self._stream is not None and (self._global_batch or self._order != "plain" or self._pad):
            raise UsageError("a stream has no size: it excludes global_batch, shuffle and pad")

    # ---- where it stands ----

    @property
    def epoch(self) -> int:
        """The epoch of the batch last handed out, or of the next one before the first."""
        return self._epoch

    @property
    def position(self) -> int:
        """Positions of the epoch that were handed out in whole steps, by all ranks."""
        return self._position

    @property
    def current(self) -> BatchInfo | None:
        """The place of the batch last handed out; None before the first of an iteration."""
        return self._current

    @property
    def global_batch(self) -> int | None:
        """Records of a step of all ranks; None if that follows from the number of ranks."""
        return self._global_batch

    @property
    def left(self) -> int:
        """Number of batches that this epoch (or sub-epoch) has left."""
        return self._division(self._position).batches

    def __len__(self) -> int:
        if self._stream is not None:
            raise TypeError(f"the stream {self.name!r} has no length")
        position = 0 if self._position >= self._size else self._position
        return self._division(bounds(self._size, self._sub_epochs, position)[0]).batches

    @property
    def _size(self) -> int:
        return len(self._batches if self._batches is not None else self.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch.

        In the middle of that `epoch`, or at its end after a restore, it changes nothing.
        """
        self._no_stream("set_epoch")
        Order(1, "plain", 0, epoch)  # Checks the number.
        if epoch != self._epoch or self._finished:
            self._go_to(epoch, 0)

    def epochs(self, n: int | None = None) -> Iterator[int]:
        """Iterate over the epochs that are left of `n`, or without end if `n` is 0.

        The default is the number of an `ElasticDataset`, else 0.

        After a restore it goes on with the epoch of the state, or with the next one if that is
        done. With sub-epochs, an epoch comes once for each of them that is left. What the script
        leaves of an epoch, it leaves out.
        """
        self._no_stream("epochs")
        if n is None:
            n = self.dataset.epochs if isinstance(self.dataset, ElasticDataset) else 0
        while True:
            if self._position >= self._size:
                self._go_to(self._epoch + 1, 0)
            if n and self._epoch >= n:
                self._open_report()  # A state may say that all is done: the audit is to know.
                return
            epoch, loads = self._epoch, self._loads
            stop = bounds(self._size, self._sub_epochs, self._position)[1]
            yield epoch
            if (epoch, loads) == (self._epoch, self._loads) and self._position < stop:
                self._go_to(epoch, stop)

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._finished = epoch, position, False
        self._iteration += 1
        self._current = None

    def _no_stream(self, what: str) -> None:
        if self._stream is not None:
            raise UsageError(f"the stream {self.name!r} has no epochs, so there is no {what}()")

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batch last handed out, as plain values."""
        if self._report is not None:
            self._report.saved()
        if self._stream is not None:
            return self._stream.state_dict()
        found = {
            "version": VERSION,
            **self._agreed(),
            "epoch": self._epoch,
            "position": self._position,
        }
        state_of = getattr(self.dataset, "state_dict", None)
        return {**found, "dataset": state_of()} if state_of is not None else found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state`; a running iteration delivers nothing more."""
        if self._stream is not None:
            self._stream.load_state_dict(state)
            self._go_to(0, 0)
        else:
            agreed = self._agreed()
            check_agreement(self.name, state, agreed)
            epoch = count_in(self.name, state, "epoch", MAX_SIZE)
            position = count_in(self.name, state, "position", self._size)
            load = getattr(self.dataset, "load_state_dict", None)
            if load is not None and "dataset" in state:
                load(state["dataset"])
                self._inner = None  # Loader processes have a copy of the data set.
            self._go_to(epoch, position)
        self._loads += 1
        self._resumed = True

    def _agreed(self) -> dict[str, int | str]:
        """What a state must have in common with this loader."""
        return {
            "name": self.name,
            "unit": "records" if self._batches is None else "batches",
            "size": self._size,
            "order": self._order,
            "seed": self._seed,
            "shard": self._shard,
        }

    # ---- tuning ----

    def tune(
        self,
        *,
        batch_size: int | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
    ) -> None:
        """Change how data is loaded, from the next step on. All ranks must do so at the same step.

        What was read ahead is read again. `batch_size`, `num_workers` and `prefetch_factor` stay as
        they are where they are None.
        """
        if self._batches is not None and batch_size is not None:
            raise UsageError("batch_sampler makes the batches itself: their size cannot be tuned")
        now = self._terms
        self._terms = replace(
            now,
            batch_size=now.batch_size if batch_size is None else batch_size,
            num_workers=now.num_workers if num_workers is None else num_workers,
            prefetch_factor=now.prefetch_factor if prefetch_factor is None else prefetch_factor,
        )
        self.__dict__["batch_size"] = self._terms.batch_size
        self.num_workers, self.prefetch_factor = (
            self._terms.num_workers,
            self._terms.prefetch_factor,
        )
        self._inner = None

    # ---- iterating ----

    def __iter__(self) -> Iterator[Any]:
        if self._finished:
            self._go_to(self._epoch + 1, 0)
        self._iteration += 1
        self._current = None
        self._open_report()
        if self._stream is not None:
            return self._reported(self._deliver_stream(self._stream, self._iteration))
        self._open_tuning()
        stop = bounds(self._size, self._sub_epochs, self._position)[1]
        return self._reported(self._deliver(self._begin(stop), stop, self._iteration))

    def _reported(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Tell the job what was used when an iteration ends, also if the script leaves it."""
        try:
            yield from batches
        finally:
            if self._report is not None:
                self._report.tell()

    def _begin(self, stop: int) -> tuple[Iterator[Any], deque[BatchPlan]]:
        """Start reading at the position; return the batches and what each one is."""
        ahead: deque[BatchPlan] = deque()
        if self._inner is None:
            self._inner = whole_batch_loader(self._reader(), self._terms)
        self._inner.sampler.requests = self._requests(self._division(self._position, stop), ahead)
        self._seed_loader_processes()
        return iter(self._inner), ahead

    def _deliver(
        self, begun: tuple[Iterator[Any], deque[BatchPlan]], stop: int, iteration: int
    ) -> Iterator[Any]:
        batches, ahead = begun
        report, terms, records = self._report, self._terms, 0
        while True:
            self._check_iteration(iteration)
            self._heed_tuning()
            if terms is not self._terms and not self._in_step:
                terms = self._terms
                batches, ahead = self._begin(stop)
            batch = next(batches, _END)
            if batch is _END:
                break
            plan = ahead.popleft()
            if isinstance(batch, UnreadBatch):
                raise batch.to_raise()
            if report is not None:
                report.check()
            info = self._current = plan.info
            records += plan.fresh
            if report is not None:
                report.delivered(plan.fresh)
            if info.index + 1 == info.of:
                self._steps += 1
                if report is not None:
                    report.used(self._epoch, self._position, plan.stop, records)
                self._position, records = plan.stop, 0
            yield batch
        self._position = stop
        self._finished = stop >= self._size

    def _deliver_stream(self, stream: ElasticIterableDataset, iteration: int) -> Iterator[Any]:
        world = self._world()
        self._seed_loader_processes()
        reader = StreamReader(stream, world)
        inner = stream_loader(reader, self._user_collate, self.drop_last, self._terms)
        report, lines = self._report, {name: i for i, name in enumerate(stream.partition_list())}
        for read, batch in inner:
            self._check_iteration(iteration)
            if isinstance(batch, UnreadBatch):
                raise batch.to_raise()
            if report is not None:
                report.check()
                report.delivered(sum(taken[2] for taken in read.values()))
                for name, (start, stop, count) in read.items():
                    report.used(lines[name], start, stop, count)
            stream.delivered(read)
            count = sum(taken[2] for taken in read.values())
            self._current = BatchInfo(count, count * world.size, 0, 1, 0, 0)
            yield batch
            self._check_iteration(iteration)

    @property
    def _in_step(self) -> bool:
        """Whether the step of the last batch has more of them."""
        info = self._current
        return info is not None and info.index + 1 < info.of

    def _check_iteration(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise UsageError(
                f"data set {self.name!r}: this iteration is out of date, because a state was "
                "loaded, the epoch set or another iteration begun since; what it has read ahead is "
                "not delivered: iterate over the loader again"
            )

    def _requests(self, division: Division, ahead: deque[BatchPlan]) -> Iterator[BatchRequest]:
        """Iterate over this rank's batches; note what each of them is in `ahead`."""
        listed = self._listed(division.epoch) if self._batches is not None else None
        return batch_requests(division, self._order_of(division.epoch), listed, ahead)

    def _listed(self, epoch: int) -> list[list[Any]]:
        """Return the batches of the user's batch sampler in an epoch."""
        assert self._batches is not None
        set_epoch = getattr(self._batches, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        listed = [list(batch) for batch in self._batches]
        if len(listed) != self._size:
            raise DataError(
                f"data set {self.name!r}: the batch sampler has {len(listed)} batches in epoch "
                f"{epoch} and says that it has {self._size}"
            )
        return listed

    def _division(self, start: int, stop: int | None = None) -> Division:
        if stop is None:
            stop = bounds(self._size, self._sub_epochs, start)[1]
        return Division(
            start=start,
            stop=stop,
            epoch=self._epoch,
            world=self._world(),
            batch=self._terms.batch_size,
            global_batch=self._global_batch,
            drop_last=self.drop_last,
            pad=self._pad,
        )

    def _world(self) -> Replicas:
        return Replicas.of(*self._replicas)

    def _order_of(self, epoch: int) -> Order:
        if not self._size:
            raise DataError(f"data set {self.name!r} has no records")
        return Order(self._size, self._order, self._seed, epoch, self._shard)

    def _reader(self) -> BatchReader:
        return BatchReader(self.dataset, self.name, self._user_collate, self._seeding, self._seed)

    def _seed_loader_processes(self) -> None:
        """Let torch's seeds of loader processes follow from where the iteration begins."""
        if self._user_generator is None:
            drawn = derived_seed(self._seed, self._epoch, self._position)
            self._own_generator.manual_seed(drawn)

    # ---- the job ----

    def _open_report(self) -> None:
        """Tell the job from where this data set goes on, once a round."""
        link = current_link()
        if self._report is not None:
            self._report.tell()
        if link is None or (self._report is not None and self._report.round == link.round):
            return
        self._claim_name(link)
        self._report = report_of(link, self._spec(), self._used_before(), self._resumed)

    def _claim_name(self, link: JobLink) -> None:
        same: object = type(self._stream)
        if self._stream is None:
            same = (*self._agreed().values(), self._sub_epochs, self._task)
        claim_name(link, self, self.name, same)

    def _open_tuning(self) -> None:
        """Begin with the settings that are in force in the job, once a round."""
        link = current_link()
        if link is None or self._batches is not None or self._tuned_round == link.round:
            return
        self._tuned_round = link.round
        terms = self._terms
        ahead = terms.prefetch_factor or 2
        own = LoaderConfig(micro_batch=terms.batch_size, workers=terms.num_workers, prefetch=ahead)
        share = -(-self._global_batch // self._world().size) if self._global_batch else 0
        self._steps = 0
        auto = self._tune == "auto"
        self._tuning = Tuning(self.name, own, most=share, auto=auto, link=link)
        if self._tuning.version:
            self._apply(self._tuning.config)

    def _heed_tuning(self) -> None:
        """Take over other settings, if this is the step at which all ranks do."""
        if self._tuning is not None and not self._in_step:
            config = self._tuning.at_boundary(self._steps)
            if config is not None:
                self._apply(config)

    def _apply(self, config: LoaderConfig) -> None:
        workers = config.workers or 0
        self.tune(
            batch_size=config.micro_batch,
            num_workers=workers,
            prefetch_factor=config.prefetch if workers else None,
        )

    def _spec(self) -> DataSpec:
        exact = self._task == "training"
        if self._stream is not None:
            names = tuple(self._stream.partition_list())
            return DataSpec(
                name=self.name,
                sharing="lockstep",
                partitions=names,
                task=self._task,
                exact=exact,
            )
        return DataSpec(
            name=self.name,
            sharing="lockstep",
            size=self._size,
            shard=self._shard,
            epochs=0,
            sub_epochs=self._sub_epochs,
            order=self._order,
            seed=self._seed,
            task=self._task,
            exact=exact,
        )

    def _used_before(self) -> SpanSet:
        if self._stream is not None:
            return self._stream.used()
        whole = range(max(0, self._epoch - _LINES_TOLD), self._epoch)
        spans = [Span(line, 0, self._size) for line in whole]
        return SpanSet.of([*spans, Span(self._epoch, 0, self._position)])


_END: Final = object()


class LoaderSampler(DistributedSampler):  # type: ignore[misc]
    """What frameworks see as the sampler of a loader: they set its epoch.

    It is a DistributedSampler, because frameworks (Lightning) replace any other by one of their own.
    """

    def __init__(self, loader: ElasticDataLoader) -> None:
        self._loader = proxy(loader)

    @property
    def num_replicas(self) -> int:
        return int(self._loader._world().size)

    @property
    def rank(self) -> int:
        return int(self._loader._world().rank)

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader._division(self._loader._position).positions)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the records that this rank has left of the epoch."""
        for request in self._loader._requests(
            self._loader._division(self._loader._position), deque()
        ):
            yield from request.records
