"""A layout is computed once, and again when the state has changed its structure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from states import Rank as RankOf
from states import check_same, load, round_trip

from holdfast.checkpoint.state import capture as module
from holdfast.checkpoint.state.capture import Captured, Position, capture, flattened, unique_names
from holdfast.checkpoint.state.layout import ALIGNMENT, Contents
from holdfast.errors import CheckpointError

POSITION = Position(step=7, round=2, rank=0, world_size=1)


def captured(state: Any, before: Captured | None = None) -> Captured:
    return capture(state, before.layout if before else None, POSITION)


def contents(found: Captured) -> Contents:
    at = found.contents.at - found.layout.tail_at
    return msgspec.msgpack.decode(found.tail[at : at + found.contents.size], type=Contents)


def names(found: Captured) -> list[str]:
    return [item.name for item in found.layout.items]


def tensors(count: int = 3, size: int = 4) -> dict[str, torch.Tensor]:
    return {f"t{n}": torch.randn(size) for n in range(count)}


# ---- once ----


@pytest.fixture
def count_layouts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    calls: list[int] = []
    compute = module._lay_out

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return compute(*arguments)

    monkeypatch.setattr(module, "_lay_out", counted)
    return lambda: len(calls)


def test_it_is_used_again_as_long_as_only_values_change(count_layouts: Callable[[], int]) -> None:
    model = tensors()
    before = None
    for step in range(5):
        state = {"model": model, "step": step, "history": [0.5] * step, "best": None}
        for tensor in model.values():
            tensor += 1
        if step == 3:
            state["note"] = {"text": "new"}
        before = captured(state, before)
    assert count_layouts() == 1


def test_tensors_that_moved_in_memory_are_no_reason_for_another_one(
    count_layouts: Callable[[], int],
) -> None:
    before = captured({"rng": torch.get_rng_state(), "model": tensors()})
    after = captured({"rng": torch.get_rng_state(), "model": tensors()}, before)
    assert count_layouts() == 1
    assert after.addresses != before.addresses


def test_a_modules_state_dict_is_the_same_each_time(count_layouts: Callable[[], int]) -> None:
    module = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = captured({"m": module.state_dict(), "o": optimizer.state_dict()})
    optimizer.step()
    captured({"m": module.state_dict(), "o": optimizer.state_dict()}, before)
    assert count_layouts() == 1


A = torch.arange(6.0).reshape(2, 3)
CHANGES: dict[str, tuple[Any, Any]] = {
    "new": ({"a": A}, {"a": A, "b": A + 1}),
    "gone": ({"a": A, "b": A + 1}, {"b": A + 1}),
    "grown": ({"a": A}, {"a": torch.cat([A, A])}),
    "renamed": ({"a": A}, {"b": A}),
    "renamed in an OrderedDict": (OrderedDict(a=A), OrderedDict(b=A)),
    "turned": ({"a": A}, {"a": A.t().contiguous().t()}),
    "reshaped": ({"a": A}, {"a": A.reshape(3, 2)}),
    "of another type": ({"a": A}, {"a": A.to(torch.int32)}),
    "moved in the state": ({"a": A, "b": 1}, {"a": 1, "b": A}),
    "moved into a list": ({"a": [A], "b": A + 1}, {"a": A, "b": [A + 1]}),
    "swapped": ({"a": A, "b": A.t()}, {"b": A, "a": A.t()}),
    "conjugated": ({"a": A + 1j * A}, {"a": (A + 1j * A).conj()}),
    "in a deque": ({"a": deque([A])}, {"a": deque([A, A + 1])}),
    "gone altogether": ({"a": A}, {"a": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_structure_is_handled_and_no_error(shm: Path, change: str) -> None:
    rank = RankOf(shm)
    for step, one in enumerate(CHANGES[change] * 2):
        state = {"state": one}
        path = rank.save(state, step)
        check_same(load({"state": None}, path, step=step), state)


def test_tensors_that_are_tied_later_are_found_to_be(shm: Path) -> None:
    rank, weight = RankOf(shm), torch.randn(3)
    rank.save({"s": {"a": weight, "b": weight.clone()}})
    got = load({"s": None}, rank.save({"s": {"a": weight, "b": weight.view(3)}}))["s"]
    assert got["a"] is got["b"]


def test_tensors_that_are_tied_no_more_are_saved_apart(shm: Path) -> None:
    rank, weight = RankOf(shm), torch.randn(3)
    rank.save({"s": {"a": weight, "b": weight.view(3), "c": weight + 2}})
    # As many different ones as before, but others.
    state = {"s": {"a": weight, "b": weight + 1, "c": weight.view(3)}}
    check_same(load({"s": None}, rank.save(state)), state)


# ---- what is where ----


def test_every_tensor_has_its_place_aligned_and_apart() -> None:
    state = {"small": tensors(20), "large": tensors(3, 40_000), "empty": torch.empty(0, 3)}
    found = captured(state)
    end = 0
    for item in sorted(found.layout.items, key=lambda item: item.framed.at):
        assert item.framed.at >= end
        assert item.raw.at % ALIGNMENT == 0
        end = item.raw.end
    assert end <= found.layout.tail_at
    assert found.layout.own.end == found.layout.shared.at


def test_large_plain_tensors_are_believed_to_be_shared() -> None:
    found = captured({"large": torch.zeros(40_000), "rng": torch.get_rng_state()})
    assert [item.kind for item in found.layout.items] == ["shared", "own"]


def test_contents_say_what_was_captured() -> None:
    tied = torch.zeros(3)
    found = captured({"m": {"a": tied, "b": tied}, "list": [tied, {"x": 1}], "n": 5})
    told = contents(found)
    assert (told.step, told.round, told.rank, told.world_size) == (7, 2, 0, 1)
    assert told.items == found.layout.items
    assert (told.items[0].name, told.items[0].also) == ("m.a", ("m.b", "list.0"))
    assert [value.name for value in told.values] == ["list.1.x", "n"]
    assert dict(told.paths) == {"list.0": ("list", 0), "list.1.x": ("list", 1, "x")}
    assert told.tail.end == found.layout.tail_at + len(found.tail)
    assert found.contents.end <= told.tail.end


def test_a_path_with_dots_or_numbers_in_its_keys_can_be_had_from_the_name() -> None:
    state = {
        "model": {"layer.0.weight": A},
        "optim": {"state": {0: {"step": A + 1}}},
        "o": {1.5: 2},
    }
    assert dict(contents(captured(state)).paths) == {
        "model.layer.0.weight": ("model", "layer.0.weight"),
        "o.1.5": ("o", "1.5"),
    }


def test_two_with_the_same_dotted_name_get_two_names_whatever_their_order() -> None:
    paths = [("a.b",), ("a", "b"), ("c",)]
    there = dict(zip(paths, unique_names(paths), strict=True))
    back = dict(zip(paths[::-1], unique_names(paths[::-1]), strict=True))
    assert there == back
    assert len(set(there.values())) == 3


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": A, "a": {"b": A + 1}},
        {"a": {"b": A + 1}, "a.b": A},
        {"a.b": A, "a": {"b": 1}},
        {"a.b": 1, "a": {"b": A}},
        {"a": {1: A, "1": A + 1}},
        {"a": {1: A, "1": 2}},
    ],
)
def test_states_with_equal_dotted_names_come_back(shm: Path, state: dict[str, Any]) -> None:
    check_same(round_trip(shm, state), state)
    found = contents(captured(state))
    every = [item.name for item in found.items] + [value.name for value in found.values]
    assert len(set(every)) == 2


def test_keys_may_be_anything_that_can_be_saved(shm: Path) -> None:
    state = {"s": {1.5: A, (1, "x"): A + 1, None: 2, True: {"y": A + 2}, b"k": [A + 3]}}
    check_same(round_trip(shm, state), state)


def test_tensors_may_be_anywhere(shm: Path) -> None:
    tensor = torch.ones(2)
    state = {"s": [deque([tensor], maxlen=3), (tensor + 1, [tensor + 2]), {"x": ((tensor + 3,),)}]}
    check_same(round_trip(shm, state), state)
    (got,) = round_trip(shm, {"s": {tensor}})["s"]
    check_same(got, tensor)


def test_flattening_finds_every_tensor_that_is_captured() -> None:
    state = {"s": [deque([A]), (A + 1, 1), {frozenset({2}): {3}}], "e": [], "d": [{}]}
    found = [path for path, value in flattened(state) if torch.is_tensor(value)]
    assert found == [("s", 0, 0), ("s", 1, 0)]
    assert names(captured(state)) == ["s.0.0", "s.1.0"]


# ---- what cannot be captured ----


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


class Wrapped(torch.Tensor):  # type: ignore[misc]
    """As quantization libraries have them: there is nothing at its address."""

    def __tensor_flatten__(self) -> Any:
        raise NotImplementedError


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "lazy": torch.nn.parameter.UninitializedParameter,
    "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    "meta": lambda: torch.empty(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "wrapped": lambda: torch.ones(2).as_subclass(Wrapped),
    "freed": freed,
    "of a strange type": lambda: torch.ones(2, dtype=torch.uint8).view(torch.bits8),
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_that_is_no_plain_memory_is_an_error_that_names_it(what: str) -> None:
    with pytest.raises(CheckpointError, match=r"^model\.odd: "):
        captured({"model": {"fine": A, "odd": ODD[what]()}})


def test_memory_that_was_freed_later_is_noticed_too() -> None:
    tensor = torch.ones(4)
    before = captured({"a": tensor})
    tensor.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match=r"^a: the tensor's memory was freed"):
        captured({"a": tensor}, before)


def test_an_object_that_cannot_be_written_for_others_is_named() -> None:
    class Local:
        """Nobody can import that."""

    with pytest.raises(CheckpointError, match=r"^a\.b: "):
        capture({"a": {"b": Local()}}, None, POSITION, pickling=True)
