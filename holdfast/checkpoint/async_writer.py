"""Saves for people who want no more than that: `torch.distributed.checkpoint.async_save`, sooner done.

    writer = holdfast.checkpoint.AsyncWriter()               # once, on all ranks
    future = writer.save(state_dict, checkpoint_id=path)     # on all ranks, in the same order
    ...
    future.result()                                          # now it is on storage, on all ranks

What `save` does before it returns is to copy the tensors into memory that it has used before; that,
and nothing else. The layout of that memory is kept for as long as the state keeps its structure. A
process without torch writes the files (see `carrying`), and the ranks agree by the store of their
process group (see `meeting`).

The files are a plain directory that `torch.distributed.checkpoint.load` reads. A checkpoint that is
there already is replaced, and stays whole until the new one is (see `plain`).
"""

from __future__ import annotations

import multiprocessing.util
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from holdfast.checkpoint.memory.copying import collector_off
from holdfast.checkpoint.memory.image_home import ImageHome
from holdfast.checkpoint.memory.slots import Copy, Guard, Slots
from holdfast.checkpoint.restore.load import captured_entry
from holdfast.checkpoint.saves import Carrying, Save
from holdfast.checkpoint.state.capture import Captured, Layout, Position, capture
from holdfast.checkpoint.storage.backends import step_of
from holdfast.checkpoint.storage.plain_directory import parent_and_name
from holdfast.checkpoint.store_meeting import Meeting
from holdfast.errors import UsageError

_NAME = "async"


class AsyncWriter:
    """Saves states as `torch.distributed.checkpoint.async_save` does, and training goes on.

    All ranks of `process_group` (all there are, unless one is given) make one, and call `save` in the
    same order. With `optimizers`, what only their steps change is copied while training goes on; the
    next step waits until it is. `no_dist` makes this process a world of one.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        no_dist: bool = False,
    ) -> None:
        self._meeting = _seat(process_group, no_dist)
        self._process = os.getpid()
        self._home = ImageHome(f"script-{self._process}")
        self._slots = _Slots(self._home.path, _NAME, self._meeting.rank)
        self._carrying = Carrying(self._meeting, self._home.path, _NAME)
        self._guard = Guard(list(optimizers))
        self._layout: Layout | None = None
        self._copy: Copy | None = None
        self._saves = 0
        self._saving = threading.Lock()
        self._closed = False
        # As atexit would, but also where this is a process of `multiprocessing`; and not in a fork.
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
        self._carrying.await_room()
        self._saves += 1
        position = self._position(at)
        copy: Copy | Exception
        known = self._layout
        try:
            with collector_off():
                captured = self._capture(state_dict, position)
                copy = self._start(captured, position)
        except Exception as error:
            # The state is the user's, and what it is made of may raise anything. The other ranks
            # have to hear of it, and training is to go on: the future tells.
            copy = error
        done: Future[str] = Future()
        done.set_running_or_notify_cancel()
        self._carrying.take(Save(self._saves, at, position, copy, done))
        if self._layout is not known and isinstance(copy, Copy) and self._carrying.alone:
            self._slots.make_ready(captured)  # For the next save, beside training.
        return done

    def warm_up(self, state_dict: dict[str, Any]) -> Future[None]:
        """Make memory ready for states like that one, beside training, before the first save."""
        if self._saves:
            raise UsageError("AsyncWriter.warm_up: something was saved already, so all is warm")
        return self._slots.make_ready(self._capture(state_dict, self._position("")))

    def _capture(self, state_dict: dict[str, Any], position: Position) -> Captured:
        state = {name: captured_entry(entry, name) for name, entry in state_dict.items()}
        captured = capture(state, self._layout, position, pickling=True)
        self._layout = captured.layout
        return captured

    def _start(self, captured: Captured, position: Position) -> Copy:
        guarded = self._guard.guarded(captured)
        overlap = bool(guarded)
        copy = self._slots.start(captured, position, guarded, overlap, lambda path, state: None)
        self._copy = copy
        if overlap:
            self._guard.watch(copy)
        return copy

    def _await_copy(self) -> None:
        if self._copy is not None:
            self._copy.done.exception()

    def _position(self, at: str) -> Position:
        """Each save is a round of its own: no two ever write the same file."""
        step = step_of(at.rpartition("/")[2]) or 0
        round = self._meeting.began_us + self._saves
        return Position(step, round, self._meeting.rank, self._meeting.world_size)

    # ---- the end ----

    def close(self, abort: bool = False) -> None:
        """Wait until all is saved; with `abort`, give it up instead. Nothing stays in memory."""
        self._end(lambda: self._give_up() if abort else self._carrying.finish(for_ever=True))

    def _at_exit(self) -> None:
        self._end(lambda: self._carrying.finish(for_ever=False))

    def _give_up(self) -> None:
        self._carrying.give_up(f"rank {self._meeting.rank} closed its writer")

    def _end(self, settle: Callable[[], None]) -> None:
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._last_call.cancel()
        self._await_copy()
        settle()
        self._carrying.close()
        self._slots.close()
        self._home.remove()

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        else:
            self._at_exit()  # Other ranks may be gone, so do not wait for ever.


class _Slots(Slots):
    def close(self) -> None:
        """Give the memory back."""
        for threads in (self._ahead, self._behind, self._threads):
            if threads is not None:
                threads.shutdown()
        for slot, image in enumerate(self._images):
            if image is not None:
                self._close(slot, image)


def _seat(process_group: Any, no_dist: bool) -> Meeting:
    if no_dist or not dist.is_initialized():
        return Meeting(dist.HashStore(), "writers", 0, 1)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise UsageError("AsyncWriter: this rank is not in the process group that was given")
    name = "world" if process_group is None else process_group.group_name
    store = dist.distributed_c10d._get_default_store()
    return Meeting(store, f"writers/{name}", rank, world_size)


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
