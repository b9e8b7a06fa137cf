"""Defines how a loss is written down.

A loss that has become NaN or infinite is news, so it must travel as what it is; but the journal's JSON,
and that of most readers, has no such numbers. So these three are words, as protobuf's JSON mapping has
them: Python's `float` and JavaScript's `Number` both read them.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Literal

from msgspec import Meta

Loss = (
    Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    | Literal["NaN", "Infinity", "-Infinity"]
)
"""A loss, as a message or a report has it; `float` reads it."""


def written(value: float) -> Loss:
    """Write a loss down."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
