"""Decodes rows of Arrow tables into records: dicts of column names and Python values."""

from __future__ import annotations

from typing import Any

from holdfast.errors import DataError


def import_pyarrow(of: str) -> Any:
    """Import pyarrow, or say what to install."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{of} needs pyarrow: pip install 'holdfast[data]'") from error
    return pyarrow


def rows_of(table: Any, rows: list[int]) -> list[dict[str, Any]]:
    """Decode some rows of a table or record batch."""
    if len(rows) == 1:
        row = rows[0]
        return [dict(zip(table.column_names, [c[row].as_py() for c in table.columns], strict=True))]
    together = runs(rows)
    chosen = table.slice(*together[0]) if len(together) == 1 else table.take(rows)
    records: list[dict[str, Any]] = chosen.to_pylist()
    return records


def runs(rows: list[int]) -> list[tuple[int, int]]:
    """Divide ascending rows into runs without a gap: the first row of each, and their number."""
    if rows[-1] - rows[0] == len(rows) - 1 and len(set(rows)) == len(rows):
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
