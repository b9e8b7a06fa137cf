"""Holds a rank's snapshot in shared memory, which outlives the process that wrote it.

An image is a file in a memory file system:

    ┌ head: who, which step, state words ┬ seal: a digest per block ┬ body ──────────────┐
    └─ one page ─────────────────────────┴─ pages ──────────────────┴─ see `layout` ─────┘

Three words in the head form a seqlock, each written by one side alone:

- *state*, by the worker: a sequence number, odd while the body is being written and even once it is
  whole. A worker that dies while it copies leaves an odd number.
- *sealed*, by the keeper: the state whose block digests are in the seal.
- *pinned*, by the keeper: the state that it is reading and wants to stay.

A snapshot may be used when its state is even, the seal is of that state, and head and blocks match
their digests. Every rank has two images and writes the one that is not pinned, or the older; so a
save never waits for one that is being persisted, and a whole snapshot always exists.

Pinning and writing may race. Both sides first write their own word and then, after a memory fence, read
the other's; the one that sees the other steps back, so at least one does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from holdfast.checkpoint.memory.image_home import SPILL
from holdfast.checkpoint.state.layout import (
    DIGEST_BYTES,
    ByteSpan,
    aligned,
    block_digests,
    blocks_of,
    digest,
)
from holdfast.errors import StorageError, Unusable
from holdfast.kernel import Mapping

_MAGIC: Final = int.from_bytes(b"HFIMAGE1", "little")
_PAGE: Final = 4096
_STATE, _SEALED, _PINNED = 3, 4, 5
_RECORD_AT, _RECORD_MOST = 64, 2048
_SEAL_DIGEST_AT: Final = 3072
_POPULATE_WRITE: Final = 23
_PREFAULT_BYTES: Final = 64 << 20


class ImageRecord(Struct, frozen=True):
    """The identity and size of an image's content."""

    checkpointer: str
    """Name of the checkpointer that saved it."""
    step: int
    round: int
    rank: int
    world_size: int
    size: int
    """Bytes of the body."""
    contents: ByteSpan
    """Where the encoded contents are in the body."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ImageRecord)


class Image:
    """One mapping of an image file."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        size = os.fstat(fd).st_size
        if size < _PAGE:
            raise Unusable(f"{path} is not an image: {size} bytes")
        self._mapping = Mapping(fd, size)
        self.before_unmap: list[Callable[[], object]] = []
        """Callbacks to run before the memory is unmapped."""
        # Shared memory is not freed while it is mapped. At exit the kernel unmaps it, as threads may
        # still be using it.
        self._unmap = weakref.finalize(self, _unmap, self._mapping, self.before_unmap)
        self._unmap.atexit = False
        self._words = self._mapping.view[:_PAGE].cast("Q")
        magic, self.body_at, self.capacity = self._words[:3]
        if magic != _MAGIC or self.body_at + self.capacity > size:
            self.close()
            raise Unusable(f"{path} is not a Holdfast image, or is cut off")
        self.body = self._mapping.view[self.body_at : self.body_at + self.capacity]
        self.address = self._mapping.address + self.body_at

    @classmethod
    def create(cls, path: Path, capacity: int, after: int = 0, spill: bool = False) -> Image:
        """Create an image in place of what had that name, with its memory allocated.

        States continue those of the image that it replaces, so that the two cannot be confused. With
        `spill`, an image that does not fit there becomes a file in the directory's `SPILL`, to which
        the name is a link.
        """
        try:
            return cls._create(path, path, capacity, after)
        except OSError as error:
            elsewhere = path.parent / SPILL / path.name
            if spill and error.errno == errno.ENOSPC and elsewhere.parent.is_dir():
                with suppress(OSError):
                    return cls._create(path, elsewhere, capacity, after)
            raise StorageError(
                f"no {capacity / 1e9:.3g} GB of shared memory for a snapshot at {path}:"
                f" {error.strerror}; see `df -h {path.parent}`"
            ) from None

    @classmethod
    def _create(cls, path: Path, at: Path, capacity: int, after: int) -> Image:
        body_at = aligned(_PAGE + blocks_of(capacity) * DIGEST_BYTES, _PAGE)
        fresh = at.with_name(f".{at.name}.new")
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, body_at + capacity)
            head = (_MAGIC, body_at, capacity, after + after % 2)
            os.pwrite(fd, b"".join(n.to_bytes(8, "little") for n in head), 0)
            os.rename(fresh, at)
            if at != path:
                path.unlink(missing_ok=True)
                path.symlink_to(at.relative_to(path.parent))
            return cls(path, fd)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: Path) -> Image:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unusable(f"{path}: {error.strerror}") from None
        try:
            return cls(path, fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        for view in ("body", "_words"):
            if hasattr(self, view):
                getattr(self, view).release()
        self._unmap()

    @property
    def spilled(self) -> bool:
        """Whether it is a file elsewhere, because it did not fit into shared memory."""
        return self.path.is_symlink()

    def prefault(self, threads: Executor | None = None) -> None:
        """Fault in every page now, so that no save has to; a file's pages would be written to disk."""
        if self.spilled:
            return
        start = self.address - self.body_at
        size = self.body_at + self.capacity
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

        def touch(at: int) -> None:
            # Kernels before 5.14 lack MADV_POPULATE_WRITE; then the first save is slower.
            libc.madvise(start + at, min(_PREFAULT_BYTES, size - at), _POPULATE_WRITE)

        pieces = range(0, size, _PREFAULT_BYTES)
        list(threads.map(touch, pieces) if threads is not None else map(touch, pieces))

    # ---- the worker's side ----

    @property
    def state(self) -> int:
        return int(self._words[_STATE])

    @property
    def pinned(self) -> bool:
        """Whether the keeper is reading the current state."""
        return bool(self._words[_PINNED] == self.state != 0)

    def begin(self) -> bool:
        """Mark the body as being written; return False if the keeper has pinned it."""
        before = self.state
        if before and self._words[_PINNED] == before:
            return False
        self._words[_STATE] = before | 1
        _fence()
        if before and self._words[_PINNED] == before:
            self._words[_STATE] = before
            return False
        return True

    def finish(self, record: ImageRecord) -> int:
        """Mark the body as whole; return its new state."""
        data = _encoder.encode(record)
        data = len(data).to_bytes(4, "little") + data
        data += digest(data)
        assert len(data) <= _RECORD_MOST, "a record does not fit"
        self._mapping.view[_RECORD_AT : _RECORD_AT + len(data)] = data
        _fence()
        self._words[_STATE] = (self.state | 1) + 1
        return self.state

    # ---- the keeper's side ----

    def pin(self, state: int) -> bool:
        """Pin a state until it is released; return False if it was overwritten already."""
        self._words[_PINNED] = state
        _fence()
        if self.state == state:
            return True
        self._words[_PINNED] = 0
        return False

    def unpin(self) -> None:
        self._words[_PINNED] = 0

    @property
    def settled(self) -> int:
        """The state as the keeper sees it. A worker that is about to write and has not yet seen the
        pin sets the odd state for a moment; the body has not changed, and will not."""
        state, pinned = self.state, int(self._words[_PINNED])
        return pinned if pinned and state == pinned | 1 else state

    def record(self) -> ImageRecord | None:
        """Return what it holds; None while it is being written, or if it never was whole."""
        state = self.settled
        if state == 0 or state % 2:
            return None
        head = self._mapping.view[_RECORD_AT : _RECORD_AT + _RECORD_MOST]
        size = 4 + int.from_bytes(head[:4], "little")
        if size + DIGEST_BYTES > _RECORD_MOST:
            return None
        if digest(head[:size]) != head[size : size + DIGEST_BYTES]:
            return None
        try:
            record = _decoder.decode(head[4:size])
        except msgspec.DecodeError:
            return None
        return record if record.size <= self.capacity else None

    def seal(self, state: int, threads: Executor | None = None) -> bytes | None:
        """Compute and store the digests of a state; return None if it was overwritten meanwhile."""
        record = self.record()
        if record is None or self.settled != state:
            return None
        digests = block_digests(self.body[: record.size], threads)
        return self.keep_seal(state, digests)

    def keep_seal(self, state: int, digests: bytes) -> bytes | None:
        view = self._mapping.view
        view[_PAGE : _PAGE + len(digests)] = digests
        view[_SEAL_DIGEST_AT : _SEAL_DIGEST_AT + DIGEST_BYTES] = self._seal_digest(digests)
        _fence()
        if self.settled != state:
            return None
        self._words[_SEALED] = state
        return digests

    def digests(self) -> bytes | None:
        """Return the seal of the current state; None if there is none, or it is damaged."""
        record = self.record()
        if record is None or self._words[_SEALED] != self.settled:
            return None
        digests = bytes(self._mapping.view[_PAGE : _PAGE + blocks_of(record.size) * DIGEST_BYTES])
        kept = self._mapping.view[_SEAL_DIGEST_AT : _SEAL_DIGEST_AT + DIGEST_BYTES]
        return digests if kept == self._seal_digest(digests) else None

    def _seal_digest(self, digests: bytes) -> bytes:
        return digest(bytes(self._mapping.view[_RECORD_AT : _RECORD_AT + _RECORD_MOST]) + digests)


def remove_image(path: Path) -> None:
    """Remove an image's file, wherever it is; mappings of it stay valid."""
    if path.is_symlink():
        path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _unmap(mapping: Mapping, before: list[Callable[[], object]]) -> None:
    for act in before:
        act()
    mapping.close()


_fencing = threading.Lock()


def _fence() -> None:
    """Order memory accesses: taking a lock is a full memory fence."""
    with _fencing:
        pass
