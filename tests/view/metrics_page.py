"""Prints the table in docs/metrics.md from the catalogue of metrics.

python tests/view/metrics_page.py     # writes the table anew, after metrics have changed
"""

from __future__ import annotations

from pathlib import Path

from holdfast.view.metrics.catalogue import METRICS
from holdfast.view.metrics.families import RECOVERY, RECOVERY_HELP

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN = "The label `job` is on each of them.\n\n"


def table() -> str:
    suffixes = {"counter": "_total", "info": "_info", "gauge": ""}
    rows = [
        (one.name + suffixes[one.kind], one.kind, ", ".join(one.labels), one.help)
        for one in METRICS
    ]
    rows.append((RECOVERY, "histogram", "", RECOVERY_HELP))
    lines = [f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in rows]
    return "\n".join(
        ["| metric | kind | labels | what it is |", "| --- | --- | --- | --- |", *lines]
    )


def page() -> str:
    """The page as it should be."""
    written = PAGE.read_text()
    return written[: written.index(BEGIN) + len(BEGIN)] + table() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
