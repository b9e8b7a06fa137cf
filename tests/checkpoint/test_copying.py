"""Whatever a tensor is, its image holds the same bits."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import Rank, bits, check_same, load, round_trip

from holdfast.checkpoint.dcp.records import ELEMENT_BYTES
from holdfast.checkpoint.memory import copying
from holdfast.checkpoint.memory.copying import LARGE_BYTES, Copier, run_all
from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.state.capture import Captured, Position, capture
from holdfast.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = sorted(name for name in ELEMENT_BYTES if hasattr(torch, name))


def random_of(dtype: str, *shape: int) -> torch.Tensor:
    """Any bits at all, but for bools."""
    wanted = getattr(torch, dtype)
    if wanted == torch.bool:
        return torch.rand(shape) < 0.5
    data = torch.randint(0, 256, (*shape, wanted.itemsize), dtype=torch.uint8)
    return data.view(wanted).reshape(shape)


def copied(shm: Path, state: Any, guarded: frozenset[int] = frozenset()) -> tuple[Captured, Image]:
    found = capture(state, None, Position(1, 1, 0, 1))
    image = Image.create(shm / "image", found.layout.tail_at + len(found.tail))
    image.body[:] = b"\xaa" * len(image.body)
    copier = Copier(found, guarded)
    copier.prepare(image)
    for which in (False, True):
        run_all(copier.tasks(found, image, which), None, 1)
    return found, image


def check_copied(found: Captured, image: Image) -> None:
    for item, local in zip(found.layout.items, found.locals, strict=True):
        assert bytes(image.body[item.raw.at : item.raw.end]) == bits(local), item.name
        header = found.layout.headers[item.framed.at]
        assert bytes(image.body[item.framed.at : item.raw.at]) == header, item.name


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(shm: Path, dtype: str) -> None:
    state = {
        "s": {
            "small": random_of(dtype, 5, 3),
            "large": random_of(dtype, LARGE_BYTES + 1),
            "scalar": random_of(dtype),
            "empty": random_of(dtype, 0, 4),
        }
    }
    if dtype != "float4_e2m1fn_x2":  # Torch cannot copy that one by steps.
        state["s"]["turned"] = random_of(dtype, 6, 7).t()
    check_same(round_trip(shm, state), state)


def complex_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.complex64)


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3, 4).t()


SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "turned": lambda: torch.randn(30, 20).t(),
    "channels last": lambda: torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    "every third": lambda: torch.randn(100)[::3],
    "a column": lambda: torch.randn(10, 10)[:, 4],
    "expanded": lambda: torch.randn(1, 5).expand(4, 5),
    "a view into a larger one": lambda: torch.randn(1000)[100:200],
    "flipped": lambda: torch.randn(10).flip(0),
    "conjugated": lambda: complex_of(5).conj(),
    "negated": lambda: complex_of(5).conj().imag,
    "negated, one element": lambda: complex_of(1).conj().imag,
    "conjugated and turned": lambda: complex_of(3, 4).conj().t(),
    "scalar": lambda: torch.tensor(2.5),
    "one element": lambda: torch.randn(1, 1, 1),
    "empty": lambda: torch.empty(0),
    "empty in between": lambda: torch.empty(3, 0, 2),
    "a parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "with a gradient": lambda: torch.randn(3, requires_grad=True) * 2,
    "in inference mode": lambda: inferred(),
}


@pytest.mark.parametrize("what", SHAPES)
def test_every_shape_and_stride_comes_back(shm: Path, what: str) -> None:
    state = {"s": {"t": SHAPES[what](), "after": torch.randn(3)}}
    got = round_trip(shm, state)
    check_same(got, state)


@pytest.mark.parametrize("what", ["turned", "channels last"])
def test_dense_strides_are_kept(shm: Path, what: str) -> None:
    tensor = SHAPES[what]()
    assert round_trip(shm, {"t": tensor})["t"].stride() == tensor.stride()


def test_tied_tensors_come_back_tied(shm: Path) -> None:
    weight = torch.randn(4)
    got = round_trip(shm, {"a": {"x": weight, "y": weight.view(4)}, "b": [weight, weight[:2]]})
    assert got["a"]["x"] is got["a"]["y"] is got["b"][0]
    check_same(got["b"][1], weight[:2])


SIZES = st.lists(
    st.sampled_from([0, 1, 3, 16, 100, 5000, LARGE_BYTES // 4]), min_size=1, max_size=30
)


@given(sizes=SIZES, data=st.data())
def test_any_mix_of_tensors_is_copied(tmp_path_factory: Any, sizes: list[int], data: Any) -> None:
    """Small ones are gathered, in runs; headers, gaps and strided ones are between them."""
    strided = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    guarded = data.draw(st.frozensets(st.integers(0, len(sizes) - 1)))
    state = {
        f"t{n}": torch.randn(size, 2).t() if n in strided else torch.randn(size)
        for n, size in enumerate(sizes)
    }
    found, image = copied(tmp_path_factory.mktemp("copy"), {"s": state}, guarded)
    check_copied(found, image)
    image.close()


def test_more_tensors_than_one_call_takes(shm: Path) -> None:
    found, image = copied(shm, {"s": {f"t{n}": torch.randn(3) for n in range(3000)}})
    check_copied(found, image)


def test_only_what_is_guarded_waits(shm: Path) -> None:
    state = {"s": {f"t{n}": torch.full((n + 1,), 1.0) for n in range(40)}}
    state["s"] |= {"large": torch.ones(LARGE_BYTES), "turned": torch.ones(3, 4).t()}
    guarded = frozenset([0, 1, 7, 20, 21, 22, 39, 40])
    found = capture(state, None, Position(1, 1, 0, 1))
    image = Image.create(shm / "image", found.layout.tail_at)
    copier = Copier(found, guarded)
    copier.prepare(image)

    def is_there(index: int) -> bool:
        raw = found.layout.items[index].raw
        return bytes(image.body[raw.at : raw.end]) == bits(found.locals[index])

    run_all(copier.tasks(found, image, guarded=False), None, 1)
    assert [n for n in range(42) if not is_there(n)] == sorted(guarded)
    run_all(copier.tasks(found, image, guarded=True), None, 1)
    assert all(map(is_there, range(42)))


def test_tensors_that_moved_are_copied_from_where_they_are(shm: Path) -> None:
    rank = Rank(shm)
    for step in range(4):
        state = {"s": {f"t{n}": torch.randn(100) for n in range(20)}}
        path = rank.save(state, step)
        image = Image.open(path)
        check_copied(rank.capture(state, step), image)
        image.close()


def test_memory_that_is_not_there_is_an_error_and_no_crash(shm: Path) -> None:
    found = capture({"s": {f"t{n}": torch.randn(9) for n in range(5)}}, None, Position(1, 1, 0, 1))
    image = Image.create(shm / "image", found.layout.tail_at)
    copier = Copier(found)
    copier.prepare(image)
    found.addresses[3] = 64
    with pytest.raises(CheckpointError, match="small tensors cannot be copied: 108 of 180 bytes"):
        run_all(copier.tasks(found, image, guarded=False), None, 1)


def test_where_the_call_is_forbidden_small_tensors_are_copied_all_the_same(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*arguments: int) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(copying._libc, "process_vm_readv", forbidden)
    rank = Rank(shm)
    state = {"s": {f"t{n}": torch.randn(9) for n in range(5)}}
    image = Image.open(rank.save(state, 1))
    check_copied(rank.capture(state, 1), image)
    image.close()


def test_a_script_may_close_all_files_and_its_own_are_not_written_to(shm: Path) -> None:
    state = {"s": {f"t{n}": torch.randn(100) for n in range(20)}}
    before, rank = set(os.listdir("/proc/self/fd")), Rank(shm)
    for step in (1, 2):
        rank.save(state, step)
    for fd in set(os.listdir("/proc/self/fd")) - before:
        with suppress(OSError):
            os.close(int(fd))
    with ExitStack() as until:
        own = [until.enter_context((shm / f"own{n}").open("w+b")) for n in range(5)]
        for tensor in state["s"].values():
            tensor += 1
        for step in (3, 4):
            check_same(load(dict.fromkeys(state), rank.save(state, step), step=step), state)
        assert [os.fstat(file.fileno()).st_size for file in own] == [0] * 5


def test_the_first_error_of_many_tasks_is_told_after_all_are_done() -> None:
    done = []

    def fail() -> None:
        raise CheckpointError("no")

    with ThreadPoolExecutor(2) as threads, pytest.raises(CheckpointError, match="no"):
        run_all([fail, *[lambda: done.append(1)] * 20], threads, 3)
    assert len(done) == 20


def test_where_no_helper_is_left_the_work_is_done_all_the_same() -> None:
    """As when the interpreter is about to exit."""
    threads = ThreadPoolExecutor(1)
    threads.shutdown()
    done: list[int] = []
    run_all([lambda: done.append(1)] * 3, threads, 3)
    assert len(done) == 3


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert copying.cores() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert copying.cores() == 1


def test_what_training_was_told_to_take_is_not_copied_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    for told, spare in ((1, 7), (6, 2), (8, 1), (64, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda told=told: told)
        assert copying.spare_cores() == spare


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_so_many_threads_work_at_once_and_no_more(at_once: int) -> None:
    together = threading.Barrier(at_once, timeout=10)
    workers: list[int] = []

    def task() -> None:
        together.wait()
        workers.append(threading.get_ident())

    with ThreadPoolExecutor(8) as threads:
        run_all([task] * (20 * at_once), threads, at_once)
    assert len(set(workers)) == at_once
