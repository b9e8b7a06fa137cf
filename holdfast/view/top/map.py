"""Draws the ranks of a job, a letter each.

While nodes are few, each has a line: its host, its ranks, what is to be said of it. When they are more
than a few screens of lines, each is one letter, that of its worst rank; below are the lines of those
nodes that are not well. The chosen rank, or its node, is shown in reverse.
"""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from holdfast.view.top.state import JobNow, Looks, NodeNow

COLOURS = {
    "r": "green",
    "w": "yellow",
    "c": "blue",
    "s": "magenta",
    "h": "bold white on red",
    "i": "cyan",
    "f": "bright_black",
    "-": "red",
}
WELL = frozenset("rwcif")
SCREENS = 3
"""Screens of lines beyond which nodes are drawn as letters."""
WIDEST_HOST = 24


def is_folded(view: JobNow, width: int, rows: int) -> bool:
    """Return whether each node is one letter."""
    return len(view.nodes) > max(1, rows) * SCREENS


def map_lines(view: JobNow, looks: Looks, width: int, rows: int) -> list[Text]:
    """Draw the map in as many rows at most."""
    if is_folded(view, width, rows):
        return _grid(view, looks, width, rows)
    lines, chosen = _by_node(view.nodes, looks, width)
    first = max(0, min(chosen - rows // 2, len(lines) - rows))
    shown = lines[first : first + rows]
    below = len(lines) - first - len(shown)
    if below and shown:
        shown[-1] = Text(f"... {below + 1} more lines below", "dim")
    return shown


def _by_node(nodes: list[NodeNow], looks: Looks, width: int) -> tuple[list[Text], int]:
    """Draw each node, in several lines if it has many ranks; also the line of the chosen rank."""
    host_cells = min(WIDEST_HOST, width // 3, max((cell_len(n.host) for n in nodes), default=0))
    last = max((n.first_rank + len(n.letters) for n in nodes), default=0)
    number_cells = len(str(last))
    room = max(8, width - host_cells - number_cells - 3)
    lines: list[Text] = []
    chosen = 0
    for node in nodes:
        host = set_cell_size(node.host, host_cells)
        if not node.letters:
            said = f"{node.state}, without ranks{': ' + node.note if node.note else ''}"
            lines.append(Text.assemble((f"{host}  ", "dim"), (said, "dim")))
            continue
        for at in range(0, len(node.letters), room):
            first = node.first_rank + at
            letters = _letters(node.letters[at : at + room], first, looks.selected)
            if first <= looks.selected < first + len(letters.plain):
                chosen = len(lines)
            name = host if at == 0 else " " * host_cells
            line = Text.assemble(f"{name} ", (f"{first:>{number_cells}} ", "dim"), letters)
            if at == 0 and node.usage:
                line.append(f"  {node.usage}", "dim")
            if at == 0 and (node.note or node.state != "placed"):
                said = ": ".join(filter(None, (node.state.replace("placed", ""), node.note)))
                line.append(f"  {said}", "yellow")
            lines.append(line)
    return lines, chosen


def _letters(letters: str, first: int, selected: int) -> Text:
    text = Text()
    for at, letter in enumerate(letters):
        style = COLOURS.get(letter, "")
        text.append(letter, f"{style} reverse" if first + at == selected else style)
    return text


def _grid(view: JobNow, looks: Looks, width: int, rows: int) -> list[Text]:
    """Draw each node as a letter, then the nodes that are not well, one a line."""
    label = len(str(view.ranks)) + 1
    room = max(8, width - label - 1)
    placed = [node for node in view.nodes if node.letters]
    grid: list[Text] = []
    for at in range(0, len(placed), room):
        line = Text(f"{placed[at].first_rank:>{label}} ", "dim")
        for node in placed[at : at + room]:
            chosen = node.first_rank <= looks.selected < node.first_rank + len(node.letters)
            style = COLOURS.get(node.worst, "")
            line.append(node.worst, f"{style} reverse" if chosen else style)
        grid.append(line)
    said = Text(f"{len(placed):,} nodes, each the letter of its worst rank", "dim")
    unwell = [node for node in placed if node.worst not in WELL or node.note]
    lines = [said, *grid[: max(1, rows - 2)]]
    if len(grid) > rows - 2:
        lines.append(Text(f"... {len(grid) - max(1, rows - 2)} more rows of nodes", "dim"))
    lines += _by_node(unwell, looks, width)[0]
    if len(lines) > rows:
        lines[rows - 1 :] = [Text(f"... {len(lines) - rows + 1} more lines", "dim")]
    return lines


def step_of(view: JobNow, looks: Looks, width: int, rows: int, key: str) -> int:
    """Return how far the chosen rank moves with an arrow: to the next rank, or to the next node."""
    node = next((n for n in view.nodes if _has(n, looks.selected)), None)
    size = len(node.letters) if node is not None else 1
    label = len(str(view.ranks)) + 1
    if is_folded(view, width, rows):
        across, down = size, size * max(8, width - label - 1)
    else:
        across, down = 1, size
    return {"left": -across, "right": across, "up": -down, "down": down}.get(key, 0)


def _has(node: NodeNow, rank: int) -> bool:
    return node.first_rank <= rank < node.first_rank + len(node.letters)
