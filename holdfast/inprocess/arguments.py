"""Refuses arguments that make no sense, in the same words everywhere."""

from __future__ import annotations

from holdfast.errors import UsageError


def require_count(function: str, name: str, count: object, least: int = 1) -> None:
    """Refuse what is not a whole number of at least that."""
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise UsageError(
            f"{function} needs a whole number of at least {least} as {name}, not {count!r}"
        )


def require_seconds(function: str, limit_s: object) -> None:
    """Refuse what is not a positive number."""
    if not isinstance(limit_s, int | float) or isinstance(limit_s, bool) or not limit_s > 0:
        raise UsageError(f"{function} needs a positive number of seconds, not {limit_s!r}")
