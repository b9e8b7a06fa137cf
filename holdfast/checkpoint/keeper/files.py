"""Writes images to storage as checkpoints, commits checkpoints, and lists them.

An order applies to the storage that its checkpointer had when the order came, and waits until that is
open; nothing else waits: a mount that hangs delays its own checkpointer alone.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.checkpoint.keeper.progress import StorageAction, StorageProgress
from holdfast.checkpoint.memory.image import Image, ImageRecord
from holdfast.checkpoint.memory.images import Images
from holdfast.checkpoint.state.layout import Contents, FileRecord, block_digests
from holdfast.checkpoint.storage import plain_directory as plain
from holdfast.checkpoint.storage import retention
from holdfast.checkpoint.storage.backends import (
    Storage,
    open_storage,
    rank_file_name,
    step_directory,
)
from holdfast.checkpoint.storage.commit import AlreadyCommitted, check_not_foreign, commit
from holdfast.checkpoint.storage.manifest import links, steps
from holdfast.checkpoint.storage.posix import PosixStorage, storage_error
from holdfast.checkpoint.storage.rank_file import extents_of, write_file
from holdfast.checkpoint.storage.writer_mark import Writer, WriterMark, taken
from holdfast.clock import machine_time
from holdfast.errors import HoldfastError, StepTaken, Unusable
from holdfast.messages.actions import CommitCheckpoint, WriteRankFiles
from holdfast.messages.checkpoints import ImageId, SnapshotId, StoredFile, StoredStep
from holdfast.messages.events import CheckpointWritten, RankFilesWritten, StoredFound
from holdfast.messages.keeper import FailWrites, FindStored, KeeperEvent
from holdfast.messages.local import OpenCheckpointer
from holdfast.messages.units import Rank, RoundNumber, StepNumber

log = logging.getLogger("holdfast.keeper")

REFUSALS_TOLD = 8

_contents_decoder = msgspec.msgpack.Decoder(Contents)


class Opened(Struct, frozen=True):
    """A checkpointer's storage."""

    storage: Storage | None
    keep: Any
    plain: str = ""
    """The one directory there that is the checkpoint; empty: there is a directory for each step."""
    mark: WriterMark | None = None
    """The mark of the job that writes there; None where there can be none."""

    def directory(self, snapshot: SnapshotId) -> str:
        return self.plain or step_directory(snapshot.step)

    def needed(self, checkpointer: str) -> Storage:
        if self.storage is None:
            raise Unusable(f"checkpointer {checkpointer} has no storage")
        return self.storage


class _ImageGone(Exception):
    """An image was overwritten before it was written to storage."""


class CheckpointFiles:
    def __init__(
        self,
        images: Images,
        progress: StorageProgress,
        hashing: Executor,
        job: str,
        job_number: int,
    ) -> None:
        self._images = images
        self._progress = progress
        self._hashing = hashing
        self._job = job
        self._job_number = job_number
        """Distinguishes the files of this job from those of others in the same directory."""
        self._writer = Writer.of_keeper(job)
        self._checkpointers: dict[str, Future[Opened]] = {}
        self._disk_full = _DiskFull()

    def storage_of(self, action: StorageAction) -> Future[Opened]:
        """The storage that an action is for; to be called in the order in which actions come."""
        if isinstance(action, OpenCheckpointer):
            name, opening = action.checkpointer, Future[Opened]()
            self._checkpointers[name] = opening
            return opening
        name = (action if isinstance(action, FindStored) else action.snapshot).checkpointer
        unknown = Future[Opened]()
        unknown.set_exception(Unusable(f"checkpointer {name} was never opened here"))
        return self._checkpointers.get(name, unknown)

    def carry_out(
        self, number: int, action: StorageAction, storage: Future[Opened]
    ) -> KeeperEvent | None:
        if isinstance(action, OpenCheckpointer):
            self._open(action, storage)
            return None
        opened = storage.result()
        if isinstance(action, FindStored):
            return self._find(action, opened)
        if isinstance(action, WriteRankFiles):
            return self._write(number, action, opened)
        if isinstance(action, CommitCheckpoint):
            return self._commit(action, opened)
        if opened.plain:
            where = opened.needed(action.snapshot.checkpointer)
            plain.discard(where, opened.plain, action.ranks, action.snapshot.round)
        return None

    def _open(self, action: OpenCheckpointer, opening: Future[Opened]) -> None:
        try:
            if action.plain:
                storage, directory = plain.opened(action.directory)
                opened = Opened(storage, None, directory)
            else:
                where, keep = action.directory, action.keep
                policy = msgspec.json.decode(keep, type=retention.Policy) if keep else None
                there = open_storage(where) if where else None
                opened = Opened(there, policy, mark=self._mark_of(there))
        except Exception as error:
            opening.set_exception(error)
            raise
        opening.set_result(opened)

    def _mark_of(self, storage: Storage | None) -> WriterMark | None:
        if not isinstance(storage, PosixStorage):
            return None
        return WriterMark(storage.where(""), self._writer)

    # ---- writing ----

    def _write(self, number: int, action: WriteRankFiles, opened: Opened) -> RankFilesWritten:
        storage = opened.needed(action.snapshot.checkpointer)
        node, snapshot = action.node, action.snapshot
        try:
            with ExitStack() as until:
                # All images are pinned from the start: while one is written, the next must stay.
                images = [self._pinned(action, rank, until) for rank in action.ranks]
                if opened.mark is not None and Rank(0) in action.ranks:  # One node does it for all.
                    opened.mark.claim(partial(storage.make_directory, ""))
                if not opened.plain:
                    check_not_foreign(storage, step_directory(snapshot.step))
                shards = tuple(
                    self._write_rank(number, action, opened, rank, held)
                    for rank, held in zip(action.ranks, images, strict=True)
                )
        except (_ImageGone, StepTaken) as why:
            return RankFilesWritten(
                at=machine_time(), node=node, snapshot=snapshot, error=str(why), gone=True
            )
        return RankFilesWritten(at=machine_time(), node=node, snapshot=snapshot, shards=shards)

    def _pinned(
        self, action: WriteRankFiles, rank: Rank, until: ExitStack
    ) -> tuple[Image, ImageRecord, int, bytes]:
        """Find a rank's image of the snapshot, and keep it unchanged until then."""
        found = self._images.sealed(ImageId(action.snapshot, rank, action.world_size))
        if found is not None:
            image, record, state, digests = found
            if until.enter_context(self._images.pinned(image, state)):
                return image, record, state, digests
        raise _ImageGone(f"the image of rank {rank} made place for a newer one before")

    def _write_rank(
        self,
        number: int,
        action: WriteRankFiles,
        opened: Opened,
        rank: Rank,
        held: tuple[Image, ImageRecord, int, bytes],
    ) -> StoredFile:
        image, record, state, digests = held
        snapshot, storage = action.snapshot, opened.needed(action.snapshot.checkpointer)
        directory = opened.directory(snapshot)
        contents = _contents_decoder.decode(image.body[record.contents.at : record.contents.end])
        extents = extents_of(contents, rank, action.world_size, "slice" if action.alike else "all")
        self._disk_full.check(storage.where(directory))
        size_bytes = len(action.ranks) * sum(extent.size for extent in extents)
        written = write_file(
            storage,
            directory,
            rank_file_name(rank, snapshot.round, 0 if opened.plain else self._job_number),
            image.body,
            extents,
            record.contents,
            snapshot.step,
            snapshot.round,
            rank,
            action.world_size,
            self._progress.of(number, action, size_bytes),
            once=not opened.plain,
        )
        if image.settled != state:
            raise _ImageGone(f"the image of rank {rank} was changed while it was written")
        # The file has digests of its own; its bytes must be those that were sealed, even now.
        if block_digests(image.body[: record.size], self._hashing) != digests:
            raise Unusable(f"{image.path}: the image of rank {rank} changed after its seal")
        return StoredFile(rank, written.name, written.size, written.trailer, written.contents)

    def fail_writes(self, action: FailWrites) -> None:
        self._disk_full.begin(action.files)

    def _commit(self, action: CommitCheckpoint, opened: Opened) -> CheckpointWritten:
        snapshot, size = action.snapshot, action.world_size
        storage = opened.needed(snapshot.checkpointer)
        files = [FileRecord(s.rank, s.name, s.size, s.trailer, s.contents) for s in action.shards]
        error = ""
        if opened.plain:
            of = (snapshot.step, snapshot.round, size)
            plain.replace(storage, opened.plain, of, files, job=self._job)
        else:
            done = commit(storage, snapshot.step, snapshot.round, size, files, job=self._job)
            if isinstance(done, AlreadyCommitted):
                error = f"step {snapshot.step} was committed in round {done.manifest.round} before"
            elif opened.keep is not None:
                _prune(storage, opened.keep, snapshot.step)
        return CheckpointWritten(
            at=machine_time(), node=action.node, snapshot=snapshot, error=error
        )

    # ---- listing ----

    def _find(self, action: FindStored, opened: Opened) -> StoredFound:
        storage = opened.storage
        if opened.mark is not None:
            threading.Thread(target=_warn, args=(opened.mark,), daemon=True).start()
        listed = [*steps(storage), *links(storage)] if storage is not None else []
        found = tuple(
            StoredStep(
                StepNumber(one.step), RoundNumber(one.manifest.round), one.manifest.world_size
            )
            for one in listed
            if one.state == "complete" and one.manifest is not None
        )
        # What was refused before is not tried again. But to go back behind it, or to find nothing
        # else, must be reported.
        newest = max((one.step for one in found), default=-1)
        refused = [
            f"step {one.step} from storage: {one.why}"
            for one in listed
            if one.state == "refused" and one.step > newest
        ]
        return StoredFound(
            at=machine_time(),
            node=action.node,
            round=action.round,
            checkpointer=action.checkpointer,
            steps=found,
            refused=tuple(refused[:REFUSALS_TOLD]),
        )


def _warn(mark: WriterMark) -> None:
    """Tell a job at its start what its first save will fail of. It may only want to read."""
    other = mark.other()
    if other is not None:
        log.warning("nothing can be saved here: %s", taken(mark.directory, other))


def _prune(storage: Storage, keep: Any, verified: int) -> None:
    try:
        delete = retention.plan(keep, steps(storage), verified=verified)
        retention.prune(storage, delete, verified=verified)
    except HoldfastError as error:
        log.warning("old checkpoints stay for now: %s", error)


class _DiskFull:
    """An injected fault: the next files cannot be written (see `holdfast chaos`)."""

    def __init__(self) -> None:
        self._left = 0
        self._lock = threading.Lock()

    def begin(self, files: int) -> None:
        with self._lock:
            self._left = files

    def check(self, where: str) -> None:
        """Fail as a full disk would, while the fault lasts."""
        with self._lock:
            full = self._left > 0
            self._left -= full
        if full:
            raise storage_error(where, "written", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
