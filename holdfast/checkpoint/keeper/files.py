"""Checkpoints on storage: written from images, committed, looked up.

A checkpointer's storage is opened by an order of its own. What is ordered after that waits for it, and
nothing else does: a mount that hangs holds up its own checkpointer alone.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.checkpoint.async_save import directory as plain
from holdfast.checkpoint.keeper.progress import Movement
from holdfast.checkpoint.keeper.shortage import Shortage
from holdfast.checkpoint.memory.image import Image, Record
from holdfast.checkpoint.memory.images import Images
from holdfast.checkpoint.state.layout import Contents, FileRecord, block_digests
from holdfast.checkpoint.storage import retention
from holdfast.checkpoint.storage.backends import (
    Storage,
    open_storage,
    rank_file_name,
    step_directory,
)
from holdfast.checkpoint.storage.commit import AlreadyCommitted, commit
from holdfast.checkpoint.storage.manifest import steps
from holdfast.checkpoint.storage.rank_file import extents_of, write_file
from holdfast.errors import HoldfastError, Refused, StepTaken
from holdfast.messages.checkpoints import ImageId, Shard, StoredStep
from holdfast.messages.keeper import Commit, Done, FailWrites, Look, Open, ShardsDone, Stored, Write
from holdfast.messages.units import Rank, RoundNumber, StepNumber

log = logging.getLogger("holdfast.keeper")

REFUSALS_TOLD = 8

_contents_decoder = msgspec.msgpack.Decoder(Contents)


class _Checkpointer(Struct, frozen=True):
    storage: Storage | None
    keep: Any


class _Gone(Exception):
    """An image was overwritten before it could be written."""


class Filing:
    def __init__(
        self, images: Images, movement: Movement, hashing: Executor, job: str, job_number: int
    ) -> None:
        self._images = images
        self._movement = movement
        self._hashing = hashing
        self._job = job
        self._job_number = job_number
        """Tells this job's files from those of others at the same place."""
        self._checkpointers: dict[str, Future[_Checkpointer]] = {}
        self._opening: dict[int, Future[_Checkpointer]] = {}
        """By the number of the order."""
        self._shortage = Shortage()

    # ---- opening ----

    def announce(self, order: Open) -> None:
        """Whatever is ordered from now on waits until that is done."""
        opening: Future[_Checkpointer] = Future()
        self._checkpointers[order.checkpointer] = self._opening[order.number] = opening

    def open(self, order: Open) -> Done:
        opening = self._opening.pop(order.number)
        try:
            storage = open_storage(order.directory) if order.directory else None
            keep = msgspec.json.decode(order.keep, type=retention.Policy) if order.keep else None
        except Exception as error:
            opening.set_exception(error)
            raise
        opening.set_result(_Checkpointer(storage, keep))
        return Done(number=order.number)

    def _opened(self, checkpointer: str) -> _Checkpointer:
        opening = self._checkpointers.get(checkpointer)
        if opening is None:
            raise Refused(f"checkpointer {checkpointer} was never opened here")
        return opening.result()

    def _storage(self, checkpointer: str) -> tuple[Storage, Any]:
        known = self._opened(checkpointer)
        if known.storage is None:
            raise Refused(f"checkpointer {checkpointer} has no storage")
        return known.storage, known.keep

    # ---- writing ----

    def write(self, order: Write) -> ShardsDone:
        if order.at:
            storage, directory = plain.opened(order.at)
        else:
            storage, _ = self._storage(order.snapshot.checkpointer)
            directory = step_directory(order.snapshot.step)
        shards = []
        try:
            with ExitStack() as until:
                # All of them are kept from the start: while one is written, the next must stay.
                images = [self._pinned(order, rank, until) for rank in order.ranks]
                for rank, held in zip(order.ranks, images, strict=True):
                    shards.append(self._write_rank(storage, directory, order, rank, held))
        except (_Gone, StepTaken) as error:
            return ShardsDone(number=order.number, error=str(error), gone=True)
        return ShardsDone(number=order.number, shards=tuple(shards))

    def _pinned(
        self, order: Write, rank: int, until: ExitStack
    ) -> tuple[Image, Record, int, bytes]:
        """A rank's image of the snapshot, which stays as it is until then."""
        found = self._images.sealed(ImageId(order.snapshot, Rank(rank), order.world_size))
        if found is not None:
            image, record, state, digests = found
            if until.enter_context(self._images.pinned(image, state)):
                return image, record, state, digests
        raise _Gone(f"the image of rank {rank} made place for a newer one before")

    def _write_rank(
        self,
        storage: Storage,
        directory: str,
        order: Write,
        rank: int,
        held: tuple[Image, Record, int, bytes],
    ) -> Shard:
        image, record, state, digests = held
        snapshot = order.snapshot
        contents = _contents_decoder.decode(image.body[record.contents.at : record.contents.end])
        extents = extents_of(contents, rank, order.world_size, "slice" if order.alike else "all")
        self._shortage.strike(storage.where(directory))
        written = write_file(
            storage,
            directory,
            rank_file_name(rank, snapshot.round, 0 if order.at else self._job_number),
            image.body,
            extents,
            record.contents,
            snapshot.step,
            snapshot.round,
            rank,
            order.world_size,
            self._movement.of(order, len(order.ranks) * sum(e.size for e in extents)),
            once=not order.at,
        )
        if image.settled != state:
            raise _Gone(f"the image of rank {rank} was changed while it was written")
        # What is written has digests of its own. It must be what was sealed, and still be it now.
        if block_digests(image.body[: record.size], self._hashing) != digests:
            raise Refused(f"{image.path}: the image of rank {rank} changed after its seal")
        return Shard(Rank(rank), written.name, written.size, written.trailer, written.contents)

    def fail_writes(self, order: FailWrites) -> Done:
        self._shortage.begin(order.files)
        return Done(number=order.number)

    def commit(self, order: Commit) -> Done:
        snapshot = order.snapshot
        files = [FileRecord(s.rank, s.name, s.size, s.trailer, s.contents) for s in order.shards]
        if order.at:
            whose = (snapshot.step, snapshot.round, order.world_size)
            plain.replace(order.at, whose, files, job=self._job)
            return Done(number=order.number)
        storage, keep = self._storage(snapshot.checkpointer)
        done = commit(
            storage, snapshot.step, snapshot.round, order.world_size, files, job=self._job
        )
        if isinstance(done, AlreadyCommitted):
            error = f"step {snapshot.step} was committed in round {done.manifest.round} before"
            return Done(number=order.number, error=error)
        if keep is not None:
            try:
                delete = retention.plan(keep, steps(storage), verified=snapshot.step)
                retention.prune(storage, delete, verified=snapshot.step)
            except HoldfastError as error:
                log.warning("old checkpoints stay for now: %s", error)
        return Done(number=order.number)

    # ---- looking ----

    def look(self, order: Look) -> Stored:
        known = self._opened(order.checkpointer)
        if known.storage is None:
            return Stored(number=order.number)
        listed = steps(known.storage)
        found = tuple(
            StoredStep(
                StepNumber(one.step), RoundNumber(one.manifest.round), one.manifest.world_size
            )
            for one in listed
            if one.state == "complete" and one.manifest is not None
        )
        # What was refused before is not tried again; but to go back behind it, or to find nothing
        # else, is nothing to be silent about.
        newest = max((one.step for one in found), default=-1)
        refused = [
            f"step {one.step} from storage: {one.why}"
            for one in listed
            if one.state == "refused" and one.step > newest
        ]
        return Stored(number=order.number, steps=found, refused=tuple(refused[:REFUSALS_TOLD]))
