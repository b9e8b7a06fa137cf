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
    first, count = rows[0], len(rows)
    if rows[-1] - first == count - 1 and all(map(int.__eq__, rows, range(first, first + count))):
        chosen = table.slice(first, count)
    else:
        chosen = table.take(rows)
    records: list[dict[str, Any]] = chosen.to_pylist()
    return records


def schema_words(schema: Any) -> str:
    """Describe a schema in one line, the same for files whose records look alike."""
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
