"""Copies a rank's state into one of its two images, whole before `save` returns, or beside training.

A save takes the slot that does not hold the newest snapshot, unless the keeper reads it; then the
other. So a whole snapshot is left, whatever happens in the middle of a save.

Memory is prepared once: allocated, touched, and registered with CUDA. That takes far longer than a
copy, so a thread does it as soon as the layout is known. The memory of the newest snapshot, and of
one being written, is never given up for that.

A snapshot must be of one moment. That is certain if training waits until everything is copied, which
is the default: whatever the script does next, by whatever means, comes after the copy.

With `overlap`, parameters and an optimizer's own state are copied after `save` has returned. The
script promises that nothing but torch's counted operations changes them until its next optimizer step,
which waits for the rest of the copy (`Guard`: torch calls a hook before each step of any optimizer).
Everything else (buffers, whatever the script keeps) is copied before `start` returns.

Torch counts the in-place changes of each tensor, so a broken promise of that kind is seen. But it
counts an operation only when its kernel has ended: while it runs, bytes change and the count does not.
So the counts are read where no operation can be under way: on the thread that saved, between two lines
of its Python code, after the last byte of host memory was copied. If they are those of the save, that
thread has changed nothing since: the copy is of one moment. Such a place is the
next optimizer step, the next call to the checkpointer or a ticket, and the end of the script; until
one comes, an overlapped snapshot does not count. Another thread's optimizer step proves nothing about
the thread that saved; it waits for the bytes, and the snapshot is given up.

Torch does not count everything. Changes through `p.data`, numpy or other foreign memory views,
collectives on parameters, fused optimizer kernels called by hand, `torch._foreach` operations on
DTensors and CUDA graphs go unseen. That is why overlapping has to be asked for.

Copies from a device are queued on a stream of their own, after what the script had queued there. What
is not overlapped makes the device's current stream wait for them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Set
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from holdfast.checkpoint.memory.copying import Copier, Task, cores, pin, run_all, spare_cores
from holdfast.checkpoint.memory.image import Image, ImageRecord, remove_image
from holdfast.checkpoint.memory.images import image_path
from holdfast.checkpoint.state.capture import Captured, Layout, Position
from holdfast.errors import CheckpointError, HoldfastError, Unusable

SPARE_BYTES = 64 << 10
"""Room for values to grow before a larger image is needed."""


class BothRead(CheckpointError):
    """Both images are being read: earlier snapshots are still being digested and written."""


class Copy:
    """A snapshot that is being copied: see the module's text on what it takes to count."""

    def __init__(
        self, path: Path, watched: list[torch.Tensor], run: Callable[[Task], None]
    ) -> None:
        self.done: Future[int] = Future()
        """The image's state, once it is whole and known to be of one moment."""
        self.path = path
        self.on_host = threading.Event()
        """Set when host memory is copied, and all copies from devices are queued."""
        self.on_device: list[torch.cuda.Event] = []
        """Events after the copies from devices; known once `on_host` is set."""
        self._thread = threading.current_thread()
        """The thread that saves; it alone knows when none of its operations is under way."""
        self._watched = watched
        self._counts = _counts(watched)
        self._lock = threading.Lock()
        self._refusal: str | None = None if watched else ""
        """Why it is not of one moment; empty if it is, None while that is open."""
        self._complete: Callable[[], int] | None = None
        self._run = run
        """Runs what training need not wait for."""

    def keep_off(self) -> None:
        """Return when the state may be changed, or the devices' streams wait for that."""
        self.on_host.wait()
        self._judge()
        for event in self.on_device:
            torch.cuda.current_stream(event.device).wait_event(event)

    def settle(self, timeout_s: float | None) -> None:
        """Let the snapshot count, if this is the thread that can tell, once its bytes are copied."""
        if threading.current_thread() is self._thread and self.on_host.wait(timeout_s):
            self._judge()

    def end(self) -> None:
        """Return when the image is not written to any more, by this copy."""
        self.keep_off()
        self.done.exception()

    def arrived(self, complete: Callable[[], int]) -> None:
        """Note that every byte is in the image; `complete` makes it count."""
        with self._lock:
            self._complete = complete
            known = self._refusal is not None
        if known:
            self._conclude()

    def fail(self, error: Exception) -> None:
        """Give the snapshot up, because of an error during the copy."""
        with self._lock:
            self._refusal, self._watched = self._refusal or "", []
        known = isinstance(error, HoldfastError | OSError)
        self.done.set_exception(
            error if known else CheckpointError(f"{type(error).__name__}: {error}")
        )
        self.on_host.set()

    def _judge(self) -> None:
        with self._lock:
            if self._refusal is not None:
                return
            if threading.current_thread() is not self._thread and self._thread.is_alive():
                self._refusal = _OTHER_THREAD
            else:
                self._refusal = "" if _counts(self._watched) == self._counts else _CHANGED
            self._watched = []
            arrived = self._complete is not None
        if arrived:
            self._run(self._conclude)

    def _conclude(self) -> None:
        """Complete the snapshot: all bytes are there, and the verdict is known."""
        complete, self._complete = self._complete, None
        assert complete is not None
        try:
            state = _refuse(self._refusal) if self._refusal else complete()
        except Exception as error:
            # The edge of a thread: the error goes to the ticket.
            self.fail(error)
        else:
            self.done.set_result(state)


_CHANGED: Final = (
    "the state changed while it was copied; save without overlap, or change it only in an"
    " optimizer's step"
)
_OTHER_THREAD: Final = (
    "an optimizer stepped in another thread than the one that saves, so it cannot be known whether"
    " the copy is of one moment; save without overlap"
)


def _refuse(why: str) -> int:
    raise CheckpointError(why)


def _counts(tensors: list[torch.Tensor]) -> list[int]:
    """Return how often torch saw each tensor change in place."""
    return [tensor._version for tensor in tensors]


class Slots:
    """The two images of one rank and checkpointer."""

    def __init__(
        self, directory: Path, checkpointer: str, rank: int, warn: Callable[[str], None]
    ) -> None:
        self._checkpointer = checkpointer
        self._warn = warn
        self._warned = False
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

    def close(self) -> None:
        """Free the memory; the files stay, for whoever restores from them."""
        for threads in (self._ahead, self._behind, self._threads):
            if threads is not None:
                threads.shutdown()
        for slot, image in enumerate(self._images):
            if image is not None:
                self._close(slot, image)

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
        remove_image(self._paths[slot])
        image = Image.create(self._paths[slot], needed, after=state, spill=True)
        self._images[slot] = image
        if image.spilled and not self._warned:
            self._warned = True
            self._warn(
                f"{image.path.parent} has no room for a snapshot of {needed / 1e9:.3g} GB: it is kept"
                f" on disk, in {image.path.resolve().parent}, and saves take longer. Make /dev/shm"
                " larger (docker run --shm-size), or choose a directory with --image-dir"
            )
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
            if copier.devices:
                self._register(slot, image)
            copier.prepare(image)
            tail = captured.layout.tail_at
            image.body[tail : tail + len(captured.tail)] = captured.tail
            ready = copier.reached()
            at_once = copier.launch(captured, image, ready, guarded=False)
            for event in at_once:
                torch.cuda.current_stream(event.device).wait_event(event)
            run_all(copier.tasks(captured, image, guarded=False), self._threads, self._cores)
            later = copier.tasks(captured, image, guarded=True)
        except BaseException:
            self._writing = None
            raise
        run = self._beside if overlap else _at_once
        copy = Copy(image.path, _watched(captured, guarded) if overlap else [], run)
        record = self._record(captured, position)

        def complete() -> int:
            state = image.finish(record)
            self._newest = slot
            finished(image.path, state)
            return state

        def copy_rest() -> None:
            # A device's queue is bounded: queueing thousands of copies blocks.
            copy.on_device = [*at_once, *copier.launch(captured, image, ready, guarded=True)]
            run_all(later, self._threads, spare_cores() if overlap else self._cores)
            copy.on_host.set()
            for event in copy.on_device:
                event.synchronize()
            copy.arrived(complete)

        def copy_all() -> None:
            try:
                copy_rest()
            except Exception as error:
                # The edge of a thread: the error goes to the ticket.
                copy.fail(error)

        copy.done.add_done_callback(lambda done: self._written(slot))
        run(copy_all)
        return copy

    def _written(self, slot: int) -> None:
        if self._writing == slot:
            self._writing = None

    def _beside(self, task: Task) -> None:
        """Run a task while training goes on."""
        try:
            self._behind.submit(task)
        except RuntimeError:  # The interpreter is about to exit and starts no more threads.
            task()

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


def _at_once(task: Task) -> None:
    task()


def _watched(captured: Captured, guarded: Set[int]) -> list[torch.Tensor]:
    """Return the tensors whose changes torch counts: a DTensor's are not counted in its local part."""
    wholes = [captured.wholes[index] for index in sorted(guarded)]
    locals_ = [captured.locals[index] for index in sorted(guarded)]
    return wholes + [
        local for local, whole in zip(locals_, wholes, strict=True) if local is not whole
    ]


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
            _StepHooks.before.add(self)
            _StepHooks.install()

    def watch(self, copy: Copy) -> None:
        self._copy = copy

    def before_step(self) -> None:
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
    _StepHooks.after.append((weakref.WeakSet(optimizers), weakref.WeakMethod(act)))
    _StepHooks.install()


class _StepHooks:
    """What this process does around optimizer steps.

    Torch's hooks are global, and stay: removing one fails while an optimizer iterates over them. So
    there is one before and one after each step, however many checkpointers come and go, and they
    refer weakly to those.
    """

    before: ClassVar[weakref.WeakSet[Guard]] = weakref.WeakSet()
    after: ClassVar[list[tuple[weakref.WeakSet[Any], weakref.WeakMethod[Callable[[], None]]]]] = []
    installed: ClassVar = False

    @classmethod
    def install(cls) -> None:
        if not cls.installed:
            cls.installed = True
            register_optimizer_step_pre_hook(_never_compiled(_before_step))
            register_optimizer_step_post_hook(_never_compiled(_after_step))


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for guard in list(_StepHooks.before):
        _uncompiled(guard.before_step)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _StepHooks.after:
        return
    due = [act() for waiting, act in _StepHooks.after if optimizer in waiting]
    _StepHooks.after[:] = [
        (waiting, act)
        for waiting, act in _StepHooks.after
        if optimizer not in waiting and act() is not None
    ]
    for act in due:
        if act is not None:
            _uncompiled(act)


def _uncompiled(act: Callable[[], None]) -> None:
    """Call what torch's compiler must not look at."""
    dynamo = sys.modules.get("torch._dynamo")
    (dynamo.disable(act) if dynamo is not None else act)()


def _never_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Have torch's compiler skip a hook, without a warning: a script may compile its optimizer's step.
    What the hook calls has to be kept from it by `torch._dynamo.disable`, if that is imported."""
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hook
