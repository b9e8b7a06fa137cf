"""Everything that an agent can send is bounded to the last field, so the journal stays readable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec.inspect as shapes
import pytest

from holdfast.errors import BadFrame
from holdfast.messages.events import AnyEvent, HealthFound
from holdfast.messages.health import HealthResult
from holdfast.messages.units import NodeId, Time
from holdfast.messages.wire import FromAgent, Sent
from holdfast.wire import framing

GREETING = {"Hello.protocol", "Hello.token", "Visit.protocol", "Visit.token"}
"""Fields whose types no version may change; they reach neither the journal nor the core."""


def unbounded(shape: shapes.Type, where: str, seen: set[type]) -> Iterator[str]:
    """Name every field below a type that accepts values without limits."""
    if isinstance(shape, shapes.Metadata):
        yield from unbounded(shape.type, where, seen)
    elif isinstance(shape, shapes.UnionType):
        for one in shape.types:
            yield from unbounded(one, where, seen)
    elif isinstance(shape, shapes.StructType):
        if shape.cls not in seen:
            seen.add(shape.cls)
            for field in shape.fields:
                yield from unbounded(field.type, f"{shape.cls.__name__}.{field.name}", seen)
    elif isinstance(shape, shapes.IntType | shapes.FloatType):
        if shape.ge is None or (shape.le is None and shape.lt is None):
            yield where
    elif isinstance(shape, shapes.StrType):
        if shape.max_length is None and shape.pattern is None:
            yield where
    elif isinstance(shape, shapes.BytesType):
        if shape.max_length is None:
            yield where
    elif isinstance(shape, shapes.VarTupleType):
        if shape.max_length is None:
            yield where
        yield from unbounded(shape.item_type, where, seen)
    elif isinstance(shape, shapes.TupleType):
        for one in shape.item_types:
            yield from unbounded(one, where, seen)
    elif isinstance(shape, shapes.DictType):
        if shape.max_length is None:
            yield where
        yield from unbounded(shape.key_type, where, seen)
        yield from unbounded(shape.value_type, where, seen)
    elif not isinstance(shape, shapes.BoolType | shapes.NoneType | shapes.LiteralType):
        yield f"{where} ({type(shape).__name__})"


@pytest.mark.parametrize("kind", [FromAgent, AnyEvent], ids=["wire", "journal"])
def test_no_field_of_a_message_is_without_bounds(kind: Any) -> None:
    assert set(unbounded(shapes.type_info(kind), "", set())) - GREETING == set()


@pytest.mark.parametrize(
    "fact", [float("nan"), float("inf"), -float("inf"), 1 << 63], ids=["nan", "inf", "-inf", "huge"]
)
def test_a_fact_that_the_journal_could_not_hold_does_not_decode(fact: float) -> None:
    result = HealthResult("mine", "fail", "it is ill", 1.0, {"share": fact})
    event = HealthFound(at=Time(1.0), node=NodeId("n"), results=(result,))
    decoder = framing.FrameDecoder[Any](FromAgent)  # type: ignore[arg-type]
    with pytest.raises(BadFrame):
        decoder.feed(framing.encode(Sent(number=1, event=event)))
