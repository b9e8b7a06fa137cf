"""Decodes rows of Arrow tables into records: dicts of column names and Python values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.errors import DataError


def import_pyarrow(of: str) -> Any:
    """Import pyarrow, or say what to install."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{of} needs pyarrow: pip install 'holdfast[data]'") from error
    return pyarrow


def rows_of(table: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Decode some rows of a table or record batch."""
    is_run = isinstance(rows, range) or len(rows) == 1
    chosen = table.slice(rows[0], len(rows)) if is_run else table.take(rows)
    records: list[dict[str, Any]] = chosen.to_pylist()
    return records


def runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Divide rows into runs that follow each other: the first row of each, and their number."""
    if isinstance(rows, range):
        return [(rows[0], len(rows))]
    found: list[tuple[int, int]] = []
    for row in rows:
        first, count = found[-1] if found else (-1, 0)
        if row == first + count:
            found[-1] = (first, count + 1)
        else:
            found.append((row, 1))
    return found


def schema_words(schema: Any) -> str:
    """Describe a schema in one line, the same for files whose records look alike."""
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
