"""Draws `holdfast top`: a screen of text for a look at a job, for any size of terminal.

A frame is a list of at most `height` lines, none wider than `width`. What matters most stands at the
top and stays when the screen is small: state, step, goodput, what is wrong now. Incidents get the lines
that they need, up to a share of the screen; the map of the ranks gets the rest, and can be scrolled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.text import Text

from holdfast.messages.records import Cause
from holdfast.messages.reports import CAUSES, CheckpointerReport, IncidentReport
from holdfast.view.top.map import COLOURS, map_lines
from holdfast.view.top.paragraph import cut, wrapped
from holdfast.view.top.state import LETTERS, JobNow, Looks
from holdfast.view.wording import duration, loss, percent, plain, speed

STATE_COLOURS = {
    "running": "black on green",
    "ended": "black on white",
    "lost": "white on red",
}
CAUSE_COLOURS: dict[Cause, str] = {
    "productive": "green",
    "redo": "red",
    "start": "cyan",
    "init": "bright_cyan",
    "checkpoint": "blue",
    "evaluation": "bright_blue",
    "detect": "bright_red",
    "stop": "bright_red",
    "rendezvous": "bright_red",
    "restore": "magenta",
    "wait": "yellow",
}
"""Colours of causes; grey for all others."""
BARS = "▁▂▃▄▅▆▇█"
LEAST_LOST = 0.0005
"""Share of all time below which a cause is not named."""
LEAST_LOST_S = 0.05
WIDE = 100
ALERTS = 6
HELP = [
    ("q, Ctrl-C", "quit; the job goes on"),
    ("arrows, h j k l", "choose a rank; on other pages, scroll"),
    ("PgUp PgDn g G", "scroll by pages; to the top, to the end"),
    ("i", "all incidents, with the phases of their repair"),
    ("w", "why: where the chosen rank is now, asked of the running job"),
    ("Esc", "back to the overview"),
    ("?", "this page"),
]


def frame(view: JobNow, looks: Looks, width: int, height: int) -> list[Text]:
    """Draw one screen."""
    head = [_title(view, width)]
    foot = [_footer(view, looks, width)]
    room = max(0, height - len(head) - len(foot))
    page = {"overview": _overview, "incidents": _incidents, "why": _why, "help": _help}[looks.page]
    body = page(view, looks, width, room)[:room]
    body += [Text()] * (room - len(body))
    return [cut(line, width) for line in (*head, *body, *foot)][:height]


# ---- the overview ----


def _overview(view: JobNow, looks: Looks, width: int, room: int) -> list[Text]:
    top = [*_progress(view, width), *_alerts(view, width), *_checkpoints(view)]
    left = room - len(top)
    incidents = _newest_incidents(view, width, max(2, left // 3))
    head = Text.assemble(("ranks", "bold"), (f"  {_legend(view)}", "dim"))
    chosen = _chosen(view, looks)
    rows = max(1, left - len(incidents) - 1 - len(chosen))
    ranks = map_lines(view, looks, width, rows)
    return [*top, head, *ranks, *chosen, *incidents]


def _title(view: JobNow, width: int) -> Text:
    status = view.status
    spares = sum(1 for node in view.nodes if not node.letters)
    waiting = f" +{spares} waiting" if spares else ""
    nodes = len(view.nodes) - spares
    colour = STATE_COLOURS.get(status.state, "black on yellow")
    left = Text.assemble(
        (f" {status.job} ", "bold reverse"),
        (f" {status.state} ", colour),
        f" round {status.round} · {status.world_size} ranks on {nodes}"
        f" node{'s' if nodes != 1 else ''}{waiting} · {duration(status.wall_s)}",
    )
    clock = time.strftime("%H:%M:%S", time.localtime(view.now))
    gap = width - left.cell_len - len(clock)
    return left.append(" " * gap + clock) if gap >= 2 else left


def _progress(view: JobNow, width: int) -> Iterator[Text]:
    status, goodput = view.status, view.goodput
    if view.loading is not None:
        yield Text(f"reading the journal: {view.loading:.0%}", "yellow")
    line = Text.assemble("step ", (f"{status.step:,}", "bold"))
    if status.steps_per_s is not None:
        line.append(f"  {speed(status.steps_per_s)} steps/s")
    if status.samples_per_s is not None:
        line.append(f"  {speed(status.samples_per_s)} samples/s")
    if status.loss is not None:
        finite = not isinstance(status.loss, str)
        line.append(f"  loss {loss(status.loss)}", "" if finite else "red")
    if status.no_step_s is not None:
        line.append(f"  no step for {duration(status.no_step_s)}", "yellow")
    if status.restarts:
        line.append(f"  {status.restarts} restart{'s' if status.restarts > 1 else ''}")
    drawn = sparkline(view.speeds, min(60, width - line.cell_len - 2))
    if width >= WIDE and drawn:
        line.append(f"  {drawn}", "green")
    yield line
    yield _goodput_bar(view, width)
    total = sum(goodput.seconds.values())
    lost = sorted(goodput.seconds.items(), key=lambda item: -item[1])
    named = [
        f"{cause} {duration(s)}"
        for cause, s in lost
        if cause != "productive" and s >= LEAST_LOST_S and s / total >= LEAST_LOST
    ]
    if named:
        lost_s = total - goodput.seconds.get("productive", 0.0)
        cost = "" if view.price is None else f" ({view.price.of(lost_s)})"
        text = (
            f"lost {duration(lost_s)}{cost} of {duration(total)} of all ranks: {', '.join(named)}"
        )
        yield from wrapped(text, width, 2, "dim")


def _goodput_bar(view: JobNow, width: int) -> Text:
    """Draw the ledger as a bar, a piece for each cause."""
    goodput = view.goodput
    line = Text.assemble("goodput ", (f"{percent(goodput.goodput):>6}", "bold"), " ")
    room, total = width - line.cell_len, sum(goodput.seconds.values())
    if total <= 0:
        return line
    drawn, until = 0, 0.0
    for cause in CAUSES:
        until += goodput.seconds.get(cause, 0.0)
        cells = round(until / total * room) - drawn
        piece = "█" if cause == "productive" else "▒"
        line.append(piece * cells, CAUSE_COLOURS.get(cause, "bright_black"))
        drawn += cells
    return line


def sparkline(values: Sequence[float], room: int) -> str:
    """Draw values as bars of one character, the newest on the right."""
    shown = values[-room:] if room > 0 else ()
    most = max(shown, default=0.0)
    if most <= 0:
        return ""
    return "".join(BARS[min(7, round(value / most * 7))] for value in shown)


def _alerts(view: JobNow, width: int) -> list[Text]:
    """Say what is wrong now, the most urgent first."""
    status = view.status
    said: list[tuple[str, str]] = []
    if status.reason and status.exit_code:
        said.append((f"ended with exit code {status.exit_code}: {status.reason}", "bold red"))
    elif status.exit_code == 0:
        said.append(("finished", "bold green"))
    elif status.state == "lost":
        said.append(("no process runs this job any more, and it has not ended", "bold red"))
    if status.suspicion is not None:
        said.append((status.suspicion.line, "bold red"))
    said += [(f"suspect: {node}: {why}", "yellow") for node, why in status.suspects.items()]
    said += [(f"overloaded: {n.host}: {n.overload}", "yellow") for n in status.nodes if n.overload]
    said += [(f"excluded: {host}: {why}", "yellow") for host, why in status.excluded.items()]
    supply = status.supply
    if supply is not None and (len(view.nodes) < supply.wanted or not supply.connected):
        away = "" if supply.connected else "; its supplier is away"
        have = f"{len(view.nodes)} of {supply.wanted} nodes of {supply.platform} are here{away}"
        said.append((have, "yellow"))
    said += [(f"fault to come: {fault.line}", "magenta") for fault in status.faults.pending]
    lines = [line for text, style in said for line in wrapped(plain(text), width, 2, style)]
    if len(lines) > ALERTS:
        lines[ALERTS - 1 :] = [Text(f"... {len(lines) - ALERTS + 1} more lines", "yellow")]
    return lines


def _checkpoints(view: JobNow) -> Iterator[Text]:
    for one in view.status.checkpoints[:3]:
        yield Text.assemble(("checkpoints ", "bold"), f"{plain(one.checkpointer)}: {_saved(one)}")


def _saved(one: CheckpointerReport) -> str:
    places = [(one.in_memory, "memory"), (one.on_storage, "storage")]
    told = [f"{words} step {step:,}" for step, words in places if step is not None]
    if one.writing is not None:
        told.append(f"writing step {one.writing:,}")
    bad = [(one.failures, "failed in a row"), (one.failed, "failed"), (one.skipped, "skipped")]
    told += [f"{count:,} {words}" for count, words in bad if count]
    return ", ".join(told) or "none yet"


def _legend(view: JobNow) -> str:
    """Explain the letters that are there."""
    counts = {letter: sum(node.letters.count(letter) for node in view.nodes) for letter in LETTERS}
    return "  ".join(f"{letter} {LETTERS[letter]} {n:,}" for letter, n in counts.items() if n)


def _chosen(view: JobNow, looks: Looks) -> list[Text]:
    """Describe the rank that is chosen."""
    found = view.rank(looks.selected)
    if found is None:
        return []
    rank, host = found
    score = rank.own_score if rank.score is None else rank.score
    parts = [
        f"rank {rank.rank} on {host}",
        f"pid {rank.pid}" if rank.pid else "not started",
        f"step {rank.step:,}",
        *([f"{speed(rank.steps_per_s)} steps/s"] if rank.steps_per_s is not None else []),
        *([f"speed {score:.2f}"] if score is not None else []),
        *(["slow"] if rank.straggler else []),
    ]
    return [Text.assemble(("> ", "bold"), ", ".join(parts))]


def _newest_incidents(view: JobNow, width: int, room: int) -> list[Text]:
    count = len(view.incidents)
    lines = [Text.assemble(("incidents", "bold"), f"  {count:,}" if count else "  none")]
    for one in reversed(view.incidents):
        told = wrapped(_incident(one), width, 2, "" if one.lost_s is not None else "yellow")
        if len(lines) + len(told) > room + 1:
            break
        lines += told
    return lines


def _incident(one: IncidentReport) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(one.at))
    return f"{one.id:>3} {when} {plain(one.line)}"


# ---- other pages ----


def _scrolled(lines: list[Text], looks: Looks, room: int) -> list[Text]:
    looks.scroll = max(0, min(looks.scroll, len(lines) - room))
    return lines[looks.scroll : looks.scroll + room]


def _incidents(view: JobNow, looks: Looks, width: int, room: int) -> list[Text]:
    lines = [Text("incidents, the newest first", "bold")]
    for one in reversed(view.incidents):
        lines += wrapped(_incident(one), width, 6, "" if one.lost_s is not None else "yellow")
        phases = ", ".join(f"{name.replace('_', ' ')} {s:.2f} s" for name, s in one.phases.items())
        for text in (f"phases: {phases}" if phases else "", one.action, *one.also[:3]):
            lines += wrapped(plain(text), width, 2, "dim", indent=4) if text else []
    if not view.incidents:
        lines.append(Text("none"))
    return _scrolled(lines, looks, room)


def _why(view: JobNow, looks: Looks, width: int, room: int) -> list[Text]:
    lines = [Text(f"why: rank {looks.selected}", "bold")]
    for text in looks.why:
        indent = len(text) - len(text.lstrip())
        lines += wrapped(plain(text), width, 6, indent=indent) or [Text()]
    return _scrolled(lines, looks, room)


def _help(view: JobNow, looks: Looks, width: int, room: int) -> list[Text]:
    lines = [Text.assemble((f"{keys:<16}", "bold"), text) for keys, text in HELP]
    letters = [Text.assemble((f"{a:<16}", COLOURS[a]), text) for a, text in LETTERS.items()]
    causes = [
        Text.assemble((f"{cause:<16}", CAUSE_COLOURS.get(cause, "bright_black")), text)
        for cause, text in CAUSES.items()
    ]
    return _scrolled([*lines, Text(), *letters, Text(), *causes], looks, room)


def _footer(view: JobNow, looks: Looks, width: int) -> Text:
    if view.over and looks.page == "overview":
        return Text(" the job is over; any key ends this, i for its incidents", "reverse")
    keys = "q quit  ←↑↓→ rank  i incidents  w why  ? help"
    return Text(f" {keys if looks.page == 'overview' else 'Esc back  ↑↓ scroll  q quit'} ", "dim")
