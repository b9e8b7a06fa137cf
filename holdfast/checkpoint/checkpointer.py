"""Saves and restores a script's state.

    ckpt = holdfast.Checkpointer("checkpoints", {"model": model, "optim": optim})
    step = ckpt.restore()
    ...
    ckpt.save(step)

A save copies the state into shared memory and returns a ticket; sealing, replicating and persisting the
copy is the keeper's work. A save that fails does not raise into training: its ticket reports it, and so
does the terminal.
"""

from __future__ import annotations

import hashlib
import multiprocessing.util
import operator
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import torch

from holdfast.checkpoint.memory.copying import collector_off, cores
from holdfast.checkpoint.memory.slots import BothRead, Copy, Guard, Slots, after_first_step
from holdfast.checkpoint.restore.load import captured_entry, captured_state, load
from holdfast.checkpoint.restore.plain_dcp import load_start
from holdfast.checkpoint.restore.sources import open_files, set_aside
from holdfast.checkpoint.restore.stored import OpenedLazily, StoredState
from holdfast.checkpoint.state.capture import Captured, Layout, Position, capture
from holdfast.checkpoint.state.parameter_names import ParameterNames
from holdfast.checkpoint.state.skeleton import dismantle
from holdfast.checkpoint.state.spread import check_spread, needs_all_parts, spread_names
from holdfast.checkpoint.storage import retention
from holdfast.checkpoint.storage.backends import LAST_STEP, open_storage
from holdfast.checkpoint.storage.manifest import steps
from holdfast.checkpoint.tickets import SaveId, Ticket
from holdfast.errors import CheckpointError, HoldfastError, Unusable, UsageError
from holdfast.messages.checkpoints import Holder, ImageId, Missed, SnapshotId, Tier, Tried, Wish
from holdfast.messages.requests import SaveSettled, StateFound
from holdfast.messages.units import Rank, RoundNumber, StepNumber

if TYPE_CHECKING:
    from typing_extensions import Self


class KeeperLink(Protocol):
    """The way to the keeper of this rank's images: through the agent, or to a keeper of its own."""

    rank: int
    world_size: int
    round: int
    images: Path

    def open(self, checkpointer: str, directory: str, keep: bytes, copies: list[Copy]) -> None:
        """Register this checkpointer; `copies` are the copies it is making. An earlier one with the
        same name and images has made its last copy when this returns."""

    def replaced(self, checkpointer: str, copies: list[Copy]) -> bool:
        """Return whether another checkpointer has that name and those images now."""

    def saved(self, save: SaveId, path: Path, state: int, wish: Wish) -> None:
        """Report an image that is whole."""

    def missed(self, save: SaveId, outcome: Missed, reason: str) -> None:
        """Report that this rank will have no image of that step."""

    def wait(self, save: SaveId, to: Tier, timeout_s: float | None) -> SaveSettled: ...

    def find(
        self, checkpointer: str, step: int | None, tried: Tried | None, all_ranks: bool
    ) -> StateFound:
        """Ask what to restore, after what was tried; `all_ranks`: this rank needs all ranks' images."""

    def open_image(
        self, image: ImageId, holders: Sequence[Holder], until: ExitStack
    ) -> StoredState:
        """Open a rank's image, on this node or on those."""

    def booked(self, what: str) -> AbstractContextManager[None]:
        """Book time under its own name in the ledger."""

    def resumed(self, step: int) -> None:
        """Report that training goes on from that step."""

    def end(self) -> None:
        """Free what serves this checkpointer alone; nothing is saved or restored any more."""


@dataclass(frozen=True)
class Restored:
    """What was restored, and what was not."""

    step: int
    where: Tier | Literal["start"] | None
    """`start`: the checkpoint that the job was told to start from. None: there was nothing."""
    refused: tuple[str, ...] = ()
    """What was not taken, and why."""
    verified: bool = True
    """Whether every byte had a digest; what plain `torch.distributed.checkpoint` saved has none."""


class LinkedCheckpointer:
    """Saves and restores a training state, through memory and storage.

    Every rank makes the checkpointer, calls `restore` once, and saves the same steps.

    - `directory`: where checkpoints go: a path, a URL that fsspec knows, or None for memory alone.
    - `state`: names and what they stand for: objects with state_dict and load_state_dict, or plain
      values, which `restore` replaces in the dict. An object that also has merge_state_dicts loads what
      it returned for the list of what all ranks saved.
    - `memory_every`, `storage_every`: intervals in steps at which `save` goes to memory and to storage.
      Without either, each `save` goes to storage, or to memory if there is no directory.
    - `keep`: which checkpoints stay on storage: `KeepLatest(3)`, `KeepEvery(1000)`, both joined by
      `|`, or a function from the list of complete steps to those to keep. None keeps all.
    - `overlap`: copy parameters and optimizer state while training goes on; the next optimizer step
      waits for the rest of the copy, and the save counts from then on. It is safe only in a script that
      changes them in an optimizer's step and nowhere else: not through `p.data`, numpy, collectives on
      parameters, fused kernels called by hand, or a CUDA graph. False copies everything before `save`
      returns.
    - `pickling`: allow values that only pickle can encode. Such a checkpoint executes code when it is
      read, so restore it only from directories that you trust.

    `restored` tells which step `restore` took, from where, and what it refused.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        state: dict[str, Any],
        *,
        link: KeeperLink,
        memory_every: int | None = None,
        storage_every: int | None = None,
        keep: retention.Keep | None = None,
        overlap: bool = False,
        pickling: bool = False,
    ) -> None:
        self._name = checkpointer_name(directory, state)
        _check(directory, memory_every, storage_every, keep)
        _check_values(state, pickling)
        check_spread(state)
        self.restored = Restored(0, None)
        self._where = _absolute(directory)
        self._state = state
        self._link = link
        self._memory_every, self._storage_every = memory_every, storage_every
        self._keep = keep
        self._overlap = overlap
        self._pickling = pickling
        self._copying: list[Copy] = []
        own = keep is not None and not isinstance(keep, retention.Policy)
        encoded = b"" if keep is None or own else msgspec.json.encode(keep)
        link.open(self._name, self._where or "", encoded, self._copying)
        self._slots = Slots(link.images, self._name, link.rank, warn=partial(_complain, link.rank))
        self._process = os.getpid()
        self._saving = threading.Lock()
        self._optimizers = [o for o in state.values() if isinstance(o, torch.optim.Optimizer)]
        self._guard = Guard(self._optimizers)
        self._names = ParameterNames()
        self._layout: Layout | None = None
        self._last: Ticket | None = None
        self._closed = False
        self._newest = -1
        self._repeats = 0
        self._owed = False
        """Whether the last save for storage was skipped: the next one goes there in its place."""
        if self._optimizers:
            after_first_step(self._optimizers, self._make_ready)
        # Before links are closed. An interpreter waits for these threads by itself, but a process of
        # `multiprocessing` does that late, when the checkpointer may have been collected.
        at_exit = multiprocessing.util.Finalize(None, _end_all, (self._copying,), exitpriority=10)
        weakref.finalize(self, _forget, at_exit, self._copying).atexit = False

    # ---- saving ----

    def save(self, step: int, to: Tier | None = None, block: bool = False) -> Ticket:
        """Save the state as that of `step`, and return a `Ticket`. It never raises for a failed save.

        `to` is "memory" or "storage"; None lets the intervals decide, which may mean not at all.
        `block=True` copies everything before it returns, even with `overlap=True`.
        """
        step = _step(step)
        self._check_usable("save")
        if to not in (None, "memory", "storage"):
            raise UsageError(f"Checkpointer.save: `to` is 'memory' or 'storage', not {to!r}")
        tier = to or self._due(step)
        if tier is None:
            save = SaveId(self._name, step, 0)
            return Ticket.skipped(save, self._link, "it is not due")
        if tier == "storage" and self._where is None:
            raise UsageError("this Checkpointer has no directory; it can only save to memory")
        with self._saving:
            save = SaveId(self._name, step, self._attempt(step))
            return self._save(save, tier, overlap=self._overlap and not block)

    def _attempt(self, step: int) -> int:
        """Return a number that grows with each save of a step that may have been saved before."""
        if step > self._newest:
            self._newest = step
            return 1
        self._repeats += 1
        return 1 + self._repeats

    def _save(self, save: SaveId, tier: Tier, overlap: bool) -> Ticket:
        if self._owed:
            tier = "storage"
        try:
            with self._link.booked("checkpoint"):
                ticket = self._copy(save, tier, overlap)
            self._owed = False
        except BothRead as why:
            self._owed = tier == "storage"
            ticket = Ticket.skipped(save, self._link, str(why))
            self._tell_missed(save, "skipped", str(why))
        except (HoldfastError, OSError) as error:
            ticket = Ticket.failed(save, tier, self._link, error)
            self._missed(save, error)
        self._last = ticket
        if tier == "storage" and self._keep is not None and self._link.rank == 0:
            self._tidy_after(ticket)
        return ticket

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the last save has reached its tier or has failed, at most `timeout` seconds."""
        if self._last is not None and self._last.to is not None:
            last = self._last
            last.storage(timeout) if last.to == "storage" else last.memory(timeout)

    def close(self) -> None:
        """Wait for the last save, and raise `CheckpointError` if it failed or was skipped. Nothing is
        saved after."""
        if self._closed:
            return
        self._closed = True
        self._await_copy()
        try:
            self._check_last()
        finally:
            self._slots.close()  # It may still be making memory ready, in the directory of the link.
            self._link.end()

    def _check_last(self) -> None:
        if self._last is not None:
            found = self._last.result()
            if found.outcome == "skipped":
                raise CheckpointError(
                    f"the last save, of step {self._last.step}, was skipped: {found.reason}"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        self._closed = True

    def _check_usable(self, call: str) -> None:
        if self._closed:
            raise UsageError(f"Checkpointer.{call}: this checkpointer is closed; make another one")
        if os.getpid() != self._process:
            raise UsageError(
                f"Checkpointer.{call}: this process was forked from the one that made the"
                " checkpointer, which alone can use it"
            )
        if self._link.replaced(self._name, self._copying):
            what = f"for {self._where}" if self._where else f"with the names {sorted(self._state)}"
            each = "a directory" if self._where else "names, or a directory,"
            raise UsageError(
                f"Checkpointer.{call}: another one was made {what} since; each needs {each} of its"
                " own"
            )

    def _due(self, step: int) -> Tier | None:
        if self._memory_every is None and self._storage_every is None:
            return "memory" if self._where is None else "storage"
        if self._storage_every is not None and step % self._storage_every == 0:
            return "storage"
        if self._memory_every is not None and step % self._memory_every == 0:
            return "memory"
        return None

    def _await_copy(self) -> None:
        if self._last is not None and self._last.to is not None:
            self._last.await_copy()

    def _copy(self, save: SaveId, tier: Tier, overlap: bool) -> Ticket:
        self._await_copy()
        wish: Wish = "never" if self._where is None else "now" if tier == "storage" else "if needed"

        def finished(path: Path, state: int) -> None:
            self._link.saved(save, path, state, wish)

        with collector_off():
            captured = self._capture(save.step)
            guarded = self._guard.guarded(captured) if overlap else frozenset()
            position = self._position(save.step)
            copy = self._slots.start(captured, position, guarded, overlap, finished)
        self._guard.watch(copy)
        self._copying[:] = [copy]
        copy.done.add_done_callback(lambda _: self._check_copy(save, copy))
        return Ticket(save, tier, copy, self._link)

    def _check_copy(self, save: SaveId, copy: Copy) -> None:
        with suppress(ValueError):  # The next copy may have taken its place.
            self._copying.remove(copy)
        error = copy.done.exception()
        if error is not None:
            self._missed(save, error)

    def _missed(self, save: SaveId, error: BaseException) -> None:
        """Report a save that failed: training goes on, and the other ranks do not wait for it."""
        self._complain(f"step {save.step} was not saved: {error}")
        self._tell_missed(save, "failed", str(error))

    def _tell_missed(self, save: SaveId, outcome: Missed, reason: str) -> None:
        try:
            self._link.missed(save, outcome, reason)
        except (HoldfastError, OSError) as why:
            self._complain(f"the keeper could not be told: {why}")

    def _capture(self, step: int) -> Captured:
        state, names = captured_state(self._state, self._names)
        position, spread = self._position(step), spread_names(self._state)
        captured = capture(state, self._layout, position, self._pickling, names, spread)
        self._layout = captured.layout
        return captured

    def _position(self, step: int) -> Position:
        return Position(step, self._link.round, self._link.rank, self._link.world_size)

    def _make_ready(self) -> None:
        """Prepare memory for the first save, while training goes on."""
        try:
            with collector_off():
                made = self._slots.make_ready(self._capture(0))
        except CheckpointError as error:
            self._complain(str(error))
            return
        made.add_done_callback(self._check_ready)

    def _check_ready(self, made: Future[None]) -> None:
        error = made.exception()
        if error is not None:
            self._complain(f"there may be no memory for snapshots: {error}")

    def _complain(self, text: str) -> None:
        _complain(self._link.rank, text)

    def _tidy_after(self, ticket: Ticket) -> None:
        """Prune by the user's own retention function, which can only be called in this process."""
        if isinstance(self._keep, retention.Policy) or self._keep is None:
            return
        keep, where = self._keep, self._where
        assert where is not None

        def tidy() -> None:
            if ticket.storage().outcome != "saved":
                return
            try:
                storage = open_storage(where)
                delete = retention.plan(keep, steps(storage), verified=ticket.step)
                retention.prune(storage, delete, verified=ticket.step)
            except Exception as error:
                # The edge of a thread, and of the user's own function.
                why = f"{type(error).__name__}: {error}"
                self._complain(f"old checkpoints stay, because keep failed: {why}")

        threading.Thread(target=tidy, name="retention", daemon=True).start()

    # ---- restoring ----

    def restore(
        self, step: int | None = None, *, start_from: str | os.PathLike[str] | None = None
    ) -> int:
        """Load the newest state that verifies on all ranks, and return its step; 0 if there is none.

        All ranks must call it. `step` asks for that step and no other. When saved states exist and
        none of them verifies, it raises `CheckpointError`: training never silently starts over.

        A job that has saved nothing yet begins with the newest checkpoint in `start_from`: one that
        plain `torch.distributed.checkpoint` saved, which cannot be verified, or one of another job.
        Without `start_from`, a plain checkpoint in this checkpointer's own directory is taken.
        """
        self._check_usable("restore")
        self._await_copy()  # What is loaded must not change what is still being copied.
        with self._link.booked("restore"):
            self.restored = self._restore(step, start_from)
        self._link.resumed(self.restored.step)
        if self.restored.where is None:
            return 0
        if self._link.rank == 0 and self.restored.where != "start":
            refused = "".join(f"\n[holdfast]   refused: {why}" for why in self.restored.refused)
            what = f"restored step {self.restored.step} from {self.restored.where}"
            print(f"[holdfast] {what}{refused}", file=sys.stderr, flush=True)
        self._make_ready()
        return self.restored.step

    def _restore(self, step: int | None, start_from: str | os.PathLike[str] | None) -> Restored:
        all_ranks = needs_all_parts(self._state, self._link.rank)
        found = self._link.find(self._name, step, None, all_ranks)
        refused: tuple[str, ...] = ()
        while found.where in ("memory", "storage"):
            refused = found.refused
            error = self._try(found)
            tried = Tried((str(error) or type(error).__name__)[:1000] if error is not None else "")
            answer = self._link.find(self._name, step, tried, all_ranks)
            if answer.where == "loaded":
                return Restored(found.step, found.where, refused)
            if found.where == "storage" and isinstance(error, Unusable) and self._where is not None:
                # Only now: the other ranks were reading it.
                set_aside(open_storage(self._where), found.step)
            found = answer
        if found.refused or step is not None:
            listed = "".join(f"\n  {why}" for why in found.refused) or f" step {step} is not there"
            raise CheckpointError(f"no saved state can be restored:{listed}")
        return self._start(_absolute(start_from))

    def _start(self, given: str | None) -> Restored:
        """Begin a job that has saved nothing with a checkpoint from elsewhere, if there is one."""
        where = given or self._where
        if where is None:
            return Restored(0, None)
        with ThreadPoolExecutor(cores(), "restore") as threads, collector_off():
            started = load_start(where, self._state, self._link.rank, threads, self._pickling)
        if started is not None:
            if self._link.rank == 0:
                print(f"[holdfast] {started.message}", file=sys.stderr, flush=True)
            return Restored(started.step, "start", verified=started.verified)
        if given is not None:
            raise CheckpointError(f"start_from: there is no checkpoint in {given}")
        return Restored(0, None)

    def _try(self, found: StateFound) -> HoldfastError | OSError | None:
        """Load what was found; return the error if that failed."""
        try:
            with ExitStack() as until:
                stored = self._stored(found, until)
                with ThreadPoolExecutor(cores(), "restore") as threads, collector_off():
                    load(self._state, stored, self._link.rank, threads, self._pickling)
        except (HoldfastError, OSError) as error:
            return error
        return None

    def _stored(self, found: StateFound, until: ExitStack) -> Sequence[StoredState]:
        if found.where == "storage":
            assert self._where is not None
            return open_files(open_storage(self._where), found.step, until)
        snapshot = SnapshotId(self._name, StepNumber(found.step), RoundNumber(found.round))

        by_rank: dict[int, list[Holder]] = {}
        for holder in found.holders:
            by_rank.setdefault(holder.rank, []).append(holder)
        ranks = sorted(by_rank)

        def open_image(index: int, until: ExitStack) -> StoredState:
            rank = ranks[index]
            image = ImageId(snapshot, Rank(rank), found.world_size)
            return self._link.open_image(image, by_rank[rank], until)

        return OpenedLazily(len(ranks), open_image, until)


def _complain(rank: int, text: str) -> None:
    print(f"[holdfast] rank {rank}: {text}", file=sys.stderr, flush=True)


def _end_all(copies: list[Copy]) -> None:
    for copy in copies:
        copy.end()


def _forget(at_exit: Any, copies: list[Copy]) -> None:
    """Have nothing done at exit for a checkpointer that was collected after its last copy."""
    if not copies:
        at_exit.cancel()


def _absolute(directory: str | os.PathLike[str] | None) -> str | None:
    if directory is None:
        return None
    text = os.fspath(directory)
    return text if "://" in text else os.path.abspath(text)


def checkpointer_name(directory: object, state: object) -> str:
    """Name a checkpointer: the same after a restart, and different for each one of a script."""
    if directory is not None and not isinstance(directory, str | os.PathLike):
        raise UsageError(f"Checkpointer: a directory is a path, a URL or None, not {directory!r}")
    if directory is not None and not os.fspath(directory):
        raise UsageError(
            "Checkpointer: the directory is empty; name one, or give None to save to memory alone"
        )
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise UsageError("Checkpointer: the state is a dict with strings for keys")
    for name, entry in state.items():
        if hasattr(entry, "state_dict") != hasattr(entry, "load_state_dict"):
            raise UsageError(
                f"Checkpointer: {name!r} has only one of state_dict and load_state_dict; saving needs"
                " the one, restoring the other"
            )
    text = _absolute(directory) or f"memory of {sorted(state)}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _check(
    directory: object, memory_every: int | None, storage_every: int | None, keep: object
) -> None:
    if keep is not None and not callable(keep):
        raise UsageError(
            "Checkpointer: keep is a policy such as KeepLatest(3), or a function from the existing"
            f" steps to those that stay, not {keep!r}"
        )
    if directory is None and storage_every is not None:
        raise UsageError("Checkpointer: storage_every needs a directory")
    for name, every in (("memory_every", memory_every), ("storage_every", storage_every)):
        if every is not None and (not isinstance(every, int) or every < 1):
            raise UsageError(f"Checkpointer: {name} is a positive number of steps, not {every!r}")


def _check_values(state: dict[str, Any], pickling: bool) -> None:
    """Refuse what can never be saved now, and not at the first save. An object of the script's own is
    not asked for its state yet: a loader might begin to read, and others may not be ready."""
    harmless = torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler
    for name, entry in state.items():
        if isinstance(entry, harmless) or not hasattr(entry, "state_dict"):
            try:
                dismantle({name: captured_entry(entry, name)}, pickling)
            except CheckpointError as error:
                raise UsageError(f"Checkpointer: {error}") from None


def _step(step: int) -> int:
    """Check a step, which may be numpy's."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= LAST_STEP:
        raise UsageError(
            f"Checkpointer.save: a step is an integer from 0 to {LAST_STEP}, not {step!r}"
        )
    return number
