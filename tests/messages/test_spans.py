"""Sets of positions behave as sets of numbers do, and cost as much as they have gaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.messages.data import Span
from holdfast.messages.spans import SpanSet

spans = st.builds(
    lambda line, start, size: Span(line, start, start + size),
    st.integers(0, 2),
    st.integers(0, 40),
    st.integers(0, 12),
)
Plain = set[tuple[int, int]]


def plain(span: Span) -> Plain:
    return {(span.line, at) for at in range(span.start, span.stop)}


def plain_of(found: SpanSet) -> Plain:
    return set().union(*map(plain, found))


@given(st.lists(st.tuples(st.booleans(), spans), max_size=30), spans)
def test_it_is_a_set_of_numbers(changes: list[tuple[bool, Span]], asked: Span) -> None:
    made, model = SpanSet(), Plain()
    for adds, span in changes:
        made.add(span) if adds else made.remove(span)
        model = model | plain(span) if adds else model - plain(span)
    assert plain_of(made) == model
    assert made.count() == len(model)
    assert bool(made) == bool(model)
    assert set().union(*map(plain, made.within(asked))) == model & plain(asked)
    assert set().union(*map(plain, made.without(asked))) == plain(asked) - model
    assert made.has(asked) == (plain(asked) <= model)
    assert made == SpanSet.of(made), "spans that touch are joined"
    assert SpanSet.unpack(made.pack()) == made


@given(st.lists(spans, max_size=12), st.lists(spans, max_size=12))
def test_a_union_depends_on_no_order(some: list[Span], others: list[Span]) -> None:
    left, right = SpanSet.of(some), SpanSet.of(others)
    left.update(SpanSet.of(others))
    right.update(SpanSet.of(some))
    assert left == right == SpanSet.of(some + others)
    assert left.pack() == right.pack()


def test_fifty_thousand_shards_are_small_whatever_is_missing() -> None:
    every_other = SpanSet.of(Span(0, at, at + 1000) for at in range(0, 50_000_000, 2000))
    assert len(every_other.pack()) < 100 << 10
    assert SpanSet.unpack(every_other.pack()) == every_other


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    try:
        found = SpanSet.unpack(data)
    except ValueError:
        return
    assert SpanSet.unpack(found.pack()) == found


def test_a_small_message_cannot_become_a_large_one() -> None:
    import zlib

    import msgspec

    bomb = zlib.compress(bytes(200 << 20), 9)
    with pytest.raises(ValueError, match="not a packed set"):
        SpanSet.unpack(msgspec.msgpack.encode({0: ("Q", bomb)}))
