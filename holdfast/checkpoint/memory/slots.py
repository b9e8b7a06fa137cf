"""Copies a rank's state into one of its two images, partly while training goes on.

A save takes the slot that does not hold the newest snapshot, unless the keeper reads it; then the
other. So a whole snapshot is left, whatever happens in the middle of a save.

Memory is prepared once: allocated, touched, and registered with CUDA. That takes far longer than a
copy, so a thread does it as soon as the layout is known. The memory of the newest snapshot, and of
one being written, is never given up for that.

Parameters and an optimizer's own state change in its step and nowhere else. So they may be copied
after `save` has returned, if the next step waits for the rest of the copy; torch calls a hook before
each step of any optimizer (`Guard`). Everything else (buffers, whatever the script keeps) may change
at any time and is copied before `start` returns; on a device that means: queued before training
queues its next work.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Set
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from holdfast.checkpoint.memory.copying import Copier, cores, pin, run_all, spare_cores
from holdfast.checkpoint.memory.image import Image, ImageRecord
from holdfast.checkpoint.memory.images import image_path
from holdfast.checkpoint.state.capture import Captured, Layout, Position
from holdfast.errors import CheckpointError, HoldfastError, Unusable

SPARE_BYTES = 64 << 10
"""Room for values to grow before a larger image is needed."""


class BothRead(CheckpointError):
    """Both images are being read: earlier snapshots are still being digested and written."""


class Copy:
    """A snapshot that is being copied."""

    def __init__(self, path: Path, unchanged: _Unchanged) -> None:
        self.done: Future[int] = Future()
        """The image's state, once it is whole."""
        self.path = path
        self.on_host = threading.Event()
        """Set when host memory is copied, and all copies from devices are queued."""
        self.unchanged = unchanged
        self.on_device: torch.cuda.Event | None = None
        """Event after the copies from devices; known once `on_host` is set."""

    def keep_off(self) -> None:
        """Return when the optimizer may change what was copied, or its stream waits for that."""
        self.on_host.wait()
        self.unchanged.settle()
        if self.on_device is not None:
            torch.cuda.current_stream().wait_event(self.on_device)


class _Unchanged:
    """Checks that overlapped tensors were not changed before the optimizer's step.

    Torch counts the in-place changes of each tensor. The optimizer's own do no harm, as it waits; so
    the counts are compared once: before its step begins, or when the copy is done.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._versions = self._count()
        self._lock = threading.Lock()
        self._answer: bool | None = None

    def _count(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]

    def settle(self) -> bool:
        with self._lock:
            if self._answer is None:
                self._answer = self._count() == self._versions
                self._tensors = []
            return self._answer


class Slots:
    """The two images of one rank and checkpointer."""

    def __init__(self, directory: Path, checkpointer: str, rank: int) -> None:
        self._checkpointer = checkpointer
        self._paths = [image_path(directory, checkpointer, rank, slot) for slot in (0, 1)]
        self._images: list[Image | None] = [_left_behind(path) for path in self._paths]
        self._newest = _newest(self._images)
        self._writing: int | None = None
        """Slot that a snapshot is being copied into."""
        self._touching: int | None = None
        """Slot whose memory is being touched, so that it must stay mapped."""
        self._pinned: set[int] = set()
        self._copier: Copier | None = None
        self._changed = threading.Condition()
        """Held while an image is created or closed."""
        self._cores = cores()
        many = self._cores > 1
        self._threads: Executor | None = ThreadPoolExecutor(self._cores, "copy") if many else None
        self._behind = ThreadPoolExecutor(1, "snapshot")
        self._ahead = ThreadPoolExecutor(1, "memory")

    # ---- memory ----

    def make_ready(self, captured: Captured) -> Future[None]:
        """Prepare the images for that layout, while training goes on."""
        return self._ahead.submit(self._make, _needed(captured), _on_cuda(captured))

    def _make(self, needed: int, cuda: bool) -> None:
        for slot in (0, 1):
            with self._changed:
                if self._in_use(slot) and not self._roomy(slot, needed):
                    continue
                image = self._image(slot, needed)
                self._touching = slot
            try:
                image.prefault(self._threads)
                if cuda:
                    self._register(slot, image)
            except RuntimeError:
                return  # The interpreter is about to exit: no thread starts, no memory is needed.
            finally:
                with self._changed:
                    self._touching = None
                    self._changed.notify_all()

    def _in_use(self, slot: int) -> bool:
        return slot in (self._newest, self._writing)

    def _roomy(self, slot: int, needed: int) -> bool:
        image = self._images[slot]
        return image is not None and image.capacity >= needed

    def _image(self, slot: int, needed: int) -> Image:
        image = self._images[slot]
        if image is not None and image.capacity >= needed:
            return image
        state = 0
        if image is not None:
            while self._touching == slot:
                self._changed.wait()
            state = image.state
            self._close(slot, image)
        # Its content was to be overwritten anyway; the new image may need its memory.
        self._paths[slot].unlink(missing_ok=True)
        image = self._images[slot] = Image.create(self._paths[slot], needed, after=state)
        return image

    def _close(self, slot: int, image: Image) -> None:
        self._images[slot] = None
        self._pinned.discard(slot)
        if self._copier is not None:
            self._copier.forget(image)
        image.close()

    def _register(self, slot: int, image: Image) -> None:
        if slot not in self._pinned and pin(image):
            self._pinned.add(slot)

    # ---- saving ----

    def start(
        self,
        captured: Captured,
        position: Position,
        guarded: Set[int],
        overlap: bool,
        finished: Callable[[Path, int], None],
    ) -> Copy:
        """Begin a snapshot; `finished` is called when it is whole: at once, without overlap."""
        copier = self._copier_for(captured, guarded if overlap else None)
        with self._changed:
            slot, image = self._take(_needed(captured))
            self._writing = slot
        try:
            if copier.from_cuda:
                self._register(slot, image)
            copier.prepare(image)
            tail = captured.layout.tail_at
            image.body[tail : tail + len(captured.tail)] = captured.tail
            ready = torch.cuda.current_stream().record_event() if copier.from_cuda else None
            at_once = copier.launch(captured, image, ready, guarded=False)
            if at_once is not None:
                torch.cuda.current_stream().wait_event(at_once)
            run_all(copier.tasks(captured, image, guarded=False), self._threads, self._cores)
            later = copier.tasks(captured, image, guarded=True)
        except BaseException:
            self._writing = None
            raise
        watched = [captured.locals[index] for index in sorted(guarded)] if overlap else []
        copy = Copy(image.path, _Unchanged(watched))
        record = self._record(captured, position)

        def copy_rest() -> int:
            # A device's queue is bounded: queueing thousands of copies blocks.
            event = copy.on_device = copier.launch(captured, image, ready, guarded=True) or at_once
            run_all(later, self._threads, spare_cores() if overlap else self._cores)
            copy.on_host.set()
            if event is not None:
                event.synchronize()
            if not copy.unchanged.settle():
                raise CheckpointError(
                    "the state changed while it was copied; save with block=True, or change it"
                    " only in an optimizer's step"
                )
            state = image.finish(record)
            self._newest = slot
            finished(image.path, state)
            return state

        self._run(copy, copy_rest, overlap)
        return copy

    def _run(self, copy: Copy, copy_rest: Callable[[], int], overlap: bool) -> None:
        def finish() -> None:
            state, failure = 0, None
            try:
                state = copy_rest()
            except Exception as error:
                # The edge of a thread: the error goes to the ticket.
                known = isinstance(error, HoldfastError | OSError)
                failure = error if known else CheckpointError(f"{type(error).__name__}: {error}")
            self._writing = None
            copy.on_host.set()
            if failure is None:
                copy.done.set_result(state)
            else:
                copy.done.set_exception(failure)

        if overlap:
            try:
                self._behind.submit(finish)
                return
            except RuntimeError:  # The interpreter is about to exit and starts no more threads.
                pass
        finish()

    def _copier_for(self, captured: Captured, guarded: Set[int] | None) -> Copier:
        """Return a copier; None: any grouping will do, as nothing is overlapped."""
        known = self._copier
        if (
            known is None
            or known.layout is not captured.layout
            or guarded not in (None, known.guarded)
        ):
            known = self._copier = Copier(captured, guarded or frozenset())
        return known

    def _record(self, captured: Captured, position: Position) -> ImageRecord:
        return ImageRecord(
            checkpointer=self._checkpointer,
            step=position.step,
            round=position.round,
            rank=position.rank,
            world_size=position.world_size,
            size=captured.layout.tail_at + len(captured.tail),
            contents=captured.contents,
        )

    def _take(self, needed: int) -> tuple[int, Image]:
        order = (0, 1) if self._newest == 1 else (1, 0)
        for slot in order:
            image = self._image(slot, needed)
            if image.begin():
                return slot, image
        raise BothRead("both images are still being read; saves come faster than they are kept")


def _needed(captured: Captured) -> int:
    return captured.layout.tail_at + 2 * len(captured.tail) + SPARE_BYTES


def _on_cuda(captured: Captured) -> bool:
    return any(local.is_cuda for local in captured.locals)


def _left_behind(path: Path) -> Image | None:
    """Open the image that an earlier process of this rank left."""
    try:
        return Image.open(path)
    except Unusable:
        return None


def _newest(images: list[Image | None]) -> int | None:
    steps = [
        (record.round, record.step, slot)
        for slot, image in enumerate(images)
        if image is not None and (record := image.record()) is not None
    ]
    return max(steps)[2] if steps else None


# ---- optimizers ----------------------------------------------------------------------------------


@dataclass
class _Known:
    layout: Layout
    guarded: frozenset[int]
    addresses: dict[int, int]


class Guard:
    """Holds optimizers back while a copy is under way."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._copy: Copy | None = None
        self._known: _Known | None = None
        if optimizers:
            # The hook is global and stays: removing it fails while an optimizer iterates over its
            # hooks. It refers to the guard weakly, and so keeps nothing alive.
            weak = weakref.WeakMethod(self._before_step)

            def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
                keep_off = weak()
                if keep_off is not None:
                    keep_off()

            register_optimizer_step_pre_hook(before_step)

    def watch(self, copy: Copy) -> None:
        self._copy = copy

    def _before_step(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.keep_off()

    def guarded(self, captured: Captured) -> frozenset[int]:
        """Return the items that only an optimizer's step changes.

        They are looked up again when one of them moves. If one has left its optimizer and is changed
        by something else, that is noticed like any other change.
        """
        known, addresses = self._known, captured.addresses
        if (
            known is None
            or known.layout is not captured.layout
            or any(addresses[index] != at for index, at in known.addresses.items())
        ):
            guarded = self._find(addresses)
            where = {index: addresses[index] for index in guarded}
            known = self._known = _Known(captured.layout, guarded, where)
        return known.guarded

    def _find(self, addresses: list[int]) -> frozenset[int]:
        theirs = set()
        for optimizer in self._optimizers:
            tensors = [p for group in optimizer.param_groups for p in group["params"]]
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
            theirs |= {getattr(t, "_local_tensor", t).data_ptr() for t in tensors}
        theirs.discard(0)  # Empty tensors.
        return frozenset(index for index, at in enumerate(addresses) if at in theirs)


def after_first_step(optimizers: list[torch.optim.Optimizer], act: Callable[[], None]) -> None:
    """Call `act` once, after the first step of one of the optimizers: then its state exists."""
    waiting = weakref.WeakSet(optimizers)
    weak = weakref.WeakMethod(act)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer in waiting:
            waiting.clear()
            once = weak()
            if once is not None:
                once()

    register_optimizer_step_post_hook(after)
