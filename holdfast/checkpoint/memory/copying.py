"""Copies a rank's tensors into an image, as fast as the machine can.

A tensor is copied in one of three ways:

- Large, contiguous, in host memory: `memmove` in pieces, on every idle core. `ctypes` releases the GIL
  during the call, so the pieces run in parallel.
- Small, contiguous, in host memory: `process_vm_readv` from this process to itself copies a thousand
  tensors per system call, because twenty thousand calls from Python would cost more than the bytes.
  Where the kernel forbids it, each tensor is a `memmove`.
- Anything else (strided, or on a device): torch copies into a view of the image. For CUDA the image is
  registered as pinned memory and the copies run on a stream of their own.

The vectors for `process_vm_readv` are built once and reused while all tensors keep their addresses.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from functools import partial
from operator import itemgetter

import torch

from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.state.capture import Captured, Layout
from holdfast.errors import CheckpointError

LARGE_BYTES = 128 << 10
PIECE_BYTES = 32 << 20
_BATCH = 1000
"""Tensors per call, just below the kernel's limit (IOV_MAX)."""

_FORBIDDEN = (errno.EPERM, errno.ENOSYS)

Task = Callable[[], object]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_ulong),
    ctypes.c_ulong,
]
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def cores() -> int:
    """Return how many threads of this rank may copy at once while all ranks of the node copy."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // beside)


def spare_cores() -> int:
    """Return how many of them are left while training runs torch's threads."""
    return max(1, cores() - int(torch.get_num_threads()))


class Copier:
    """Copies states of one layout; another layout needs another copier."""

    def __init__(self, captured: Captured, guarded: Set[int] = frozenset()) -> None:
        self.layout = captured.layout
        self.guarded = guarded
        """Items that only an optimizer's step changes: they may be copied while training goes on."""
        self._large: list[int] = []
        self._odd: list[int] = []
        small = []
        for index, (item, local) in enumerate(zip(self.layout.items, captured.locals, strict=True)):
            if not raw(local):
                self._odd.append(index)
            elif item.raw.size >= LARGE_BYTES:
                self._large.append(index)
            elif item.raw.size:
                small.append(index)
        alike = [[i for i in small if (i in guarded) == which] for which in (False, True)]
        self._batches = [
            _Batch(self.layout, some[first : first + _BATCH], some[0] in guarded)
            for some in alike
            for first in range(0, len(some), _BATCH)
        ]
        on_cuda = (captured.locals[index] for index in self._odd if captured.locals[index].is_cuda)
        self.devices = sorted({local.device for local in on_cuda}, key=str)
        """The devices that tensors are on."""
        self._views: dict[int, list[torch.Tensor]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def prepare(self, image: Image) -> None:
        """Write the constant bytes and create the views that torch copies into, once for an image.

        What the image held before is lost.
        """
        if image.address in self._views:
            return
        for at, header in self.layout.headers.items():
            image.body[at : at + len(header)] = header
        whole = torch.frombuffer(image.body, dtype=torch.uint8) if self._odd else None
        views = []
        for index in self._odd:
            item = self.layout.items[index]
            assert whole is not None
            dtype = getattr(torch, item.dtype)
            raw = whole[item.raw.at : item.raw.end]
            views.append(raw.view(dtype).view(item.sizes) if item.raw.size else raw)
        self._views[image.address] = views

    def forget(self, image: Image) -> None:
        """Drop all references to an image that is about to be unmapped."""
        self._views.pop(image.address, None)
        for batch in self._batches:
            batch.forget(image.address)

    def tasks(self, captured: Captured, image: Image, guarded: bool) -> list[Task]:
        """Return the copies that are made at once, to run in any order on any thread: of the guarded
        items, or of all others."""
        found: list[Task] = []
        for index in self._large:
            if (index in self.guarded) == guarded:
                raw = self.layout.items[index].raw
                found += _pieces(image.address + raw.at, captured.addresses[index], raw.size)
        for batch in self._batches:
            if batch.guarded == guarded:
                found.append(batch.task(captured.addresses, image.address))
        for local, view in self._strided(captured, image, guarded):
            if not local.is_cuda:
                found.append(_torch_copy(view, local))
        return found

    def reached(self) -> dict[torch.device, torch.cuda.Event]:
        """Mark what the script has queued on each device so far."""
        return {device: torch.cuda.current_stream(device).record_event() for device in self.devices}

    def launch(
        self,
        captured: Captured,
        image: Image,
        ready: dict[torch.device, torch.cuda.Event],
        guarded: bool,
    ) -> list[torch.cuda.Event]:
        """Queue the copies from devices, each on a stream of its own after `ready`; return the events
        that follow them."""
        strided = list(self._strided(captured, image, guarded)) if ready else []
        events = []
        for device, event in ready.items():
            here = [(view, local) for local, view in strided if local.device == device]
            if not here:
                continue
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_event(event)
            with torch.cuda.stream(stream), torch.no_grad():
                # One call for all of them: thousands of calls from Python would stall training.
                views, locals_ = zip(*here, strict=True)
                torch._foreach_copy_(list(views), list(locals_), non_blocking=True)
                events.append(stream.record_event())
        return events

    def _strided(
        self, captured: Captured, image: Image, guarded: bool
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what torch has to copy, with its target."""
        for index, view in zip(self._odd, self._views[image.address], strict=True):
            if (index in self.guarded) == guarded and view.numel():
                yield captured.locals[index], view


def raw(local: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous bytes in host memory."""
    return (
        local.is_cpu
        and local.is_contiguous()
        and not local.is_neg()
        and not (local.is_complex() and local.is_conj())
    )


def run_all(tasks: Iterable[Task], threads: Executor | None, at_once: int) -> None:
    """Run all tasks, on several threads where possible; raise the first error when all have ended."""
    left = deque(tasks)
    errors: list[Exception] = []

    def work() -> None:
        while left:
            try:
                task = left.popleft()
            except IndexError:
                return  # Another thread took the last one.
            try:
                task()
            except Exception as error:  # Raised below.
                errors.append(error)

    helping = []
    if threads is not None:
        try:
            helping = [threads.submit(work) for _ in range(min(len(left), at_once) - 1)]
        except RuntimeError:
            pass  # The interpreter is about to exit and starts no more threads.
    work()
    wait(helping)
    if errors:
        raise errors[0]


def pin(image: Image) -> bool:
    """Register the image with CUDA as pinned memory while it is mapped; return whether that worked."""
    cuda, start = torch.cuda.cudart(), image.address - image.body_at
    if int(cuda.cudaHostRegister(start, image.body_at + image.capacity, 0)) != 0:
        return False
    image.before_unmap.append(partial(cuda.cudaHostUnregister, start))
    return True


def _pieces(target: int, source: int, size: int) -> list[Task]:
    def piece(at: int) -> Task:
        count = min(PIECE_BYTES, size - at)
        return lambda: _libc.memmove(target + at, source + at, count)

    return [piece(at) for at in range(0, size, PIECE_BYTES)]


def _torch_copy(view: torch.Tensor, local: torch.Tensor) -> Task:
    def copy() -> None:
        try:
            with torch.no_grad():
                view.copy_(local)
        except RuntimeError as error:
            raise CheckpointError(f"a tensor cannot be copied: {error}") from error

    return copy


# ---- small tensors ------------------------------------------------------------------------------


class _Batch:
    """The small tensors that one call copies."""

    def __init__(self, layout: Layout, items: list[int], guarded: bool) -> None:
        self.guarded = guarded
        spans = [layout.items[index].raw for index in items]
        self._of_mine = itemgetter(*items, -1)
        self._ats = [span.at for span in spans]
        self._sizes = [span.size for span in spans]
        self._from: tuple[tuple[int, ...], array[int]] = (), array("Q")
        self._to: dict[int, array[int]] = {}
        """Vectors by the image's address."""

    def task(self, everywhere: list[int], image: int) -> Task:
        addresses = self._of_mine(everywhere)[:-1]
        if addresses != self._from[0]:
            # A new vector: a copy may still be using the old one.
            self._from = addresses, self._vector(addresses)
        if image not in self._to:
            self._to[image] = self._vector([image + at for at in self._ats])
        source, target, size = self._from[1], self._to[image], sum(self._sizes)

        def copy() -> None:
            (to, words), (where, _) = target.buffer_info(), source.buffer_info()
            count = words // 2
            done = _libc.process_vm_readv(os.getpid(), to, count, where, count, 0)
            if done < 0 and ctypes.get_errno() in _FORBIDDEN:
                for at in range(0, words, 2):
                    _libc.memmove(target[at], source[at], target[at + 1])
            elif done != size:
                why = os.strerror(ctypes.get_errno()) if done < 0 else f"{done} of {size} bytes"
                raise CheckpointError(f"small tensors cannot be copied: {why}")

        return copy

    def _vector(self, addresses: Iterable[int]) -> array[int]:
        pairs = zip(addresses, self._sizes, strict=True)
        return array("Q", itertools.chain.from_iterable(pairs))

    def forget(self, image: int) -> None:
        self._to.pop(image, None)


# ---- the garbage collector -----------------------------------------------------------------------


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep the garbage collector off during a save.

    Dismantling a state creates tens of thousands of short-lived objects. They are no garbage, but so
    many at once trigger a collection over the whole process, which may take longer than the copy.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
