"""Copies a rank's tensors into an image, as fast as the machine can.

Three ways, by what a tensor is:

- large and contiguous, in host memory: `memcpy`, in pieces, on every idle core. A foreign function
  call lets go of the interpreter's lock, so the pieces really run side by side.
- small and contiguous: a system call that gathers a thousand of them at once (`pwritev` into the
  image's file), because twenty thousand calls from Python would cost more than the bytes. The
  constant headers between them are written along.
- anything else (strided, or on a device): torch copies into a view of the image. On CUDA the image is
  registered as pinned memory and the copies run on a stream of their own.

Addresses are remembered: as long as all tensors stay where they were, the lists for the second way are
made once.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Set
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch

from holdfast.checkpoint.capture import Captured, Layout
from holdfast.checkpoint.image import Image
from holdfast.checkpoint.layout import ALIGNMENT
from holdfast.errors import CheckpointError

LARGE_BYTES = 128 << 10
PIECE_BYTES = 32 << 20
_BATCH = 512
"""Tensors in one call: with the gaps between them just below what the kernel takes."""

Task = Callable[[], None]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p
_libc.pwritev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long]
_libc.pwritev.restype = ctypes.c_ssize_t


def cores() -> int:
    """How many threads of this rank may copy at once, when all ranks of the node do."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // beside)


def spare_cores() -> int:
    """How many of them may copy while training goes on, and takes as many as torch was told."""
    return max(1, cores() - int(torch.get_num_threads()))


class Copier:
    """Knows how to copy states of one layout; another layout wants another copier."""

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
        small.sort(key=lambda index: self.layout.items[index].raw.at)
        self._runs = list(_runs(self.layout, small, guarded))
        self.from_cuda = any(captured.locals[index].is_cuda for index in self._odd)
        self._views: dict[int, list[torch.Tensor]] = {}
        self._stream: torch.cuda.Stream | None = None

    def prepare(self, image: Image) -> None:
        """Write what never changes, and make the views that torch copies into; once for an image.

        What the image held before is lost by that.
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
        """That image is about to be unmapped."""
        self._views.pop(image.address, None)

    def tasks(self, captured: Captured, image: Image, guarded: bool) -> list[Task]:
        """What is to be done to copy from host memory, in any order, by any thread: what is guarded,
        or all the rest."""
        found: list[Task] = []
        for index in self._large:
            if (index in self.guarded) == guarded:
                raw = self.layout.items[index].raw
                found += _pieces(image.address + raw.at, captured.addresses[index], raw.size)
        for run in self._runs:
            if (run.items[0] in self.guarded) == guarded:
                found.append(run.task(captured.addresses, image))
        for local, view in self._strided(captured, image, guarded):
            if local.device.type == "cpu":
                found.append(_torch_copy(view, local))
        return found

    def launch(
        self, captured: Captured, image: Image, ready: torch.cuda.Event | None, guarded: bool
    ) -> torch.cuda.Event | None:
        """Queue the copies from devices, on a stream of their own, once `ready` has come; the event
        that ends them."""
        on_device = [
            (local, view)
            for local, view in self._strided(captured, image, guarded)
            if local.device.type == "cuda"
        ]
        if not on_device or ready is None:
            return None
        device = on_device[0][0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream), torch.no_grad():
            # One call for all of them: thousands from Python would keep training waiting.
            locals_, views = zip(*on_device, strict=True)
            torch._foreach_copy_(list(views), list(locals_), non_blocking=True)
            return self._stream.record_event()

    def _strided(
        self, captured: Captured, image: Image, guarded: bool
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """What torch has to copy, and to where."""
        for index, view in zip(self._odd, self._views[image.address], strict=True):
            if (index in self.guarded) == guarded and view.numel():
                yield captured.locals[index], view


def raw(local: torch.Tensor) -> bool:
    """Whether a tensor is its bytes as they are in host memory, one after the other."""
    return (
        local.is_cpu
        and local.is_contiguous()
        and not local.is_neg()
        and not (local.is_complex() and local.is_conj())
    )


def run_all(tasks: Iterable[Task], threads: Executor | None, at_once: int) -> None:
    """Do them all, with help if there is any; the first error is told when nothing is at work."""
    left = deque(tasks)
    errors: list[Exception] = []

    def work() -> None:
        while left:
            try:
                task = left.popleft()
            except IndexError:
                return  # Another one was faster.
            try:
                task()
            except Exception as error:  # It is raised below.
                errors.append(error)

    helping = []
    if threads is not None:
        try:
            helping = [threads.submit(work) for _ in range(min(len(left), at_once) - 1)]
        except RuntimeError:
            pass  # The interpreter is about to exit, and nobody helps any more.
    work()
    wait(helping)
    if errors:
        raise errors[0]


def pin(image: Image) -> bool:
    """Have CUDA copy straight into the image, as long as it is mapped; False where it cannot."""
    cuda, start = torch.cuda.cudart(), image.address - image.body_at
    if int(cuda.cudaHostRegister(start, image.body_at + image.capacity, 0)) != 0:
        return False
    image.before_unmap.append(partial(cuda.cudaHostUnregister, start))
    return True


def _pieces(target: int, source: int, size: int) -> list[Task]:
    def piece(at: int) -> Task:
        count = min(PIECE_BYTES, size - at)
        return lambda: _libc.memcpy(target + at, source + at, count)

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


@dataclass
class _Run:
    """Small tensors with nothing but headers between them."""

    items: list[int]
    at: int
    size: int
    gaps: bytes
    """All that is between them, one after the other; so that it can be written along."""
    gap_sizes: list[int]
    raw_sizes: list[int]
    _addresses: tuple[int, ...] = ()
    _vectors: array[int] | None = None

    def task(self, everywhere: list[int], image: Image) -> Task:
        addresses = itemgetter(*self.items, -1)(everywhere)[:-1]
        if addresses != self._addresses:
            # Another list, not the old one changed: a copy may still be using that.
            self._addresses, self._vectors = addresses, self._vectors_of(addresses)
        vectors, count = self._vectors, 2 * len(self.items) - 1
        assert vectors is not None

        def gather() -> None:
            where, _ = vectors.buffer_info()
            # Not kept open: a script may close all files, and have one of its own by that number.
            fd = os.open(image.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                done = _libc.pwritev(fd, where, count, image.body_at + self.at)
            finally:
                os.close(fd)
            if done != self.size:
                number = ctypes.get_errno()
                why = os.strerror(number) if done < 0 else f"{done} of {self.size} bytes"
                raise CheckpointError(f"{image.path}: {why} while gathering small tensors")

        return gather

    def _vectors_of(self, addresses: tuple[int, ...]) -> array[int]:
        constant = ctypes.cast(ctypes.c_char_p(self.gaps), ctypes.c_void_p).value or 0
        flat: list[int] = []
        for address, size, gap in zip(addresses, self.raw_sizes, self.gap_sizes, strict=True):
            if gap:
                flat += (constant, gap)
                constant += gap
            flat += (address, size)
        return array("Q", flat)


def _runs(layout: Layout, small: list[int], guarded: Set[int]) -> Iterable[_Run]:
    start = 0
    for end in range(1, len(small) + 1):
        full = end == len(small) or end - start == _BATCH
        if full or _apart(layout, small[end - 1], small[end], guarded):
            yield _run(layout, small[start:end])
            start = end


def _apart(layout: Layout, one: int, other: int, guarded: Set[int]) -> bool:
    """Whether there is more between two items than padding and a header, or they differ in guard."""
    first, second = layout.items[one], layout.items[other]
    far = second.framed.at - first.raw.end > ALIGNMENT
    return far or (one in guarded) != (other in guarded)


def _run(layout: Layout, items: list[int]) -> _Run:
    gaps, gap_sizes = [], [0]
    for before, after in itertools.pairwise(items):
        end, item = layout.items[before].raw.end, layout.items[after]
        header = layout.headers[item.framed.at]
        gaps.append(bytes(item.framed.at - end) + header)
        gap_sizes.append(item.raw.at - end)
    first, last = layout.items[items[0]], layout.items[items[-1]]
    sizes = [layout.items[index].raw.size for index in items]
    at = first.raw.at
    return _Run(items, at, last.raw.end - at, b"".join(gaps), gap_sizes, sizes)
