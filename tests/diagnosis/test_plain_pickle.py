"""A pickle is read as plain data or refused; nothing in it is ever executed."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.diagnosis.plain_pickle import MAX_WEIGHT, load
from holdfast.errors import BadFrame

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=40,
)


@given(value=plain, protocol=st.integers(2, 5))
def test_plain_values_come_back_as_they_were(value: object, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol)) == value


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


EVIL: dict[str, Callable[[Path], object]] = {
    "reduce": lambda path: Evil(os.system, f"touch {path}"),
    "getattr": lambda path: Evil(getattr, os.PathLike, "__subclasses__"),
    "eval": lambda path: Evil(eval, f"open({str(path)!r}, 'w')"),
    "object": lambda path: Evil(object),
    "set": lambda path: {1, 2},
    "bytes": lambda path: b"abc",
    "inside": lambda path: {"entries": [{"state": Evil(os.system, f"touch {path}")}]},
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", EVIL)
def test_what_is_not_plain_is_refused_and_not_executed(
    kind: str, protocol: int, tmp_path: Path
) -> None:
    made = tmp_path / "executed"
    with pytest.raises(BadFrame):
        load(pickle.dumps(EVIL[kind](made), protocol))
    assert not made.exists()


HAND_MADE = {
    "global": b"cos\nsystem\n(S'true'\ntR.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "inst": b"(S'true'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'true'\no.",
    "newobj": b"\x80\x02cbuiltins\nobject\n)\x81.",
    "build": b"\x80\x02}}b.",
    "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "extension": b"\x80\x02\x82\x01.",
    "long text": b"\x80\x02L" + b"9" * 100_000 + b"L\n.",
    "long4": b"\x80\x02\x8b\xff\xff\xff\x7f",
    "huge text": b"\x80\x02X\xff\xff\xff\xff",
    "huge bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    "huge memo": b"\x80\x02Nr\xff\xff\xff\xffj\xfe\xff\xff\xff.",
    "out of band": b"\x80\x05\x97.",
    "unknown protocol": b"\x80\xff.",
    "itself in itself": b"\x80\x02]q\x00h\x00a.",
    "itself in a dict of its own": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    "changed when complete": b"\x80\x02]q\x00\x85h\x00Na.",
    "list as key": b"\x80\x02}]Ns.",
    "tuple as key": b"\x80\x02}N\x85Ns.",
    "no value": b"\x80\x02.",
    "no end": b"\x80\x02N",
    "no mark": b"\x80\x02Nt.",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", HAND_MADE)
def test_a_hand_made_pickle_is_refused_at_once(kind: str) -> None:
    began = time.monotonic()
    with pytest.raises(BadFrame):
        load(HAND_MADE[kind])
    assert time.monotonic() - began < 0.5


def test_a_large_memo_index_costs_nothing() -> None:
    assert load(b"\x80\x02Nr\xff\xff\xff\xff.") is None


@pytest.mark.parametrize("make", [b"]h%sah%sa", b"(h%sh%st"], ids=["lists", "tuples"])
def test_a_value_that_would_take_for_ever_to_walk_is_refused(make: bytes) -> None:
    # Each level holds the one before twice.
    body = b"\x80\x02]q\x00Na\x85q\x00"
    for level in range(60):
        body += make % (bytes([level]), bytes([level])) + b"\x85q" + bytes([level + 1])
    began = time.monotonic()
    with pytest.raises(BadFrame, match=str(MAX_WEIGHT)):
        load(body + b".")
    assert time.monotonic() - began < 0.5


def test_a_deeply_nested_value_does_not_crash_anybody() -> None:
    depth = 100_000
    value = load(b"\x80\x02N" + b"\x85" * depth + b".")
    assert isinstance(value, tuple)


@given(data=st.binary(max_size=300), head=st.sampled_from([b"", b"\x80\x02", b"\x80\x04\x95"]))
@example(data=b"(((((((", head=b"\x80\x02")
def test_any_bytes_are_read_or_refused(data: bytes, head: bytes) -> None:
    try:
        load(head + data)
    except BadFrame:
        pass


@given(value=plain, at=st.integers(0, 1000), byte=st.integers(0, 255), protocol=st.integers(2, 5))
def test_a_damaged_pickle_is_read_or_refused(
    value: object, at: int, byte: int, protocol: int
) -> None:
    damaged = bytearray(pickle.dumps(value, protocol))
    damaged[at % len(damaged)] = byte
    try:
        load(bytes(damaged))
    except BadFrame:
        pass
