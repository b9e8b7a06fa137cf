"""What is restored is what was saved, where it belongs, and nobody else's memory."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import Rank, bits, check_same, flip, load, round_trip

from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.restore import load as restore
from holdfast.checkpoint.restore.stored import StoredState
from holdfast.checkpoint.restore.verified_read import PIECE_BYTES
from holdfast.checkpoint.state.layout import ByteSpan, Contents, Extent, TensorItem
from holdfast.errors import CheckpointError, Unusable

LARGE = PIECE_BYTES // 4 + 100


def model(seed: int = 0, size: int = 8) -> torch.nn.Module:
    torch.manual_seed(seed)
    norm = torch.nn.BatchNorm1d(size)
    torch.nn.init.normal_(norm.running_mean)
    return torch.nn.Sequential(torch.nn.Linear(3, size), norm, torch.nn.Linear(size, LARGE))


def trained(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        module(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- into what is there ----


def test_a_module_is_restored_in_place(shm: Path) -> None:
    saved, other = model(1), model(2)
    parameters = {id(p): p.data_ptr() for p in other.parameters()}
    load({"m": other}, Rank(shm).save({"m": saved.state_dict()}))
    check_same(other.state_dict(), saved.state_dict())
    assert {id(p): p.data_ptr() for p in other.parameters()} == parameters
    assert all(p.requires_grad for p in other.parameters())


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fresh", [True, False])
def test_an_optimizer_goes_on_as_if_nothing_had_happened(shm: Path, name: str, fresh: bool) -> None:
    make = OPTIMIZERS[name]
    saved, other = model(1), model(2)
    optimizer, restored = make(saved.parameters()), make(other.parameters())
    trained(saved, optimizer)
    if not fresh:
        trained(other, restored)
    state = {"m": saved.state_dict(), "o": optimizer.state_dict()}
    load({"m": other, "o": restored}, Rank(shm).save(state))
    check_same(restored.state_dict(), state["o"])
    for module, its in ((saved, optimizer), (other, restored)):
        torch.manual_seed(5)
        trained(module, its)
    check_same(other.state_dict(), saved.state_dict())


def test_an_optimizers_state_is_filled_where_it_is(shm: Path) -> None:
    saved, other = model(1), model(2)
    optimizer = torch.optim.AdamW(saved.parameters())
    restored = torch.optim.AdamW(other.parameters())
    trained(saved, optimizer)
    trained(other, restored)
    where = {id(p): restored.state[p]["exp_avg"].data_ptr() for p in other.parameters()}
    load({"o": restored}, Rank(shm).save({"o": optimizer.state_dict()}))
    assert where == {id(p): restored.state[p]["exp_avg"].data_ptr() for p in other.parameters()}


def test_plain_values_are_replaced_and_tensors_filled(shm: Path) -> None:
    ema = torch.zeros(LARGE)
    state: dict[str, Any] = {"ema": ema, "epoch": 1, "nested": {"a": torch.zeros(2), "b": [1]}}
    want = {"ema": torch.randn(LARGE), "epoch": 7, "nested": {"a": torch.ones(2), "b": [1, (2,)]}}
    load(state, Rank(shm).save(copy.deepcopy(want)))
    check_same(state, want)
    assert state["ema"] is ema


def test_every_random_generator_goes_on(shm: Path) -> None:
    class Generators:
        def state_dict(self) -> dict[str, Any]:
            return {
                "torch": torch.get_rng_state(),
                "numpy": numpy.random.get_state(),
                "python": random.getstate(),
            }

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.set_rng_state(state["torch"])
            numpy.random.set_state(state["numpy"])
            random.setstate(state["python"])

    def draws() -> list[Any]:
        return [torch.rand(3).tolist(), numpy.random.rand(3).tolist(), random.random()]

    path = Rank(shm).save({"rng": Generators().state_dict()})
    want = draws()
    draws()
    load({"rng": Generators()}, path)
    assert draws() == want


@pytest.mark.parametrize("size", [3, LARGE])
def test_nothing_restored_shares_memory_with_the_image(shm: Path, size: int) -> None:
    state = {"a": torch.randn(size), "b": torch.randn(3, size).t(), "c": numpy.ones(size)}
    path = Rank(shm).save(state)
    live: dict[str, Any] = {"a": torch.zeros(size), "b": None, "c": None}
    load(live, path)
    image = Image.open(path)
    image.body[:] = b"\xff" * len(image.body)
    check_same(live, state)
    live["a"] += 1
    assert bytes(image.body) == b"\xff" * len(image.body)


def test_other_dtypes_strides_and_views_are_filled_too(shm: Path) -> None:
    want = torch.arange(12.0).reshape(3, 4)
    path = Rank(shm).save({"s": {name: want.clone() for name in "abcde"}})
    base = torch.zeros(5, 8)
    live = {
        "a": torch.zeros(4, 3).t(),
        "b": torch.zeros(3, 4, dtype=torch.float64),
        "c": base[1:4, ::2],
        "d": torch.zeros(3, 4, dtype=torch.complex64).conj(),
        "e": torch.zeros(3, 4),
    }
    got = load({"s": live}, path)["s"]
    for name, tensor in live.items():
        assert got[name] is tensor
        assert torch.equal(tensor.real.to(torch.float32), want), name
    assert base.count_nonzero() == 11
    assert base[1:4, 1::2].count_nonzero() == 0


@pytest.mark.parametrize(
    "live",
    [
        torch.zeros(1, 4).expand(3, 4),
        torch.zeros(12).as_strided((3, 4), (1, 2)),
        torch.zeros(2, 4),
        torch.zeros(0),
        torch.zeros(3, 4, dtype=torch.int64),
        torch.zeros(3, 4, dtype=torch.bfloat16),
        torch.zeros(3, 4, dtype=torch.float8_e5m2),
    ],
)
def test_what_cannot_hold_a_plain_tensor_gets_a_successor(shm: Path, live: torch.Tensor) -> None:
    want = torch.randn(3, 4)
    path = Rank(shm).save({"plain": want, "in": {"dict": want.clone()}, "object": {"t": want}})
    keeper = Keeps(live)
    state: dict[str, Any] = {"plain": live, "in": {"dict": live}, "object": keeper}
    load(state, path)
    check_same([state["plain"], state["in"]["dict"], keeper.tensor], [want] * 3)
    assert not live.any()


class Keeps:
    """An object of the user's own, with a tensor that may grow."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["t"]


def test_a_lazy_module_is_restored_before_its_time(shm: Path) -> None:
    saved = torch.nn.Linear(3, 4)
    module = torch.nn.LazyLinear(4)
    load({"m": module}, Rank(shm).save({"m": saved.state_dict()}))
    check_same(module.state_dict(), saved.state_dict())


# ---- ties ----


def test_what_was_tied_fills_all_that_is_not_tied_here(shm: Path) -> None:
    weight = torch.randn(5)
    path = Rank(shm).save({"m": {"a": weight, "b": weight, "c": weight}})
    module = torch.nn.ParameterDict({name: torch.zeros(5) for name in "abc"})
    load({"m": module}, path)
    assert all(bits(module[name]) == bits(weight) for name in "abc")


@pytest.mark.parametrize("size", [5, LARGE])
def test_what_was_tied_fills_it_whatever_it_looks_like_here(shm: Path, size: int) -> None:
    weight = torch.randn(2, size)
    path = Rank(shm).save({"m": {"a": weight, "b": weight, "c": weight}})
    live = {"a": torch.zeros(2, size), "b": torch.zeros(size, 2).t(), "c": torch.zeros(2, size)}
    tensors = list(live.values())
    load({"m": live}, path)
    assert all(bits(tensor) == bits(weight) for tensor in tensors)


def test_a_tied_module_stays_tied(shm: Path) -> None:
    def made(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
        module[1].weight = module[0].weight
        return module

    saved, other = made(1), made(2)
    load({"m": other}, Rank(shm).save({"m": saved.state_dict()}))
    assert other[0].weight is other[1].weight
    check_same(other.state_dict(), saved.state_dict())


# ---- what does not fit ----


def test_another_shape_is_an_error_that_names_it_and_changes_nothing(shm: Path) -> None:
    path = Rank(shm).save({"a": torch.ones(2), "m": model(1).state_dict()})
    state = {"a": torch.zeros(2), "m": model(2, size=9)}
    before = copy.deepcopy(state["m"].state_dict())
    with pytest.raises(
        CheckpointError, match=r"m\.0\.weight: saved with shape \[8, 3\], but is \[9, 3\] here"
    ):
        load(state, path)
    check_same(state["m"].state_dict(), before)
    assert not state["a"].any()


def test_another_module_is_an_error_that_names_what_differs(shm: Path) -> None:
    path = Rank(shm).save({"m": torch.nn.Linear(2, 2).state_dict()})
    module = torch.nn.Linear(2, 2, bias=False)
    module.register_buffer("scale", torch.ones(1))
    before = module.weight.clone()
    with pytest.raises(CheckpointError, match=r"'m' is another module.*'scale'.*'bias'"):
        load({"m": module}, path)
    assert torch.equal(module.weight, before)


def test_an_entry_that_was_not_saved_is_an_error_that_says_what_was(shm: Path) -> None:
    path = Rank(shm).save({"model": 1, "optim": 2})
    with pytest.raises(CheckpointError, match=r"has no 'ema'; it has 'model', 'optim'"):
        load({"model": None, "ema": None}, path)


def test_what_was_saved_and_is_not_wanted_is_left_alone(shm: Path) -> None:
    path = Rank(shm).save({"model": torch.ones(2), "optim": torch.ones(LARGE)})
    assert load({"model": None}, path).keys() == {"model"}


def test_whatever_load_state_dict_raises_is_told_with_the_entrys_name(shm: Path) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("nothing I know")

    with pytest.raises(CheckpointError, match=r"'b': its load_state_dict\(\) failed: KeyError"):
        load({"b": Broken()}, Rank(shm).save({"b": {"a": 1}}))


def test_a_module_may_load_what_it_likes(shm: Path) -> None:
    class Patient(torch.nn.Linear):  # type: ignore[misc]
        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state, strict=False)

    path = Rank(shm).save({"m": {"weight": torch.ones(2, 2), "more": torch.ones(1)}})
    module = Patient(2, 2)
    load({"m": module}, path)
    assert (module.weight == 1).all()


def test_hooks_and_extra_state_of_a_module_are_honoured(shm: Path) -> None:
    class Counting(torch.nn.Linear):  # type: ignore[misc]
        seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    called = []
    saved, other = Counting(2, 2), Counting(2, 2)
    saved.seen = 3
    other.register_load_state_dict_post_hook(lambda module, keys: called.append(module))
    load({"m": other}, Rank(shm).save({"m": saved.state_dict()}))
    assert (other.seen, called) == (3, [other])
    check_same(other.state_dict(), saved.state_dict())


def test_a_module_whose_state_dict_is_a_copy_is_restored_all_the_same(shm: Path) -> None:
    """It must be loaded by the module: what was filled in place is not its memory."""

    def halved(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        for name in state:
            state[name] = state[name].clone()

    saved, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.register_state_dict_post_hook(halved)
    load({"m": other}, Rank(shm).save({"m": saved.state_dict()}))
    assert torch.equal(other.weight, saved.weight)


def test_pickled_objects_need_to_be_allowed(shm: Path) -> None:
    state = {"a": slice(1, 2)}
    assert round_trip(shm, state, pickling=True) == state
    with pytest.raises(CheckpointError, match="pickling=True"):
        load({"a": None}, *shm.glob("*0.image"), *shm.glob("*1.image"))


# ---- damage ----


def test_a_damaged_image_is_refused_whatever_was_wanted_of_it(shm: Path) -> None:
    path = Rank(shm).save({"a": torch.ones(3), "b": torch.ones(LARGE)})
    image = Image.open(path)
    flip(path, image.body_at + 700)
    with pytest.raises(Unusable, match="block 0 of 1"):
        load({"a": None}, path)


def test_a_dtype_of_a_newer_torch_is_an_error() -> None:
    item = TensorItem("x", "own", "float3_new", (1,), (0,), (1,), ByteSpan(0, 0), ByteSpan(0, 0))
    with pytest.raises(CheckpointError, match="no dtype float3_new"):
        restore._make(item, torch.device("cpu"))


# ---- worlds of another size ----


class Memory:
    """A source that is bytes in memory, and never damaged."""

    def __init__(self, data: bytes) -> None:
        from holdfast.checkpoint.state.layout import block_digests

        self.name, self.size, self.data = "memory", len(data), data
        self.digests = block_digests(memoryview(data))

    def read_into(self, at: int, views: Any) -> None:
        for view in views:
            view[:] = self.data[at : at + len(view)]
            at += len(view)


def sharded(whole: torch.Tensor, cuts: list[tuple[slice, ...]]) -> list[StoredState]:
    """One rank for each cut, whose state is that part of one tensor."""
    import msgspec

    from holdfast.checkpoint.state.skeleton import dismantle

    skeleton = dismantle({"t": whole}).skeleton
    found = []
    for rank, cut in enumerate(cuts):
        part = whole[cut]
        offsets = tuple(one.start for one in cut)
        raw, text = ByteSpan(0, part.nbytes), ByteSpan(part.nbytes, len(skeleton))
        where = tuple(whole.shape), offsets, tuple(part.shape)
        item = TensorItem("t", "shard", "float32", *where, raw, raw)
        nothing = ByteSpan(0, 0)
        told = Contents(1, 1, rank, len(cuts), raw, nothing, text, text, (item,), ())
        data = bits(part) + skeleton
        assert msgspec.msgpack.encode(told)
        found.append(StoredState(Memory(data), told, (Extent(0, 0, len(data)),)))
    return found


def cut_up(data: st.DataObject, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """A grid of parts, uneven and some of them empty."""
    cuts: list[tuple[slice, ...]] = [()]
    for size in shape:
        points = sorted(data.draw(st.lists(st.integers(0, size), max_size=2)))
        edges = [0, *points, size]
        parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
        cuts = [(*cut, part) for cut in cuts for part in parts]
    return cuts


@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=3).map(tuple))
def test_a_tensor_is_put_together_from_any_parts(data: Any, shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape)
    stored = sharded(whole, cut_up(data, shape))
    rank = data.draw(st.integers(0, 9))
    into = data.draw(st.sampled_from(["nothing", "plain", "strided"]))
    live = {
        "nothing": None,
        "plain": torch.zeros(shape),
        "strided": torch.zeros((*shape, 2))[..., 0],
    }[into]
    state = {"t": live}
    restore.load(state, stored, rank)
    check_same(state["t"], whole)


def test_a_part_that_nobody_has_is_refused() -> None:
    stored = sharded(torch.randn(6), [(slice(0, 2),), (slice(4, 6),)])
    with pytest.raises(CheckpointError, match="2 of 6 elements are not stored"):
        restore.load({"t": torch.zeros(6)}, stored, 0)


def test_a_duplicate_part_is_read_once() -> None:
    whole = torch.randn(6)
    stored = sharded(whole, [(slice(0, 3),), (slice(3, 6),), (slice(0, 3),), (slice(3, 6),)])
    state = {"t": torch.zeros(6)}
    restore.load(state, stored, 3)
    check_same(state["t"], whole)


def test_values_come_from_the_rank_of_that_number_modulo_the_old_size(shm: Path) -> None:
    paths = [Rank(shm, rank, 2).save({"seed": 100 + rank}) for rank in (0, 1)]
    found = [load({"seed": None}, *paths, rank=rank)["seed"] for rank in range(5)]
    assert found == [100, 101, 100, 101, 100]
