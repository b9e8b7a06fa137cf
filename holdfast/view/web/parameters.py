"""Reads the parameters of requests, which anybody can write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from holdfast.errors import UsageError

T = TypeVar("T", bound=str)


class BadParameter(UsageError):
    """A parameter that cannot be used."""


def number(given: Mapping[str, str], name: str) -> float | None:
    """Read a number; None if it is missing."""
    if not given.get(name):
        return None
    try:
        found = float(given[name])
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise BadParameter(f"{name}: {given[name][:40]!r} is not a number")
    return found


def integer(given: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """Read a whole number within limits."""
    if not given.get(name):
        return default
    try:
        found = int(given[name])
    except ValueError:
        raise BadParameter(f"{name}: {given[name][:40]!r} is not a whole number") from None
    if not least <= found <= most:
        raise BadParameter(f"{name}: {found} is not between {least} and {most}")
    return found


def one_of(given: Mapping[str, str], name: str, words: tuple[T, ...]) -> T:
    """Read one of some words; the first if it is missing."""
    found = given.get(name) or words[0]
    for word in words:
        if word == found:
            return word
    raise BadParameter(f"{name}: {found[:40]!r} is not one of {', '.join(words)}")


def text(given: Mapping[str, Any], name: str, most: int = 1000) -> str:
    """Read a text that must be there."""
    found = given.get(name)
    if not isinstance(found, str) or not found or len(found) > most:
        raise BadParameter(f"{name}: a text of 1 to {most} characters is wanted")
    return found
