"""From a body in memory to a rank's file on storage.

Writing is one sequential copy out of the mapped memory, block by block, with nothing copied in
between; digests are computed beside it, in another thread, of the same memory.

What all ranks have in common is written once: each rank writes a slice of it. The slices follow from
the contents alone, so that all ranks with the same contents find the same ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from msgspec.structs import replace

from holdfast.checkpoint.state.layout import BLOCK_BYTES, Contents, Extent, Span, Trailer
from holdfast.checkpoint.storage.backends import Buffer, Storage
from holdfast.checkpoint.storage.digests import digest
from holdfast.checkpoint.storage.manifest import find_step
from holdfast.checkpoint.storage.names import step_directory
from holdfast.checkpoint.storage.rank_file import FileRecord, ending, place
from holdfast.errors import StepTaken, StorageError

# ---- which rank writes what ---------------------------------------------------------------------


def slices(contents: Contents, world_size: int) -> list[Span]:
    """What of the shared part each rank writes: whole items, about the same bytes each."""
    shared = contents.shared
    inside = (i.framed.at for i in contents.items if shared.at <= i.framed.at < shared.end)
    places = [*sorted(inside), shared.end]
    cuts = [shared.at]
    for rank in range(1, world_size):
        ideal = shared.at + shared.size * rank // world_size
        after = bisect_left(places, ideal)
        near = min(places[max(after - 1, 0) : after + 1], key=lambda at: abs(at - ideal))
        cuts.append(max(cuts[-1], near))
    return [Span(a, b - a) for a, b in zip(cuts, [*cuts[1:], shared.end], strict=True)]


def extents_of(
    contents: Contents, rank: int, world_size: int, shared: Literal["slice", "all"]
) -> tuple[Extent, ...]:
    """What of a body goes into a rank's file, and where in it."""
    common = slices(contents, world_size)[rank] if shared == "slice" else contents.shared
    extents: list[Extent] = []
    file_at = 0
    for part in (contents.own, common, contents.tail):
        if not part.size:
            continue
        before = extents[-1] if extents else Extent(0, 0, 0)
        if extents and before.body_at + before.size == part.at:
            extents[-1] = Extent(before.body_at, before.file_at, before.size + part.size)
        else:
            extents.append(Extent(part.at, file_at, part.size))
        file_at += part.size
    return tuple(extents)


# ---- writing ------------------------------------------------------------------------------------


def write_file(
    storage: Storage,
    directory: str,
    name: str,
    body: memoryview,
    extents: Sequence[Extent],
    contents_span: Span,
    step: int,
    round: int,
    rank: int,
    world_size: int,
    went_on: Callable[[int], None],
    once: bool = True,
) -> FileRecord:
    """Write a rank's file, durably; `went_on` is told how many bytes more are on their way.

    A step is written `once`: when it is committed already, that is refused.
    """
    assert place(contents_span, extents) is not None, "a file has the contents in it"
    if once:
        _refuse_if_taken(storage, step)
    size = sum(extent.size for extent in extents)
    trailer = Trailer(step, round, rank, world_size, tuple(extents), contents_span, size, b"")
    try:
        storage.make_directory(directory)
        with ThreadPoolExecutor(1, "digest") as beside:
            writing = _Writing(body, trailer, beside, went_on)
            size = storage.write(f"{directory}/{name}", writing.pieces())
    except StorageError:
        # Whoever committed the step first tidies up after the others; then this is no failure.
        if once:
            _refuse_if_taken(storage, step)
        raise
    contents = digest(body[contents_span.at : contents_span.end])
    return FileRecord(rank, name, size, writing.digest.hex(), contents.hex())


def _refuse_if_taken(storage: Storage, step: int) -> None:
    found = find_step(storage, step)
    if found.state == "complete" and found.manifest is not None:
        raise StepTaken(
            f"{storage.where(step_directory(step))}: step {step} was committed in round"
            f" {found.manifest.round} already, and is not written again; move it away, or save"
            " elsewhere, to have this one"
        )


def _blocks(body: memoryview, extents: Sequence[Extent]) -> Iterator[list[memoryview]]:
    """The file's blocks, each as the stretches of the body that it consists of."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for extent in extents:
        rest = body[extent.body_at : extent.body_at + extent.size]
        while rest:
            block.append(rest[:room])
            rest, room = rest[room:], room - len(block[-1])
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


def _digest_of_block(parts: list[memoryview]) -> bytes:
    return digest(parts[0] if len(parts) == 1 else b"".join(parts))


class _Writing:
    """The bytes of a file in their order; what comes last depends on all before."""

    def __init__(
        self,
        body: memoryview,
        trailer: Trailer,
        beside: ThreadPoolExecutor,
        went_on: Callable[[int], None],
    ) -> None:
        self.digest = b""
        """Of the trailer, once all was written."""
        self._body = body
        self._trailer = trailer
        self._beside = beside
        self._went_on = went_on

    def pieces(self) -> Iterator[Buffer]:
        digests: list[Future[bytes]] = []
        for parts in _blocks(self._body, self._trailer.extents):
            digests.append(self._beside.submit(_digest_of_block, parts))
            for part in parts:
                yield part
                self._went_on(len(part))
        found = b"".join(future.result() for future in digests)
        end, self.digest = ending(replace(self._trailer, digests=found))
        yield end
