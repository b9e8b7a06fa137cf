"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Report:
    """What one mode found: `results` holds every measurement, `summary` what follows from them."""

    mode: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]
    results: list[dict[str, Any]]
    summary: dict[str, Any]
    passed: bool = field(default=True)
    """False if something the mode checks, not merely measures, does not hold."""


def median_of(values: Sequence[float | None]) -> float | None:
    """The median of the values that there are."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def publish(report: Report, options: dict[str, Any], json_to: str | None) -> None:
    """The table to the terminal; JSON to a file, or to standard output instead of the table."""
    text = "\n".join([table(report.columns, report.rows), *report.notes])
    print(text, file=sys.stderr if json_to == "-" else sys.stdout)
    if json_to is None:
        return
    document = {
        "mode": report.mode,
        "machine": machine(),
        "options": options,
        "summary": report.summary,
        "passed": report.passed,
        "results": report.results,
    }
    encoded = json.dumps(document, indent=2, default=str)
    if json_to == "-":
        print(encoded)
    else:
        Path(json_to).write_text(encoded + "\n")
