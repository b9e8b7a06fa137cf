"""Checks saved states of data sets against the data set that they are loaded into.

A state is a dict of plain values, so that a checkpoint needs no pickle. What it must agree on is
named with both values if it does not: a position means nothing in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import DataError

VERSION = 1

ADVICE = {
    "name": "the state is of another data set",
    "size": "the data set has changed since the checkpoint; positions in it mean other records now",
    "seed": "with another seed the records come in another order; go on with the saved one",
    "order": "with another shuffling the records come in another order; go on with the saved one",
    "shard": "with other shards the records come in another order; go on with the saved ones",
    "unit": "positions count records or a batch sampler's batches; go on with the saved kind",
}


def check_agreement(name: str, state: Any, now: Mapping[str, int | str]) -> None:
    """Raise DataError unless a saved state was made with the same terms as those of now."""
    if not isinstance(state, Mapping):
        raise DataError(f"data set {name!r}: not a state of a data set: {type(state).__name__}")
    if state.get("version") != VERSION:
        raise DataError(
            f"data set {name!r}: not a state of a data set, or one of another version of Holdfast: "
            f"version {state.get('version')!r}, not {VERSION}"
        )
    for key, value in now.items():
        if state.get(key) != value:
            raise DataError(
                f"data set {name!r}: {key} was {state.get(key)!r} when the state was saved and is "
                f"{value!r} now: {ADVICE[key]}"
            )


def count_in(name: str, state: Mapping[str, Any], key: str, most: int) -> int:
    """Return a number of a state, from 0 up to the most it can be."""
    value = state.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise DataError(f"data set {name!r}: {key} {value!r} of the state is none from 0 to {most}")
    return value
