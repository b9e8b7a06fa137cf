"""Manages all images of a node: those of its own ranks, and copies of other nodes'.

They are files in one directory of shared memory, which the launcher owns: it outlives workers, keepers
and agents, and ends with the job. Workers write their own images; everything else is the keeper's. An
image's state is kept in its file alone, so a keeper that is started again finds all of them.

Of another node's rank the two newest copies stay; a third reuses the memory of the oldest.

Replication knows a node's images as an `ImageStore`. An image that is whole is *held* and can be
sent; one that is being received is *incoming*, and invisible until all its blocks have matched their
digests.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from msgspec import Meta, Struct

from holdfast.checkpoint.memory.image import Image, ImageRecord, remove_image
from holdfast.checkpoint.state.layout import ByteSpan
from holdfast.errors import CheckpointError, Unusable
from holdfast.messages.checkpoints import ImageId, SnapshotId
from holdfast.messages.units import Rank, RoundNumber, StepNumber


class Outline(Struct, frozen=True):
    """What a receiver has to know of an image before its bytes."""

    id: ImageId
    size: Annotated[int, Meta(ge=1, le=1 << 53)]
    """Bytes of the body."""
    digests: bytes
    """16 bytes for each block of the body."""
    contents: ByteSpan
    """Where the encoded contents are in the body."""


class Held(Struct):
    """An image that can be sent. Its descriptor stays open until it is released."""

    id: ImageId
    fd: int
    body_at: int
    """Offset of the body in the file."""
    size: int
    digests: bytes
    contents: ByteSpan
    image: Image | None = None

    @property
    def view(self) -> memoryview | None:
        """The body, if the store has it mapped."""
        return None if self.image is None else self.image.body[: self.size]

    @property
    def outline(self) -> Outline:
        return Outline(self.id, self.size, self.digests, self.contents)


class IncomingImage(Struct):
    """Memory for an image that is being received. Each store has a subclass with its location."""

    id: ImageId
    size: int
    digests: bytes
    contents: ByteSpan

    @property
    def view(self) -> memoryview:
        """The body, mapped and allocated."""
        raise NotImplementedError


class ImageStore(Protocol):
    """A node's images. Its methods are called from several threads at once."""

    def find(self, id: ImageId) -> Held | None:
        """Return the image, which the caller releases; None if it is not here."""

    def release(self, held: Held) -> None:
        """Close a held image."""

    def place(self, outline: Outline) -> IncomingImage:
        """Allocate memory; raise StorageError or OSError if there is none. Reused memory is filled
        twice as fast."""

    def complete(self, place: IncomingImage) -> Held:
        """Make an image visible that is whole and verified. The caller releases it. If this raises,
        the image is still to be dropped."""

    def drop(self, place: IncomingImage) -> None:
        """Discard an image that will not become whole; no thread writes to it any more."""


# ---- the files -----------------------------------------------------------------------------------

COPIES = 2


def image_path(directory: Path, checkpointer: str, rank: int, slot: int) -> Path:
    """Return the path of one of a rank's two images."""
    return directory / f"{checkpointer}-{rank}-{slot}.image"


def id_of(record: ImageRecord) -> ImageId:
    snapshot = SnapshotId(record.checkpointer, StepNumber(record.step), RoundNumber(record.round))
    return ImageId(snapshot, Rank(record.rank), record.world_size)


def _copy_stem(id: ImageId) -> str:
    return f"{id.snapshot.checkpointer}-{id.rank}-copy"


class _IncomingFile(IncomingImage):
    image: Image
    fd: int

    @property
    def view(self) -> memoryview:
        return self.image.body[: self.size]


@dataclass
class _Open:
    image: Image
    file: tuple[int, int]
    """Device and inode."""


def _file_at(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


class Images:
    """The `ImageStore` of a directory. Its methods may be called from any thread."""

    def __init__(
        self, directory: Path, received: Callable[[ImageId], None] = lambda image: None
    ) -> None:
        self.directory = directory
        self._received = received
        """Called with each copy that is complete."""
        self.own_ranks: frozenset[int] = frozenset()
        """Ranks whose workers on this node write their images."""
        self._lock = threading.Lock()
        self._open: dict[Path, _Open] = {}
        self._pins: dict[tuple[Image, int], int] = {}
        self._placing = threading.Lock()
        self._filling: set[Path] = set()
        """Copies being received."""

    def image(self, path: Path) -> Image:
        """Return a mapping of that image, kept for the next time: faulting in its pages is slow."""
        with self._lock:
            file = _file_at(path)
            known = self._open.get(path)
            if known is None or known.file != file:
                # An older mapping of that name is closed when its last user drops it.
                known = self._open[path] = _Open(Image.open(path), file)
            return known.image

    def all(self) -> Iterator[tuple[Path, Image, ImageRecord]]:
        """Yield every image that is whole."""
        paths = sorted(self.directory.glob("*.image"))
        self._forget_others(paths)
        for path in paths:
            with suppress(OSError, Unusable):
                image = self.image(path)
                record = image.record()
                if record is not None:
                    yield path, image, record

    def _forget_others(self, paths: list[Path]) -> None:
        """Unmap images that were deleted, which keep their memory while mapped."""
        with self._lock:
            for path in self._open.keys() - set(paths) - self._filling:
                del self._open[path]

    def unpin_all(self) -> None:
        """Remove the pins that a keeper which died may have left."""
        for path in self.directory.glob("*.image"):
            with suppress(OSError, Unusable):
                self.image(path).unpin()

    @contextmanager
    def pinned(self, image: Image, state: int) -> Iterator[bool]:
        """Keep an image from being overwritten; yield False if it was already."""
        key = (image, state)
        with self._lock:
            count = self._pins.get(key, 0)
            held = image.pin(state) if count == 0 else image.settled == state
            if held:
                self._pins[key] = count + 1
        try:
            yield held
        finally:
            if held:
                self._unpin(image, key)

    def _unpin(self, image: Image, key: tuple[Image, int]) -> None:
        with self._lock:
            self._pins[key] -= 1
            if self._pins[key] == 0:
                del self._pins[key]
                image.unpin()

    def sealed(self, id: ImageId) -> tuple[Image, ImageRecord, int, bytes] | None:
        """Return a sealed image with its record, state and digests; None if it is not here."""
        for _, image, record in self.all():
            state, digests = image.settled, image.digests()
            if id_of(record) == id and digests is not None:
                return image, record, state, digests
        return None

    def ids(self) -> list[ImageId]:
        return [id_of(record) for _, image, record in self.all() if image.digests() is not None]

    def drop_older(self, checkpointer: str, step: int, round: int) -> None:
        """Remove images of earlier rounds that no restore will go back to."""
        for path, image, record in self.all():
            mine = record.rank in self.own_ranks and not path.name.startswith(
                _copy_stem(id_of(record))
            )
            outdated = record.round < round and record.step < step and not mine
            if record.checkpointer == checkpointer and outdated and not image.pinned:
                remove_image(path)

    # ---- as an `ImageStore` ----

    def find(self, id: ImageId) -> Held | None:
        found = self.sealed(id)
        if found is None:
            return None
        image, record, _, digests = found
        fd = os.open(image.path, os.O_RDONLY | os.O_CLOEXEC)
        return Held(id, fd, image.body_at, record.size, digests, record.contents, image)

    def release(self, held: Held) -> None:
        os.close(held.fd)

    def place(self, outline: Outline) -> IncomingImage:
        with self._placing:
            image = self._room(outline.id, outline.size)
        fd = os.open(image.path, os.O_RDWR | os.O_CLOEXEC)
        o = outline
        return _IncomingFile(o.id, o.size, o.digests, o.contents, image, fd)

    def _room(self, id: ImageId, size: int) -> Image:
        stem = _copy_stem(id)
        kept = [
            (record.round, record.step, image)
            for path, image, record in self.all()
            if path.name.startswith(stem) and path not in self._filling
        ]
        kept.sort(key=lambda one: one[:2])
        for *_, image in kept[: max(0, len(kept) - COPIES + 1)]:
            if image.capacity >= size and image.begin():
                self._filling.add(image.path)
                return image
            image.path.unlink(missing_ok=True)
        path = self.directory / f"{stem}{id.snapshot.step}.{id.snapshot.round}.image"
        image = Image.create(path, size)
        image.begin()
        with self._lock:
            self._filling.add(path)
            self._open[path] = _Open(image, _file_at(path))
        return image

    def complete(self, place: IncomingImage) -> Held:
        assert isinstance(place, _IncomingFile)
        id = place.id
        record = ImageRecord(
            checkpointer=id.snapshot.checkpointer,
            step=id.snapshot.step,
            round=id.snapshot.round,
            rank=id.rank,
            world_size=id.world_size,
            size=place.size,
            contents=place.contents,
        )
        if place.image.keep_seal(place.image.finish(record), place.digests) is None:
            raise CheckpointError(f"{place.image.path}: changed while it was filled")
        self._filling.discard(place.image.path)
        self._received(id)
        p = place
        return Held(id, p.fd, p.image.body_at, p.size, p.digests, p.contents, p.image)

    def drop(self, place: IncomingImage) -> None:
        assert isinstance(place, _IncomingFile)
        os.close(place.fd)
        place.image.path.unlink(missing_ok=True)
        self._filling.discard(place.image.path)
