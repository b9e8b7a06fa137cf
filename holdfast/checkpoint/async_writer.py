"""Stands in for `torch.distributed.checkpoint.async_save`, and blocks training for less time.

    writer = holdfast.checkpoint.AsyncWriter()               # once, on all ranks
    future = writer.save(state_dict, checkpoint_id=path)     # on all ranks, in the same order
    ...
    future.result()                                          # now it is on storage, on all ranks

Before it returns, `save` copies the tensors into memory that it has used before, and nothing else. The
layout of that memory is kept for as long as the state keeps its structure. A process without torch
writes the files, and the ranks agree by the store of their process group (see `standalone`).

The files are a plain directory that `torch.distributed.checkpoint.load` reads. A checkpoint that is
there already is replaced, and stays whole until the new one is (see `storage.plain_directory`).
"""

from __future__ import annotations

import hashlib
import multiprocessing.util
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from holdfast.checkpoint.memory.copying import collector_off
from holdfast.checkpoint.memory.slots import Copy, Guard, Slots
from holdfast.checkpoint.restore.load import captured_entry
from holdfast.checkpoint.standalone.link import PEERS_PATIENCE_S, SaveProgress, ScriptLink
from holdfast.checkpoint.standalone.store_meeting import StoreMeeting
from holdfast.checkpoint.state.capture import Captured, Layout, Position, capture
from holdfast.checkpoint.storage.backends import step_of
from holdfast.checkpoint.storage.plain_directory import parent_and_name
from holdfast.errors import CheckpointError, UsageError
from holdfast.messages.checkpoints import SnapshotId
from holdfast.messages.requests import SaveSettled
from holdfast.messages.units import RoundNumber, StepNumber

_NAME: Final = "async"
_IMAGES: Final = 2
"""Saves that may be in memory at once; one more waits until the first of them is on storage."""
_PATIENCE_S: Final = 30.0
"""How long a script waits at its end for other ranks, if its own part was quick."""


class AsyncWriter:
    """Saves states as `torch.distributed.checkpoint.async_save` does, and training goes on.

    All ranks of `process_group` (all there are, unless one is given) make one, and call `save` in the
    same order. A path that only some of them save is not saved, and in nobody's way; `no_dist=True` is
    for what one rank saves by itself: it makes this process a world of one. With `optimizers`, what
    their steps change is copied while training goes on; the next step waits until it is, and nothing
    else may change it before (see `memory.slots`).
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        no_dist: bool = False,
    ) -> None:
        self._meeting = _meeting_of(process_group, no_dist)
        self._process = os.getpid()
        self._link = ScriptLink(self._meeting, complain=None)
        self._slots = Slots(self._link.images, _NAME, self._meeting.rank, warn=_warn)
        self._guard = Guard(list(optimizers))
        self._layout: Layout | None = None
        self._copy: Copy | None = None
        self._saves = 0
        self._names = _SaveNumbers(self._meeting)
        self._room = threading.Semaphore(_IMAGES)
        self._in_memory: set[int] = set()
        """Numbers of the saves whose image is in use."""
        self._saving = threading.Lock()
        self._closed = False
        # Like atexit, but also in a process of `multiprocessing`, and never in a fork.
        self._last_call = multiprocessing.util.Finalize(None, self._at_exit, exitpriority=0)

    # ---- saving ----

    def save(
        self, state_dict: dict[str, Any], *, checkpoint_id: str | os.PathLike[str]
    ) -> Future[str]:
        """Save a state at that path; the future gives the path, once the checkpoint is complete.

        If it cannot be saved, on whatever rank, the future says so on all of them, and a checkpoint
        that was there before still is. While two saves are under way, a third waits for the first.
        """
        if self._closed:
            raise UsageError("AsyncWriter.save: this writer is closed; make another one")
        if os.getpid() != self._process:
            raise UsageError("AsyncWriter.save: this process was forked; make a writer of its own")
        at = _absolute(checkpoint_id)
        with self._saving:
            return self._save(state_dict, at)

    def _save(self, state_dict: dict[str, Any], at: str) -> Future[str]:
        self._await_copy()
        self._room.acquire()
        self._saves += 1
        number = self._names.draw(at)
        position = self._position(at, number)
        round = RoundNumber(position.round)
        snapshot = SnapshotId(_NAME, StepNumber(position.step), round)
        save = self._link.begin(snapshot, attempt=1, directory=at)
        done = self._follow(save, number, at)
        known = self._layout
        try:
            with collector_off():
                captured = self._capture(state_dict, position)
                done.copy = self._start(captured, position, save)
        except Exception as error:
            # The state is the user's, and what it is made of may raise anything. The other ranks
            # have to hear of it, and training is to go on: the future tells.
            self._link.miss(save, "failed", str(error))
            return done
        if self._layout is not known and len(self._in_memory) == 1:
            self._slots.make_ready(captured)  # For the next save, beside training.
        return done

    def _follow(self, save: SaveProgress, number: int, at: str) -> _SavedFuture:
        """Return the future of a save, and free its memory when it is over."""
        done = _SavedFuture()
        done.set_running_or_notify_cancel()

        def settled(storage: Future[SaveSettled]) -> None:
            result = storage.result()
            self._names.settled(at, number, result)
            if result.outcome == "saved":
                done.set_result(at)
                return
            error = f"{at} was not saved: {result.reason}"
            if self._meeting.rank == 0:
                print(f"[holdfast] {error}", file=sys.stderr, flush=True)
            done.set_exception(CheckpointError(error))

        def over(_: Future[None]) -> None:
            self._in_memory.discard(number)
            self._room.release()

        if self._meeting.world_size > 1:
            self._link.expect(save, PEERS_PATIENCE_S)
        self._in_memory.add(number)
        save.settled["storage"].add_done_callback(settled)
        save.over.add_done_callback(over)
        return done

    def warm_up(self, state_dict: dict[str, Any]) -> Future[None]:
        """Make memory ready for states like that one, beside training, before the first save."""
        if self._saves:
            raise UsageError("AsyncWriter.warm_up: something was saved already, so all is warm")
        return self._slots.make_ready(self._capture(state_dict, self._position("", 0)))

    def _capture(self, state_dict: dict[str, Any], position: Position) -> Captured:
        state = {name: captured_entry(entry, name) for name, entry in state_dict.items()}
        captured = capture(state, self._layout, position, pickling=True)
        self._layout = captured.layout
        return captured

    def _start(self, captured: Captured, position: Position, save: SaveProgress) -> Copy:
        guarded = self._guard.guarded(captured)
        overlap = bool(guarded)

        def finished(path: Path, state: int) -> None:
            self._link.seal(save, path, state, "now")

        copy = self._slots.start(captured, position, guarded, overlap, finished)
        self._copy = copy
        copy.done.add_done_callback(lambda done: self._check_copy(save, done))
        if overlap:
            self._guard.watch(copy)
        return copy

    def _check_copy(self, save: SaveProgress, done: Future[int]) -> None:
        error = done.exception()
        if error is not None:
            self._link.miss(save, "failed", str(error))

    def _await_copy(self) -> None:
        if self._copy is not None:
            self._copy.end()

    def _position(self, at: str, number: int) -> Position:
        """Each save is a round of its own: no two ever write the same file."""
        step = step_of(at.rpartition("/")[2]) or 0
        round = self._meeting.began_us + number
        return Position(step, round, self._meeting.rank, self._meeting.world_size)

    # ---- the end ----

    def close(self, abort: bool = False) -> None:
        """Wait until all is saved; with `abort`, give it up instead. Nothing stays in memory."""
        self._end(abort=abort, patience_s=None, at_exit=False)

    def _at_exit(self) -> None:
        self._end(abort=False, patience_s=_PATIENCE_S, at_exit=True)

    def _end(self, abort: bool, patience_s: float | None, at_exit: bool) -> None:
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._last_call.cancel()
        self._await_copy()
        if abort:
            self._link.abandon(f"rank {self._meeting.rank} closed its writer")
        self._link.close(patience_s, at_exit)
        self._slots.close()

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        else:
            self._at_exit()  # Other ranks may be gone, so do not wait for ever.


class _SaveNumbers:
    """Numbers saves so that all ranks have the same number for the same save.

    A rank cannot just count: one that saves a path by itself (its best model, say) would be out of step
    with the others from then on. So a save is named by the last part of its path (what is before may
    differ where the same directory is mounted elsewhere), and by how often this rank has saved to that
    name; the number is agreed on by name. A save that the others have left out does not count.
    """

    def __init__(self, meeting: StoreMeeting) -> None:
        self._meeting = meeting
        self._lock = threading.Lock()
        self._times: Counter[str] = Counter()
        self._names: dict[int, str] = {}
        """The names of numbers that may still be in the store."""
        self._last = 0

    def draw(self, at: str) -> int:
        _, last = parent_and_name(at)
        with self._lock:
            self._times[last] += 1
            said = f"{self._times[last]} {last}"
        name = hashlib.sha256(said.encode(errors="surrogateescape")).hexdigest()[:16]
        try:
            number = self._meeting.number(name)
        except CheckpointError:
            number = self._last + 1  # The store is gone, and the save is going to fail of that.
        self._last = max(self._last, number)
        self._names[number] = name
        return number

    def settled(self, at: str, number: int, result: SaveSettled) -> None:
        with self._lock:
            if result.outcome == "skipped":
                self._times[parent_and_name(at)[1]] -= 1
            # All ranks have saved this one, and so will not ask for an older one any more.
            over = [n for n in self._names if n <= number] if result.outcome == "saved" else []
            names = [self._names.pop(n) for n in over]
        with suppress(CheckpointError):
            for name in names:
                self._meeting.forget_number(name)


class _SavedFuture(Future[str]):
    """The future of a save; to wait for it settles the copy, which only the thread that saved can."""

    copy: Copy | None = None

    def _settle(self, timeout: float | None) -> None:
        if self.copy is not None:
            self.copy.settle(timeout)

    def done(self) -> bool:
        self._settle(0.0)
        return super().done()

    def result(self, timeout: float | None = None) -> str:
        self._settle(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._settle(timeout)
        return super().exception(timeout)


def _warn(text: str) -> None:
    print(f"[holdfast] {text}", file=sys.stderr, flush=True)


def _meeting_of(process_group: Any, no_dist: bool) -> StoreMeeting:
    if no_dist or not dist.is_initialized():
        return StoreMeeting(dist.HashStore(), "writers", 0, 1)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise UsageError("AsyncWriter: this rank is not in the process group that was given")
    name = "world" if process_group is None else process_group.group_name
    store = dist.distributed_c10d._get_default_store()
    return StoreMeeting(store, f"writers/{name}", rank, world_size)


def _absolute(checkpoint_id: str | os.PathLike[str]) -> str:
    text = os.fspath(checkpoint_id).removeprefix("file://")
    at = text if "://" in text else os.path.realpath(text)
    parent_and_name(at)
    return at


# ---- in place of torch's function ---------------------------------------------------------------

_writers: dict[tuple[Any, bool], AsyncWriter] = {}
"""Those of `async_save`: a function has nowhere else to keep what makes the next call fast."""


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: None = None,
    planner: None = None,
    process_group: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[str]:
    """`torch.distributed.checkpoint.async_save`, by an `AsyncWriter` that stays for the next call.

    `async_checkpointer_type` makes no difference: a process writes, whatever it says.
    """
    for name, given in (
        ("storage_writer", storage_writer),
        ("planner", planner),
        ("async_stager", async_stager),
    ):
        if given is not None:
            raise UsageError(
                f"async_save: a {name} of your own is not supported: files are laid out and written"
                " without torch. Give checkpoint_id= alone (a path, or a URL that fsspec knows), or"
                " call torch.distributed.checkpoint.async_save where you need it"
            )
    if checkpoint_id is None:
        raise UsageError("async_save: checkpoint_id= says where to; it must be given")
    if not use_collectives:
        raise UsageError(
            "async_save: use_collectives=False writes another format; leave it out, or give"
            " no_dist=True for a checkpoint of this rank alone"
        )
    alone = no_dist or not dist.is_initialized()
    group = None if alone else process_group or dist.group.WORLD
    writer = _writers.get((group, alone))
    if writer is None or writer._closed:
        writer = _writers[group, alone] = AsyncWriter(process_group, no_dist=no_dist)
    return writer.save(state_dict, checkpoint_id=checkpoint_id)
