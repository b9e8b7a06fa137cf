"""A checkpoint's files are what `torch.distributed.checkpoint` reads, and were made without torch."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.utils import _create_file_view

from holdfast.checkpoint.dcp import records as op
from holdfast.checkpoint.dcp.foreign import FileRange, read_metadata
from holdfast.checkpoint.dcp.metadata import File, metadata
from holdfast.checkpoint.dcp.records import ELEMENT_BYTES, element_bytes, tensor_header, value_bytes
from holdfast.checkpoint.state.layout import (
    ALIGNMENT,
    ByteSpan,
    Contents,
    Extent,
    Kind,
    TensorItem,
    ValueItem,
    aligned,
)
from holdfast.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SAVED_DTYPES = sorted(dtype for dtype in ELEMENT_BYTES if hasattr(torch, dtype))
DTYPES = st.sampled_from(SAVED_DTYPES)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def raw_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().clone(memory_format=torch.contiguous_format).untyped_storage())


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ---- one tensor, one value ----


@pytest.mark.parametrize("dtype", SAVED_DTYPES)
def test_torch_and_we_agree_on_the_bytes_of_an_element(dtype: str) -> None:
    assert element_bytes(dtype) == getattr(torch, dtype).itemsize


@given(
    dtype=DTYPES, sizes=SHAPES, seed=st.randoms(use_true_random=False), before=st.integers(0, 200)
)
@settings(max_examples=150, deadline=None)
def test_a_header_and_raw_bytes_are_a_tensor(
    dtype: str, sizes: tuple[int, ...], seed: Any, before: int
) -> None:
    size = prod(sizes) * ELEMENT_BYTES[dtype]
    raw = bytes(seed.randrange(2 if dtype == "bool" else 256) for _ in range(size))
    framed = tensor_header(dtype, sizes) + raw
    # As `FileSystemReader` reads it: a stretch of a file, with other things before and after it.
    view = _create_file_view(io.BytesIO(bytes(before) + framed + b"more"), before, len(framed))
    for weights_only in (True, False):
        view.seek(0)
        tensor = torch.load(view, map_location="cpu", weights_only=weights_only, mmap=False)
        assert dtype_of(tensor) == dtype
        assert tuple(tensor.shape) == sizes
        assert tensor.is_contiguous()
        assert tensor.stride() == torch.empty(sizes).stride()
        assert not tensor.requires_grad
        assert bytes(tensor.untyped_storage()) == raw


@given(dtype=DTYPES, sizes=st.lists(st.integers(0, 1 << 19), max_size=3).map(tuple))
def test_a_header_keeps_the_alignment(dtype: str, sizes: tuple[int, ...]) -> None:
    assert len(tensor_header(dtype, sizes)) % ALIGNMENT == 0


def test_a_dtype_that_cannot_be_saved_is_an_error_that_names_it() -> None:
    with pytest.raises(CheckpointError, match="quint8"):
        tensor_header("quint8", (1,))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(min_size=1, max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
        | st.sets(st.integers(), max_size=4)
    ),
    max_leaves=20,
)


@given(PLAIN)
@settings(deadline=None)
def test_a_plain_value_comes_back_whatever_the_reader_allows(value: object) -> None:
    # Empty bytes do not: torch itself writes them as what its `weights_only` refuses.
    for weights_only in (True, False):
        got = torch.load(io.BytesIO(value_bytes(value)), weights_only=weights_only)
        assert got == value
        assert type(got) is type(value)


def test_what_cannot_be_pickled_is_an_error_of_ours() -> None:
    with pytest.raises(CheckpointError, match="function"):
        value_bytes(lambda: None)


# ---- a directory, by hand ----


@dataclass
class Body:
    """A rank's body, put together the simple way."""

    rank: int
    world_size: int
    data: bytearray = field(default_factory=bytearray)
    items: list[TensorItem] = field(default_factory=list)
    values: list[ValueItem] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)

    def put(
        self,
        name: str,
        whole: torch.Tensor,
        kind: Kind = "own",
        offsets: tuple[int, ...] | None = None,
        sizes: tuple[int, ...] | None = None,
        also: tuple[str, ...] = (),
    ) -> None:
        shape = tuple(whole.shape)
        offsets, sizes = offsets or (0,) * len(shape), sizes or shape
        part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        header, raw = tensor_header(dtype_of(whole), sizes), raw_of(part)
        at = aligned(len(self.data))
        self.data += bytes(at - len(self.data)) + header + raw
        framed = ByteSpan(at, len(header) + len(raw))
        where = framed, ByteSpan(at + len(header), len(raw))
        self.items.append(
            TensorItem(name, kind, dtype_of(whole), shape, offsets, sizes, *where, also)
        )

    def put_value(self, name: str, value: object) -> None:
        data = value_bytes(value)
        self.values.append(ValueItem(name, ByteSpan(len(self.data), len(data))))
        self.data += data

    def contents(self) -> Contents:
        nothing = ByteSpan(0, 0)
        return Contents(
            step=1,
            round=0,
            rank=self.rank,
            world_size=self.world_size,
            own=nothing,
            shared=nothing,
            tail=nothing,
            skeleton=nothing,
            items=tuple(self.items),
            values=tuple(self.values),
            paths=tuple(self.paths.items()),
        )

    def write(self, path: Path) -> File:
        """All but the shared items that are another rank's to write, one extent for each gap."""
        shared = [item for item in self.items if item.kind == "shared"]
        others = [s for at, s in enumerate(shared) if at % self.world_size != self.rank]
        extents, file, at = [], bytearray(b"a file may begin with anything"), 0
        for skipped in [*(item.framed for item in others), ByteSpan(len(self.data), 0)]:
            extents.append(Extent(at, len(file), skipped.at - at))
            file += self.data[at : skipped.at]
            at = skipped.end
        path.write_bytes(file)
        return path.name, self.contents(), extents


def shard(whole: torch.Tensor, dim: int, rank: int, world_size: int) -> dict[str, Any]:
    """The part of a rank, as DTensor cuts it: the last ranks may have less, or nothing."""
    step = -(-whole.shape[dim] // world_size)
    begin = min(rank * step, whole.shape[dim])
    end = min(begin + step, whole.shape[dim])
    offsets = tuple(begin if d == dim else 0 for d in range(whole.dim()))
    sizes = tuple(end - begin if d == dim else n for d, n in enumerate(whole.shape))
    return {"kind": "shard", "offsets": offsets, "sizes": sizes}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, prod(shape) + 1).reshape(shape).to(dtype)


WORLD_SIZE = 4
ROWS, COLUMNS = numbers(10, 6), numbers(4, 8, dtype=torch.bfloat16)
SHORT, GRID = numbers(3, 5, dtype=torch.int64), numbers(6, 4, dtype=torch.float64)
EMBEDDING, FP8 = numbers(7, 3), numbers(9, dtype=torch.float32).to(torch.float8_e4m3fn)
NORM, STEP, EMPTY = numbers(5, dtype=torch.float16), torch.tensor(12.5), torch.zeros(0, 3)
GROUPS = [{"lr": 1e-3, "betas": (0.9, 0.999)}, {"lr": 1e-4, "betas": (0.9, 0.99)}]
STATE = {
    "model": {
        "layers.0.rows": ROWS,
        "columns": COLUMNS,
        "short": SHORT,
        "grid": GRID,
        "embedding": {"weight": EMBEDDING},
        "head": {"weight": EMBEDDING},
        "fp8": FP8,
        "norm": NORM,
        "empty": EMPTY,
    },
    "optim": {"state": {"0": {"step": STEP}}, "param_groups": GROUPS},
    "list": [NORM, 3, {"x": SHORT}],
    "rng": numbers(16, dtype=torch.uint8),
    "of rank 2": numbers(2, 2),
    "epoch": 7,
    "name": "täst",
}


def body_of(rank: int) -> Body:
    body = Body(rank, WORLD_SIZE)
    body.put("model.layers.0.rows", ROWS, **shard(ROWS, 0, rank, WORLD_SIZE))
    body.paths["model.layers.0.rows"] = ("model", "layers.0.rows")
    body.put("model.columns", COLUMNS, **shard(COLUMNS, 1, rank, WORLD_SIZE))
    body.put("model.short", SHORT, **shard(SHORT, 0, rank, WORLD_SIZE))
    place = (rank // 2 * 3, rank % 2 * 2)
    body.put("model.grid", GRID, kind="shard", offsets=place, sizes=(3, 2))
    body.put("rng", STATE["rng"] if rank == 0 else numbers(17, dtype=torch.uint8))
    if rank == 2:
        body.put("of rank 2", numbers(2, 2))
    body.put("optim.state.0.step", STEP)
    body.put("model.empty", EMPTY)
    body.put("model.embedding.weight", EMBEDDING, "shared", also=("model.head.weight",))
    for name, tensor in (("model.fp8", FP8), ("model.norm", NORM), ("list.0", NORM)):
        body.put(name, tensor, "shared")
    body.put("list.2.x", SHORT, "shared")
    body.put_value("list.1", 3)
    for at, group in enumerate(GROUPS):
        for key, value in group.items():
            body.put_value(f"optim.param_groups.{at}.{key}", value)
            body.paths[f"optim.param_groups.{at}.{key}"] = ("optim", "param_groups", at, key)
    body.put_value("epoch", 7 + rank)
    body.put_value("name", "täst")
    body.paths |= {"list.0": ("list", 0), "list.1": ("list", 1), "list.2.x": ("list", 2, "x")}
    return body


def write_checkpoint(directory: Path) -> list[File]:
    directory.mkdir()
    files = [body_of(rank).write(directory / f"__{rank}_0.distcp") for rank in (3, 1, 0, 2)]
    (directory / ".metadata").write_bytes(metadata(files))
    return files


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dcp") / "step_1"
    write_checkpoint(directory)
    return directory


def run_plain_reader(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs it in a process group of its own, all of which is gone afterwards."""
    script = Path(__file__).with_name("plain_reader.py")
    process = subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def test_plain_torch_reads_it_in_worlds_of_other_sizes_and_other_shardings(directory: Path) -> None:
    shards = {"model.layers.0.rows": 1, "model.columns": 0, "model.short": 0, "model.grid": 1}
    expected = directory.parent / "expected.pt"
    torch.save((STATE, shards), expected)
    done = run_plain_reader(directory, expected, "1", "2", "8")
    assert done.returncode == 0, done.stdout


# ---- what the metadata says ----


def loaded(data: bytes) -> Any:
    return pickle.loads(data)


def test_it_is_the_metadata_that_torch_would_have_written(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    theirs = loaded((tmp_path / ".metadata").read_bytes())
    body = Body(0, 1)
    for name, thing in theirs.planner_data.items():
        value: Any = STATE
        for key in thing:
            value = value[key]
        if isinstance(value, torch.Tensor):
            body.put(name, value)
        else:
            body.put_value(name, value)
        body.paths[name] = thing
    ours = loaded(metadata([body.write(tmp_path / "__0_0.distcp")]))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert {vars(i)["index"] for i in ours.storage_data} == {i.index for i in theirs.storage_data}
    assert ours.version == theirs.version
    assert type(ours) is type(theirs)
    assert {type(info) for info in ours.storage_data.values()} == {
        type(info) for info in theirs.storage_data.values()
    }


def test_each_place_holds_what_it_should(directory: Path) -> None:
    stored = read_metadata((directory / ".metadata").read_bytes())

    def at(place: FileRange) -> Any:
        with (directory / place.path).open("rb") as file:
            return torch.load(_create_file_view(file, place.at, place.size), weights_only=True)

    assert at(stored.values["epoch"]) == 7
    assert stored.tensors["rng"].shape == (16,)
    assert stored.tensors["model.head.weight"] == stored.tensors["model.embedding.weight"]
    assert [chunk.offsets for chunk in stored.tensors["model.short"].chunks] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]
    for chunk in stored.tensors["model.layers.0.rows"].chunks:
        begin, size = chunk.offsets[0], chunk.sizes[0]
        assert torch.equal(at(chunk.place), ROWS[begin : begin + size])
    assert stored.paths["model.layers.0.rows"] == ("model", "layers.0.rows")
    assert stored.paths["list.2.x"] == ("list", 2, "x")
    # The shared tensors are spread over the files, each in one.
    shared = ("model.embedding.weight", "model.fp8", "model.norm", "list.0")
    assert {stored.tensors[name].chunks[0].place.path for name in shared} == {
        f"__{rank}_0.distcp" for rank in range(WORLD_SIZE)
    }


def test_the_same_chunk_in_two_files_counts_once() -> None:
    files = []
    for rank in range(4):
        body = Body(rank, 4)
        body.put("w", ROWS, **shard(ROWS, 0, rank % 2, 2))
        files.append((f"{rank}", body.contents(), [Extent(0, 0, len(body.data))]))
    stored = read_metadata(metadata(files))
    assert [chunk.place.path for chunk in stored.tensors["w"].chunks] == ["0", "1"]


def test_a_tensor_that_no_file_has_all_of_is_an_error_that_names_it() -> None:
    body = Body(0, 2)
    body.put("w", ROWS, **shard(ROWS, 0, 0, 2))
    with pytest.raises(CheckpointError, match="w is incomplete"):
        metadata([("0", body.contents(), [Extent(0, 0, len(body.data))])])
    with pytest.raises(CheckpointError, match="w is incomplete"):
        metadata([("0", body.contents(), [])])


def test_a_value_that_no_file_has_is_an_error_that_names_it() -> None:
    body = Body(0, 1)
    body.put_value("epoch", 1)
    with pytest.raises(CheckpointError, match="epoch is incomplete"):
        metadata([("0", body.contents(), [Extent(0, 0, len(body.data) - 1)])])


def test_a_rank_may_have_several_files() -> None:
    body = Body(0, 1)
    body.put("w", ROWS)
    body.put_value("v", 1)
    cut = body.values[0].framed.at
    halves = [[Extent(cut, 0, len(body.data) - cut)], [Extent(0, 5, cut)]]
    stored = read_metadata(metadata([(f"{n}", body.contents(), e) for n, e in enumerate(halves)]))
    assert stored.values["v"] == FileRange("0", 0, body.values[0].framed.size)
    assert stored.tensors["w"].chunks[0].place == FileRange("1", 5, body.items[0].framed.size)


def test_parts_of_different_tensors_are_an_error_that_names_them() -> None:
    files = []
    for rank, whole in enumerate((ROWS, ROWS.double())):
        body = Body(rank, 2)
        body.put("w", whole, **shard(whole, 0, rank, 2))
        files.append((f"{rank}", body.contents(), [Extent(0, 0, len(body.data))]))
    with pytest.raises(CheckpointError, match=r"w is float32 \[10, 6\] .* float64"):
        metadata(files)


def test_offsets_beyond_four_gigabytes_survive() -> None:
    body = Body(0, 1)
    body.put("w", ROWS)
    far = Extent(0, 1 << 40, len(body.data))
    info = next(iter(loaded(metadata([("f", body.contents(), [far])])).storage_data.values()))
    assert (info.relative_path, info.offset, info.length) == (
        "f",
        1 << 40,
        body.items[0].framed.size,
    )


# As torch 2.3 has them, without what came later.


@dataclass
class Metadata:
    state_dict_metadata: Any
    planner_data: Any = None
    storage_data: Any = None


@dataclass
class _StorageInfo:
    relative_path: str
    offset: int
    length: int


@dataclass
class TensorProperties:
    dtype: Any = None
    layout: Any = None
    requires_grad: bool = False
    memory_format: Any = None
    pin_memory: bool = False

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("an enum of another module would be in here")


class OldTorch(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert name not in ("StorageMeta", "_MEM_FORMAT_ENCODING")
        return globals().get(name) or super().find_class(module, name)


def test_a_torch_without_the_newer_fields_and_classes_reads_it(directory: Path) -> None:
    old = OldTorch((directory / ".metadata").open("rb")).load()
    new = loaded((directory / ".metadata").read_bytes())
    assert isinstance(old, Metadata)
    assert old.planner_data == new.planner_data
    assert old.storage_data.keys() == new.storage_data.keys()


def test_none_of_it_needs_torch() -> None:
    code = """
import sys
from holdfast.checkpoint.dcp.records import tensor_header, value_bytes
from holdfast.checkpoint.dcp.metadata import metadata
from holdfast.checkpoint.dcp.foreign import read_metadata
from holdfast.checkpoint.state.layout import *
framed = ByteSpan(0, len(tensor_header("bfloat16", (2, 3))) + 12)
item = TensorItem("w", "own", "bfloat16", (2, 3), (0, 0), (2, 3), framed, ByteSpan(framed.end - 12, 12))
value = ValueItem("v", ByteSpan(framed.end, len(value_bytes({"a": 1}))))
none = ByteSpan(0, 0)
contents = Contents(1, 0, 0, 1, none, none, none, none, (item,), (value,))
read_metadata(metadata([("f", contents, [Extent(0, 0, value.framed.end)])]))
assert not {"torch", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


# ---- foreign metadata ----


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The metadata of a checkpoint that torch saved."""
    directory = tmp_path_factory.mktemp("foreign")
    dcp.save(STATE, checkpoint_id=directory, no_dist=True)
    return (directory / ".metadata").read_bytes()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_torch_saved_is_read_without_torch(foreign: bytes, protocol: int) -> None:
    theirs = loaded(foreign)
    stored = read_metadata(pickle.dumps(theirs, protocol))
    assert stored.paths == theirs.planner_data
    assert {*stored.tensors, *stored.values} == theirs.state_dict_metadata.keys()
    for index, info in theirs.storage_data.items():
        place = FileRange(info.relative_path, info.offset, info.length)
        if index.offset is None:
            assert stored.values[index.fqn] == place
        else:
            tensor = stored.tensors[index.fqn]
            assert f"torch.{tensor.dtype}" == str(
                theirs.state_dict_metadata[index.fqn].properties.dtype
            )
            assert [chunk.place for chunk in tensor.chunks] == [place]


def simple_metadata() -> bytes:
    body = Body(0, 1)
    body.put("w", ROWS)
    body.put_value("v", 1)
    return metadata([("f", body.contents(), [Extent(0, 0, len(body.data))])])


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


TORCH_SIZE = op.named("torch", "Size")
METADATA = op.named("torch.distributed.checkpoint.metadata", "Metadata")
DEEP = op.EMPTY_TUPLE + op.TUPLE_1 * 200_000


def malicious() -> Iterator[tuple[str, bytes]]:
    for protocol in range(6):
        yield f"os.system, protocol {protocol}", pickle.dumps(Evil(os.system, ("false",)), protocol)
    yield "eval", pickle.dumps(Evil(eval, ("1",)))
    yield "getattr of a class", op.call(op.named("builtins", "getattr"), METADATA, op.text("mro"))
    yield "a dotted name", b"\x80\x04" + op.text("torch.distributed") + op.text("x.y") + b"\x93."
    yield "torch.load", op.call(op.named("torch", "load"), op.text("/dev/zero"))
    yield "state for a class", METADATA + op.dict_of(("__init__", op.NONE)) + op.BUILD
    yield "a call of a dtype", op.call(op.named("torch", "float32"))
    yield "a call of a record", op.call(op.call(METADATA))
    yield "a persistent id", op.text("x") + op.PERSISTENT
    yield "an extension", b"\x82\x01"
    yield "an old instance", b"(ios\nsystem\n"
    yield "a deep key", op.EMPTY_DICT + DEEP + op.NONE + b"s"
    yield "a deep thing", DEEP
    yield "a deep record", (METADATA + op.MARK) * 100_000 + (op.TUPLE + op.CALL) * 100_000
    yield "deep sizes", op.call(TORCH_SIZE, DEEP)
    yield "many sizes", op.call(TORCH_SIZE, op.tuple_of(*[op.whole(1)] * 65))
    yield "a list as a key", op.EMPTY_DICT + op.EMPTY_LIST + op.NONE + b"s"
    yield "itself", op.EMPTY_LIST + op.put(0) + op.get(0) + b"a"
    yield "a huge memo", op.NONE + op.put((1 << 32) - 1)
    yield "a huge string", b"X\xff\xff\xff\x7f"
    yield "huge bytes", b"\x96" + b"\xff" * 7 + b"\x7f"
    yield "an empty stack", op.TUPLE_3
    yield "no mark", op.TUPLE
    yield "nothing", b""


@pytest.mark.parametrize(
    "program", [pytest.param(program, id=what) for what, program in malicious()]
)
def test_what_is_no_metadata_is_refused(program: bytes) -> None:
    whole = program if program[:1] == b"\x80" else op.BEGIN + program + op.END
    with pytest.raises(CheckpointError, match=r"^\.metadata cannot be used: "):
        read_metadata(whole)


@pytest.mark.parametrize("path", ["/etc/passwd", "../f", "a/../../f", "", "C:\\f", "..\\f", "a\0"])
def test_a_path_out_of_the_directory_is_refused(path: str) -> None:
    body = Body(0, 1)
    body.put("w", ROWS)
    with pytest.raises(CheckpointError, match="outside"):
        read_metadata(metadata([(path, body.contents(), [Extent(0, 0, len(body.data))])]))


def test_one_list_of_chunks_cannot_be_had_by_many_tensors() -> None:
    metadata_module = dcp.metadata
    size = torch.Size((1,))
    chunk = metadata_module.ChunkStorageMetadata(torch.Size((0,)), size)
    tensor = metadata_module.TensorStorageMetadata(
        metadata_module.TensorProperties(), size, [chunk] * 100
    )
    info = dcp.filesystem._StorageInfo("f", 0, 1)
    many = {f"{n}": tensor for n in range(100)}
    places = {metadata_module.MetadataIndex(name, (0,)): info for name in many}
    with pytest.raises(CheckpointError, match="more than are stored"):
        read_metadata(pickle.dumps(metadata_module.Metadata(many, None, places)))


def test_a_file_beyond_the_limit_is_refused_unread() -> None:
    data = simple_metadata()
    read_metadata(data, limit_bytes=len(data))
    with pytest.raises(CheckpointError, match="allowed"):
        read_metadata(data, limit_bytes=len(data) - 1)


def test_a_torn_file_is_refused_wherever_it_was_torn(foreign: bytes) -> None:
    for end in [*range(200), *range(200, len(foreign), 7)]:
        with pytest.raises(CheckpointError):
            read_metadata(foreign[:end])


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_damage_is_refused_or_does_not_matter(data: st.DataObject) -> None:
    damaged = bytearray(simple_metadata())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_metadata(bytes(damaged))
    except CheckpointError:
        pass


def test_what_we_write_is_a_pickle_like_any_other() -> None:
    pickletools.dis(simple_metadata(), io.StringIO())
    pickletools.dis(pickletools.optimize(simple_metadata()), io.StringIO())
