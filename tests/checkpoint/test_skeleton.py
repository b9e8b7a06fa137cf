"""A state without its tensors comes back as it was, or is refused by name."""

from __future__ import annotations

import pathlib
import random
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import SPECIAL_FLOATS, check_same

from holdfast.checkpoint.state.capture import flattened
from holdfast.checkpoint.state.skeleton import assemble, dismantle
from holdfast.errors import CheckpointError


def there_and_back(state: Any, pickling: bool = False) -> Any:
    parts = dismantle(state, pickling)
    return assemble(parts.skeleton, parts.tensors.__getitem__, pickling)


# ---- whatever it is ----

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, (1 << 64) - 1, 1 << 64])
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
HASHABLE = st.recursive(
    SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
TENSORS = st.builds(lambda n: torch.full((n,), float(n)), st.integers(0, 4))
LEAVES = (
    SCALARS
    | TENSORS
    | st.binary(max_size=4).map(bytearray)
    | st.sampled_from([torch.float8_e4m3fn, torch.int64, torch.device("cpu"), torch.Size([2, 3])])
    | st.sampled_from([Path("/a/b"), pathlib.PurePosixPath("c"), pathlib.PureWindowsPath("d:\\e")])
    | st.lists(st.floats(width=32), max_size=3).map(lambda v: numpy.array(v, "f4"))
    | st.sampled_from([numpy.float16(1.5), numpy.int64(-3), numpy.bool_(True), numpy.str_("x")])
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict)
        | st.dictionaries(HASHABLE, st.integers(), max_size=3).map(Counter)
        | st.dictionaries(st.text(max_size=4), TENSORS, max_size=4)
    ),
    max_leaves=12,
)


def has_nan(key: Any) -> bool:
    inner = key if isinstance(key, tuple | frozenset) else ()
    return key != key or any(map(has_nan, inner))


def keys_of(state: Any) -> list[Any]:
    inner = list(state.values()) if isinstance(state, dict) else []
    if isinstance(state, list | tuple | deque | set | frozenset):
        inner = list(state)
    own = list(state) if isinstance(state, dict | set) else []
    return own + [key for one in inner for key in keys_of(one)]


@given(STATES)
def test_any_state_comes_back_as_it_was(state: Any) -> None:
    if not any(
        map(has_nan, keys_of(state))
    ):  # A key that is not equal to itself is not found again.
        check_same(there_and_back(state), state)


@given(STATES)
def test_values_are_those_that_dcp_would_find(state: Any) -> None:
    values = [(path, value) for path, value in flattened(state) if not torch.is_tensor(value)]
    parts = dismantle(state)
    assert [path for path, _ in parts.values] == [path for path, _ in values]
    assert all(one is other for (_, one), (_, other) in zip(parts.values, values, strict=True))


@given(STATES)
def test_paths_are_those_that_dcp_would_find(state: Any) -> None:
    found = [(path, value) for path, value in flattened(state) if torch.is_tensor(value)]
    parts = dismantle(state)
    by_walk = [
        (path, parts.tensors[number])
        for number, paths in enumerate(parts.paths())
        for path in paths
    ]
    key = repr
    assert sorted(map(key, [p for p, _ in by_walk])) == sorted(map(key, [p for p, _ in found]))


@pytest.mark.parametrize("value", SPECIAL_FLOATS)
def test_a_float_is_kept_to_its_last_bit(value: float) -> None:
    check_same(there_and_back([value, complex(value, value)]), [value, complex(value, value)])


def test_even_the_payload_of_a_nan_is_kept() -> None:
    nan = struct.unpack("<d", b"\x07\0\0\0\0\0\xf8\xff")[0]
    assert struct.pack("<d", there_and_back(nan)) == struct.pack("<d", nan)


def test_an_int_has_no_limit() -> None:
    huge = 3**40_000  # Has more digits than Python likes to print.
    assert there_and_back([huge, -huge]) == [huge, -huge]


# ---- what scripts keep ----


def test_the_state_of_every_random_generator_comes_back() -> None:
    generators = {
        "python": random.Random(3).getstate(),
        "numpy": numpy.random.RandomState(3).get_state(),
        "numpy's new one": numpy.random.default_rng(3).bit_generator.state,
        "torch": torch.Generator().manual_seed(3).get_state(),
    }
    check_same(there_and_back(generators), generators)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2))


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o, s: s.StepLR(o, 3),
    "MultiStepLR": lambda o, s: s.MultiStepLR(o, [2, 5]),
    "CosineAnnealingLR": lambda o, s: s.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o, s: s.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o, s: s.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o, s: s.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "ReduceLROnPlateau": lambda o, s: s.ReduceLROnPlateau(o, patience=1),
    "LambdaLR": lambda o, s: s.LambdaLR(o, lambda step: 0.9**step),
    "SequentialLR": lambda o, s: s.SequentialLR(
        o, [s.ConstantLR(o, 0.1), s.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o, s: s.ChainedScheduler([s.ConstantLR(o), s.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_scheduler_goes_on_as_if_nothing_had_happened(name: str) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([parameter()], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer, torch.optim.lr_scheduler)

    def go(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for loss in range(steps):
            optimizer.step()
            scheduler.step(*[float(loss)] if name == "ReduceLROnPlateau" else [])
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = made()
    go(optimizer, scheduler, 4)
    state = {"optim": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    got = there_and_back(state)
    check_same(got, state)
    other_optimizer, other = made()
    other_optimizer.load_state_dict(got["optim"])
    other.load_state_dict(got["scheduler"])
    assert go(other_optimizer, other, 6) == go(optimizer, scheduler, 6)


def test_the_versions_beside_a_modules_state_are_kept() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    state = module.state_dict()
    got = there_and_back(state)
    check_same(got, state)
    assert got._metadata["0"] == {"version": 2}


ARRAYS = [
    numpy.zeros((0, 3), "f8"),
    numpy.array(2.5),
    numpy.arange(6).reshape(2, 3),
    numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
    numpy.arange(10)[::3],
    numpy.array([1 + 2j], "c8"),
    numpy.array(["a", "bcd"]),
    numpy.array([b"a", b""]),
    numpy.array(["2024-01-01"], "M8[D]"),
    numpy.array([(1, 2.5)], [("a", "i4"), ("b", ">f8")]),
    numpy.array([True, False]),
    numpy.array([1], ">u2"),
    numpy.float32(1.5),
    numpy.str_(""),
    numpy.bytes_(b"xy"),
    numpy.datetime64("2024-01-01"),
    numpy.longdouble(1) / 3,
    numpy.array([(1, 2.5)], [("a", "i4"), ("b", "f8")])[0],
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda v: f"{type(v).__name__}-{v.dtype}")
def test_numpy_values_come_back_as_they_were(value: Any) -> None:
    check_same(there_and_back({"a": value}), {"a": value})


def test_an_array_that_came_back_can_be_written_to() -> None:
    there_and_back(numpy.zeros(3))[:] = 1


def test_a_restored_state_is_another_object_than_the_saved_one() -> None:
    state = {"list": [1], "dict": {}, "bytes": bytearray(b"x"), "array": numpy.zeros(1)}
    got = there_and_back(state)
    assert all(got[name] is not state[name] for name in state)


# ---- tensors ----


def test_a_tensor_that_occurs_twice_is_taken_out_once() -> None:
    tensor, other = torch.zeros(1), torch.ones(1)
    state = {"a": tensor, "b": [other, tensor], "c": {"d": tensor, "e": other}}
    parts = dismantle(state)
    assert [id(t) for t in parts.tensors] == [id(tensor), id(other)]
    got = there_and_back(state)
    assert got["a"] is got["b"][1] is got["c"]["d"] is tensor


def test_a_dict_of_tensors_costs_one_reference() -> None:
    tensors = {f"layer.{n}": torch.zeros(1) for n in range(1000)}
    parts = dismantle({"model": tensors})
    assert parts.structure == [(("model",), tuple(tensors), 0)]
    assert len(parts.skeleton) < 15 * len(tensors)
    assert len(parts.tensors) == 1000


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": "T"}, {"a": "T", "b": 1}),
        ({"a": ["T"], "b": "T"}, {"a": "T", "b": ["T"]}),
        ({"a": {"b": "T"}}, {"b": {"a": "T"}}),
        (OrderedDict(a="T"), OrderedDict(b="T")),
        ({"a": ("T", 1)}, {"a": (1, "T")}),
        ({1.5: "T"}, {2.5: "T"}),
        ({1: "T"}, {"1": "T"}),
        ({"a": {1: "T", 2.5: 1}}, {"a": {1: 1, 2.5: "T"}}),
    ],
)
def test_tensors_in_other_places_are_another_structure(one: Any, other: Any) -> None:
    tensors = [torch.zeros(1), torch.ones(1)]

    def filled(state: Any, left: list[torch.Tensor]) -> Any:
        if isinstance(state, dict):
            return type(state)((key, filled(value, left)) for key, value in state.items())
        if isinstance(state, list | tuple):
            return type(state)(filled(value, left) for value in state)
        return left.pop(0) if state == "T" else state

    structures = [dismantle(filled(state, tensors[:])).structure for state in (one, other)]
    assert structures[0] != structures[1]


def test_plain_values_do_not_change_the_structure() -> None:
    tensor = torch.zeros(1)
    before = dismantle({"a": tensor, "history": [1], "best": None})
    after = dismantle({"a": tensor, "history": [1, 2], "best": 0.5})
    assert before.structure == after.structure


# ---- what cannot be saved ----


class Thing:
    def __init__(self, n: int = 1) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and other.n == self.n

    def __hash__(self) -> int:
        return self.n


@dataclass(frozen=True)
class Settings:
    n: int = 1
    tensor: Any = None


class Colour(IntEnum):
    RED = 1


Point = namedtuple("Point", "x")
UNKNOWN = [
    Thing(),
    lambda: 1,
    defaultdict(int),
    UserDict(),
    numpy.array([object()]),
    torch.Generator(),
    iter([]),
    type("Text", (str,), {})("x"),
    numpy.zeros(2).view(type("Array", (numpy.ndarray,), {})),
]


NAMED = [Colour.RED, Point(3), Settings(2), [Settings(3), {"x": (Point("y"), Colour.RED)}]]


@pytest.mark.parametrize("value", NAMED, ids=repr)
def test_enums_named_tuples_and_dataclasses_come_back_as_what_they_are(value: Any) -> None:
    got = there_and_back({"value": value})["value"]
    assert got == value
    assert type(got) is type(value)


def test_a_tensor_in_a_dataclass_is_a_tensor() -> None:
    tensor = torch.ones(3)
    assert dismantle({"s": Settings(1, tensor)}).tensors == [tensor]


def test_a_class_that_is_not_here_is_an_error_and_nothing_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skeleton = dismantle({"c": Colour.RED}).skeleton
    monkeypatch.delattr(sys.modules[Colour.__module__], "Colour")
    with pytest.raises(CheckpointError, match="Colour was saved, which is not here"):
        assemble(skeleton, lambda number: None)


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda v: type(v).__name__)
def test_an_unknown_object_is_an_error_that_names_its_key(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^data\.list\.1\.x: .*pickling=True"):
        dismantle({"data": {"list": [0, {"x": value}]}})


def test_the_error_names_the_objects_class() -> None:
    with pytest.raises(CheckpointError, match=r"test_skeleton\.Thing"):
        dismantle({"a": Thing()})
    with pytest.raises(CheckpointError, match="the state itself"):
        dismantle(Thing())


def test_pickling_must_be_allowed_on_both_sides() -> None:
    state = {"a": Thing(3), "b": [Colour.RED]}
    assert there_and_back(state, pickling=True) == state
    with pytest.raises(CheckpointError, match="pickling=True"):
        assemble(dismantle(state, pickling=True).skeleton, lambda number: None)


def test_what_cannot_be_unpickled_is_an_error_that_says_why() -> None:
    class Gone:
        def __reduce__(self) -> tuple[Any, ...]:
            return int, ("no number",)

    with pytest.raises(CheckpointError, match=r"cannot be unpickled here: ValueError.*no number"):
        there_and_back({"a": Gone()}, pickling=True)


def test_what_cannot_be_pickled_either_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"^a: cannot be pickled either"):
        dismantle({"a": lambda: 1}, pickling=True)


def test_a_state_that_contains_itself_is_an_error() -> None:
    state: dict[str, Any] = {"a": {}}
    state["a"]["b"] = state
    with pytest.raises(CheckpointError, match=r"a\.b\.a.*contains itself"):
        dismantle(state)


def test_a_text_that_is_none_is_an_error_that_names_its_key() -> None:
    with pytest.raises(CheckpointError, match=r"^a\.0: .*surrogates"):
        dismantle({"a": ["\ud800"]})
    with pytest.raises(CheckpointError, match=r"surrogates") as raised:
        dismantle({"a": {"\ud800": 1}})
    assert str(raised.value).encode(), "it can be printed"


def test_a_tensor_cannot_be_a_key() -> None:
    with pytest.raises(CheckpointError, match=r"^a: a tensor cannot be the key"):
        dismantle({"a": {torch.zeros(1): 1}})


def test_what_a_newer_one_wrote_is_refused() -> None:
    import msgspec

    with pytest.raises(CheckpointError, match="newer"):
        assemble(msgspec.msgpack.encode(msgspec.msgpack.Ext(99, b"")), lambda number: None)


def test_it_needs_neither_torch_nor_numpy() -> None:
    script = """
import sys
from holdfast.checkpoint.state.skeleton import assemble, dismantle
state = {"a": [1, (2.5, {3})], 1.5: b"x"}
assert assemble(dismantle(state).skeleton, None) == state
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
