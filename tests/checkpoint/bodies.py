"""Bodies made by hand, without torch, and whole saves of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest

from holdfast.checkpoint.dcp import records as dcp
from holdfast.checkpoint.state import layout
from holdfast.checkpoint.state.layout import (
    ByteSpan,
    Contents,
    Extent,
    FileRecord,
    Kind,
    TensorItem,
    ValueItem,
    aligned,
)
from holdfast.checkpoint.storage import commit as commit_module
from holdfast.checkpoint.storage import rank_file as rankfile
from holdfast.checkpoint.storage.backends import Storage, rank_file_name, step_directory
from holdfast.checkpoint.storage.commit import AlreadyCommitted, Committed, commit
from holdfast.checkpoint.storage.manifest import steps
from holdfast.checkpoint.storage.rank_file import extents_of, write_file
from holdfast.checkpoint.storage.retention import KeepLatest, Pruned, plan, prune
from holdfast.errors import StepTaken


@dataclass
class Body:
    data: bytearray
    contents: Contents
    span: ByteSpan
    """Where the contents are."""

    def extents(self, shared: str = "slice") -> tuple[Extent, ...]:
        assert shared in ("slice", "all")
        whose = (self.contents.rank, self.contents.world_size)
        return extents_of(self.contents, *whose, "slice" if shared == "slice" else "all")


def make_body(
    step: int, round: int, rank: int, world_size: int, shared: int = 5, item_bytes: int = 300
) -> Body:
    """A rank's state: a tensor of its own, its shard of another, and what all ranks share."""
    data = bytearray()
    items = []

    def add(name: str, kind: Kind, size: int, seed: object, parts: int = 1) -> None:
        header = dcp.tensor_header("uint8", (size,))
        data.extend(bytes(aligned(len(data)) - len(data)))
        framed = ByteSpan(len(data), len(header) + size)
        data.extend(header + random.Random(repr((step, round, seed))).randbytes(size))
        at = rank * size if parts > 1 else 0
        raw = ByteSpan(framed.end - size, size)
        items.append(TensorItem(name, kind, "uint8", (size * parts,), (at,), (size,), framed, raw))

    add("rng", "own", 17, (rank, "rng"))
    add("weight", "shard", item_bytes, (rank, "weight"), world_size)
    own = ByteSpan(0, aligned(len(data)))
    for index in range(shared):
        add(f"layer{index}", "shared", item_bytes * (1 + index % 3), index)
    data.extend(bytes(aligned(len(data)) - len(data)))
    common = ByteSpan(own.end, len(data) - own.end)
    tail_at = len(data)
    value = dcp.value_bytes(step)
    values = (ValueItem("step", ByteSpan(tail_at, len(value))),)
    skeleton = ByteSpan(tail_at + len(value), 1)
    data.extend(value + b"\x80")
    whose = (step, round, rank, world_size)

    def encoded(tail: ByteSpan) -> bytes:
        contents = Contents(*whose, own, common, tail, skeleton, tuple(items), values)
        return msgspec.msgpack.encode(contents)

    end = aligned(len(data) + len(encoded(ByteSpan(tail_at, 0))) + 16)
    contents = encoded(ByteSpan(tail_at, end - tail_at))
    span = ByteSpan(len(data), len(contents))
    data.extend(contents + bytes(end - len(data) - len(contents)))
    return Body(data, msgspec.msgpack.decode(contents, type=Contents), span)


def write(storage: Storage, body: Body, shared: str = "slice") -> FileRecord:
    told = body.contents
    return write_file(
        storage,
        step_directory(told.step),
        rank_file_name(told.rank, told.round),
        memoryview(body.data),
        body.extents(shared),
        body.span,
        told.step,
        told.round,
        told.rank,
        told.world_size,
        lambda size: None,
    )


def bodies_of(step: int, round: int, world_size: int = 2) -> list[Body]:
    return [make_body(step, round, rank, world_size) for rank in range(world_size)]


def save(
    storage: Storage, step: int, round: int = 1, world_size: int = 2
) -> Committed | AlreadyCommitted:
    """All ranks write, and the step is committed."""
    records = [write(storage, body) for body in bodies_of(step, round, world_size)]
    return commit(storage, step, round, world_size, records, job="job", saved_at=1e9)


def save_and_prune(storage: Storage, step: int, round: int, keep: int) -> Pruned:
    """What a keeper does: save, unless it is saved already, and delete what is not kept."""
    try:
        save(storage, step, round)
    except StepTaken:
        pass
    return prune(storage, plan(KeepLatest(keep), steps(storage)))


def small_blocks(patch: pytest.MonkeyPatch, size: int = 1 << 10) -> None:
    """Files of many blocks without many megabytes."""
    for module in (layout, rankfile, commit_module):
        patch.setattr(module, "BLOCK_BYTES", size)
