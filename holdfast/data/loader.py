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
from itertools import chain
from typing import Any, Final, Literal

import torch
from torch.utils.data import DataLoader, default_collate

from holdfast.data.dataset import ElasticDataset
from holdfast.data.in_job import LoaderInJob
from holdfast.data.link import JobLink
from holdfast.data.link import current as current_link
from holdfast.data.loader_sampler import LoaderSampler
from holdfast.data.loader_steps import LoaderSteps
from holdfast.data.lockstep import BatchInfo, BatchPlan, Division, Replicas
from holdfast.data.open_step import StepShare
from holdfast.data.order import MAX_SIZE, Order
from holdfast.data.place import LoaderPlace
from holdfast.data.reading import BatchReader, BatchRequest, Collate, UnreadBatch, derived_seed
from holdfast.data.records import OrderedRecords
from holdfast.data.state import VERSION, check_agreement, count_in
from holdfast.data.stream import ElasticIterableDataset, StreamReader
from holdfast.data.stream_delivery import deliver_stream, stream_spec
from holdfast.data.terms import (
    check_batching,
    checked_name,
    checked_task,
    order_kind,
    seeding_asked,
    stream_of,
)
from holdfast.data.torch_loaders import (
    BatchSource,
    LoadTerms,
    batch_requests,
    batch_source,
    share_requests,
    stream_loader,
)
from holdfast.data.use import claim_name, report_of
from holdfast.errors import DataError, UsageError
from holdfast.messages.data import Task
from holdfast.messages.tuning import LoaderConfig

Begun = tuple[Iterator[Any], deque[BatchPlan]]
"""Batches that are being read, and what each of them is."""

_END: Final = object()


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
        source = told or self._stream
        self.name = checked_name(name if name is not None or source is None else source.name)
        self._records = OrderedRecords(
            dataset,
            batch_sampler,
            name=self.name,
            kind=order_kind(shuffle if shuffle is not None or not told else told.shuffle),
            seed=seed if seed is not None else (told.seed if told else 0),
            shard=shard,
            sub_epochs=sub_epochs,
            task=checked_task(task),
        )
        self._replicas = num_replicas, rank
        self._seeding = seeding_asked(seed_workers)
        check_batching(
            batch_size=batch_size,
            global_batch=global_batch,
            drop_last=drop_last,
            pad=pad,
            sub_epochs=sub_epochs,
            order=self._records.kind,
            seeding=self._seeding,
            makes_batches=batch_sampler is not None,
            stream=self._stream is not None,
        )
        self._place = LoaderPlace()
        self.open_steps = LoaderSteps(
            self._place,
            self._records,
            able=self._stream is None and not pad and self._replicas == (None, None),
        )
        """What an `ElasticTrainer` asks for a step that is interrupted."""
        self._tune = tune
        self._job: LoaderInJob | None = None
        self._source: BatchSource | None = None
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
            self._records.order(0)  # Checks the size and the seed.
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

    # ---- where it stands ----

    @property
    def epoch(self) -> int:
        """The epoch of the batch last handed out, or of the next one before the first."""
        return self._place.epoch

    @property
    def position(self) -> int:
        """Positions of the epoch that were handed out in whole steps, by all ranks."""
        return self._place.position

    @property
    def current(self) -> BatchInfo | None:
        """The place of the batch last handed out; None before the first of an iteration."""
        return self._place.current

    @property
    def global_batch(self) -> int | None:
        """Records of a step of all ranks; None if that follows from the number of ranks."""
        return self._global_batch

    @property
    def left(self) -> int:
        """Number of batches that this epoch (or sub-epoch) has left."""
        share = self._place.due()
        if share is None:
            return self._division(self._place.position).batches
        _, stop = self._records.part(share.step.start)
        return len(share.parts) + self._division(share.step.stop, stop).batches

    def __len__(self) -> int:
        if self._stream is not None:
            raise TypeError(f"the stream {self.name!r} has no length")
        at = self._place.position
        start, _ = self._records.part(0 if at >= self._records.size else at)
        return self._division(start).batches

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch.

        In the middle of that `epoch`, or at its end after a restore, it changes nothing.
        """
        self._no_stream("set_epoch")
        Order(1, "plain", 0, epoch)  # Checks the number.
        if epoch != self._place.epoch or self._place.finished:
            self._place.go_to(epoch, 0)

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
        place = self._place
        while True:
            if place.position >= self._records.size:
                place.go_to(place.epoch + 1, 0)
            if n and place.epoch >= n:
                self._open_in_job()  # A state may say that all is done: the audit is to know.
                return
            epoch, loads = place.epoch, place.loads
            _, stop = self._records.part(place.position)
            yield epoch
            if (epoch, loads) == (place.epoch, place.loads) and place.position < stop:
                place.go_to(epoch, stop)

    def _no_stream(self, what: str) -> None:
        if self._stream is not None:
            raise UsageError(f"the stream {self.name!r} has no epochs, so there is no {what}()")

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batch last handed out, as plain values."""
        if self._job is not None:
            self._job.report.saved()
        if self._stream is not None:
            return self._stream.state_dict()
        place = {"epoch": self._place.epoch, "position": self._place.position}
        found = {"version": VERSION, **self._records.agreed(), **place}
        state_of = getattr(self.dataset, "state_dict", None)
        return {**found, "dataset": state_of()} if state_of is not None else found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state`; a running iteration delivers nothing more."""
        if self._stream is not None:
            self._stream.load_state_dict(state)
            self._place.load(0, 0)
            return
        agreed = self._records.agreed()
        check_agreement(self.name, state, agreed)
        epoch = count_in(self.name, state, "epoch", MAX_SIZE)
        position = count_in(self.name, state, "position", self._records.size)
        load = getattr(self.dataset, "load_state_dict", None)
        if load is not None and "dataset" in state:
            load(state["dataset"])
            self._source = None  # Loader processes have a copy of the data set.
        self._place.load(epoch, position)

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
        self._source = None

    # ---- iterating ----

    def __iter__(self) -> Iterator[Any]:
        iteration = self._place.begin()
        self._open_in_job()
        if self._stream is not None:
            return self._reported(self._iterate_stream(self._stream))
        self._open_tuning()
        share = self._place.due()
        if share is not None and self._job is not None:
            self._job.resume_step(share.kept)
        _, stop = self._records.part(self._place.position)
        return self._reported(self._deliver(self._begin(stop), stop, iteration))

    def _reported(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Tell the job what was used when an iteration ends, also if the script leaves it."""
        try:
            yield from batches
        finally:
            if self._job is not None:
                self._job.report.tell()

    def _iterate_stream(self, stream: ElasticIterableDataset) -> Iterator[Any]:
        self._seed_loader_processes()
        world = self._world()
        reader = StreamReader(stream, world)
        batches = stream_loader(reader, self._user_collate, self.drop_last, self._terms)
        return deliver_stream(batches, stream, world, self._place, self._job)

    def _begin(self, stop: int) -> Begun:
        """Start reading at the position; return the batches and what each one is."""
        ahead: deque[BatchPlan] = deque()
        if self._source is None:
            self._source = batch_source(self._reader(), self._terms)
        self._seed_loader_processes()
        place = self._place
        share = place.due()
        place.division = self._division(share.step.stop if share else place.position, stop)
        requests = self._requests(place.division, ahead)
        if share is not None:
            requests = chain(self._requests_of(share, ahead), requests)
        return self._source(requests), ahead

    def _deliver(self, begun: Begun, stop: int, iteration: int) -> Iterator[Any]:
        """Hand out batches; for small records the time that this loop takes is what counts."""
        place, job, terms = self._place, self._job, self._terms
        batches, ahead = begun
        between_steps = True
        while True:
            if iteration != place.iteration:
                place.refuse(self.name)
            if between_steps:
                if place.handed_out:
                    place.complete(None)
                if job is not None:
                    self._apply(job.settings_from_here())
                if terms is not self._terms:
                    terms = self._terms
                    batches, ahead = self._begin(stop)
            batch = next(batches, _END)
            if batch is _END:
                break
            plan = ahead.popleft()
            if type(batch) is UnreadBatch:
                raise batch.to_raise()
            if job is not None:
                job.hand_out(plan, place.position)
            place.current, between_steps = plan.info, plan.ends
            place.stop = plan.stop
            if between_steps:
                place.position, place.handed_out = plan.stop, place.share is not None
            yield batch
        if ahead:
            raise DataError(
                f"data set {self.name!r}: batches ended before the epoch did, because the data set "
                "or collate_fn raised StopIteration"
            )
        place.position = stop
        place.finished = stop >= self._records.size

    def _requests(self, division: Division, ahead: deque[BatchPlan]) -> Iterator[BatchRequest]:
        """Iterate over this rank's batches; note what each of them is in `ahead`."""
        listed = self._records.listed(division.epoch)
        return batch_requests(division, self._records.order(division.epoch), listed, ahead)

    def _requests_of(self, share: StepShare, ahead: deque[BatchPlan]) -> Iterator[BatchRequest]:
        epoch = share.step.epoch
        return share_requests(share, self._records.order(epoch), self._records.listed(epoch), ahead)

    def _division(self, start: int, stop: int | None = None) -> Division:
        return Division(
            start=start,
            stop=self._records.part(start)[1] if stop is None else stop,
            epoch=self._place.epoch,
            world=self._world(),
            batch=self._terms.batch_size,
            global_batch=self._global_batch,
            drop_last=self.drop_last,
            pad=self._pad,
        )

    def _world(self) -> Replicas:
        return Replicas.of(*self._replicas)

    def _reader(self) -> BatchReader:
        seed = self._records.seed
        return BatchReader(self.dataset, self.name, self._user_collate, self._seeding, seed)

    def _seed_loader_processes(self) -> None:
        """Let torch's seeds of loader processes follow from where the iteration begins."""
        if self._user_generator is None:
            place = self._place
            drawn = derived_seed(self._records.seed, place.epoch, place.position)
            self._own_generator.manual_seed(drawn)

    # ---- the job ----

    def _open_in_job(self) -> None:
        """Tell the job from where this data set goes on, once a round."""
        link = current_link()
        if self._job is not None:
            self._job.report.tell()
        if link is None or (self._job is not None and self._job.round == link.round):
            return
        self._claim_name(link)
        if self._stream is not None:
            spec, before = stream_spec(self._stream, self._records.task), self._stream.used()
        else:
            spec = self._records.spec()
            before = self._records.used_before(self._place.epoch, self._place.position)
        report = report_of(link, spec, before, resumed=self._place.loads > 0)
        self._job = LoaderInJob(link, report)

    def _claim_name(self, link: JobLink) -> None:
        same = type(self._stream) if self._stream is not None else self._records.spec()
        claim_name(link, self, self.name, (same, self._batches is None))

    def _open_tuning(self) -> None:
        """Begin with the settings that are in force in the job, once a round."""
        if self._job is not None and self._batches is None and not self._job.is_tuned:
            share = -(-self._global_batch // self._world().size) if self._global_batch else 0
            own = self._terms.for_job()
            self._apply(self._job.open_tuning(self.name, own, share, self._tune))

    def _apply(self, config: LoaderConfig | None) -> None:
        """Take over settings of the job; None if there are none."""
        if config is not None:
            workers = config.workers or 0
            self.tune(
                batch_size=config.micro_batch,
                num_workers=workers,
                prefetch_factor=config.prefetch if workers else None,
            )
