"""Breaks text into lines of a terminal, measured in its columns."""

from __future__ import annotations

from rich.cells import cell_len, chop_cells
from rich.text import Text

INDENT = 4


def wrapped(
    text: str, width: int, most: int, style: str = "", indent: int | None = None
) -> list[Text]:
    """Break a text between words into at most so many lines; further ones are indented."""
    first, further = " " * (indent or 0), " " * (INDENT if indent is None else indent + 2)
    lines: list[str] = []
    line = first
    for word in text.split():
        for number, piece in enumerate(chop_cells(word, max(1, width - len(further)))):
            full = number > 0 or cell_len(line) + 1 + cell_len(piece) > width
            if line.strip() and full:
                lines.append(line)
                line = further + piece
            else:
                line += piece if not line.strip() else f" {piece}"
    if line.strip():
        lines.append(line)
    shown = [Text(one, style) for one in lines[:most]]
    if len(lines) > most:
        shown[-1] = cut(Text(f"{lines[most - 1]} {lines[most].strip()}", style), width)
    return shown


def cut(line: Text, width: int) -> Text:
    """Cut a line to the width, with a mark that it went on."""
    line.truncate(width, overflow="ellipsis")
    return line
