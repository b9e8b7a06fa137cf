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
        SpanSet.unpack(msgspec.msgpack.encode((0, {0: ("Q", bomb)})))


def test_whole_lines_collapse_into_a_number() -> None:
    used = SpanSet.of(Span(line, 0, 10) for line in range(1000))
    used.add(Span(1000, 0, 5))
    used.add(Span(1002, 0, 10))
    full = len(used.pack())
    used.collapse(10)
    assert used.below == 1000
    assert sorted(used.lines) == [1000, 1002]
    assert used.has(Span(7, 0, 10))
    assert not used.without(Span(7, 2, 3))
    used.add(Span(7, 0, 10))
    used.remove(Span(7, 0, 10))
    assert sorted(used.lines) == [1000, 1002]
    assert len(used.pack()) < full / 100
    assert SpanSet.unpack(used.pack()) == used


def test_a_union_keeps_the_lines_that_are_whole_in_either_set() -> None:
    some, other = SpanSet.of([Span(1, 0, 5), Span(4, 0, 5)]), SpanSet(below=3)
    other.add(Span(4, 5, 7))
    for one in (some.copy(), other.copy()):
        one.update(some)
        one.update(other)
        assert one == SpanSet({4: [0, 7]}, 3)


@pytest.mark.parametrize("width", ["d", "ab", "b", ""])
def test_other_widths_are_refused(width: str) -> None:
    import zlib

    import msgspec

    packed = msgspec.msgpack.encode((0, {0: (width, zlib.compress(bytes(range(1, 17))))}))
    with pytest.raises(ValueError, match="not a packed set"):
        SpanSet.unpack(packed)


def test_no_bytes_are_the_empty_set() -> None:
    assert SpanSet.unpack(b"") == SpanSet()
