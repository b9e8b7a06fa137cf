"""The tables of docs/torchrun.md, for the tests that hold them against torch."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "torchrun.md"
VERDICTS = {"same", "differs", "no effect", "no"}


def table(title: str) -> dict[str, str]:
    """The verdict on each name in the first column of a section's table."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(f"{title}\n"))
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")][2:]
    found = {row[1].strip(" `"): row[2].strip() for row in rows}
    assert set(found.values()) <= VERDICTS, found
    assert all(row[3].strip() for row in rows if row[2].strip() != "same"), "a reason is missing"
    return found
