"""Writes the report of a job as one HTML file that needs nothing else: no script, no request.

Everything that a job says of itself is escaped. A policy in the file forbids whatever might slip
through to load or to run anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from holdfast.messages.reports import CAUSES, IncidentReport
from holdfast.view.report import charts
from holdfast.view.report.charts import PHASES, Axis
from holdfast.view.report.facts import DETAIL_CHARS, MOST_NODES, JobReport
from holdfast.view.report.style import style_sheet
from holdfast.view.report.wording import (
    count,
    duration,
    headline,
    lost_s,
    moment,
    outcome,
    short,
    size,
    speed,
)
from holdfast.view.wording import loss, percent

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def html(report: JobReport) -> str:
    """Write the page."""
    axis = Axis(report.status.opened_at, report.until)
    body = "\n".join(part for part in _parts(report, axis) if part)
    title = escape(f"Holdfast: {report.status.job}")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>{style_sheet()}</style></head>
<body><main>
{body}
</main></body></html>
"""


def _parts(report: JobReport, axis: Axis) -> Iterator[str]:
    yield _header(report)
    yield _cards(report)
    yield _ledger(report)
    yield _timeline(report, axis)
    yield _goodput(report, axis)
    yield _incidents(report)
    yield _checkpoints(report, axis)
    yield _losses(report, axis)
    yield _speed(report, axis)
    yield _nodes(report, axis)
    yield _footer(report)


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>"


def _plot(picture: str) -> str:
    return f'<div class="plot">{picture}</div>'


def _header(report: JobReport) -> str:
    status = report.status
    style, word = outcome(report)
    reason = ""
    if status.reason and status.exit_code:
        told = f"exit code {status.exit_code}: {status.reason}"
        reason = f'<p class="reason">{escape(told)}</p>'
    now = "to" if status.exit_code is not None else "as of"
    when = f"from {moment(status.opened_at)} {now} {moment(report.until)}"
    return (
        f'<header><h1>{escape(status.job)}</h1><span class="badge {style}">{word}</span></header>'
        f'<p class="soft">{when}</p><p class="lead">{escape(headline(report))}</p>{reason}'
    )


def _cards(report: JobReport) -> str:
    status, goodput = report.status, report.goodput
    cards = [
        (percent(goodput.goodput), "goodput"),
        (short(status.step), "steps"),
        (speed(_typical_speed(report)), "steps/s"),
        (str(report.incident_count), "incidents"),
        (str(status.restarts), "restarts"),
        (duration(lost_s(report)), "rank time lost to faults"),
    ]
    if report.price is not None:
        cards.append((escape(report.price.of(lost_s(report))), "what that cost"))
    if status.loss is not None:
        cards.append((loss(status.loss), f"loss at step {count(status.loss_step or 0)}"))
    if report.recovery_s is not None:
        cards.append((duration(report.recovery_s), "usual recovery"))
    if goodput.samples is not None:
        cards.append((short(goodput.samples), "samples"))
    shown = (f'<div class="card"><b>{value}</b><span>{what}</span></div>' for value, what in cards)
    return f'<div class="cards">{"".join(shown)}</div>'


def _typical_speed(report: JobReport) -> float | None:
    if report.status.steps_per_s is not None:
        return report.status.steps_per_s
    known = sorted(one.steps_per_s for one in report.speed if one.steps_per_s is not None)
    return known[len(known) // 2] if known else None


def _ledger(report: JobReport) -> str:
    seconds = report.goodput.seconds
    total = sum(seconds.values())
    rows = [
        f'<tr><td class="cause"><span class="swatch c-{cause}"></span>{cause}</td>'
        f'<td class="n">{percent(spent / total)}</td><td class="n">{duration(spent)}</td>'
        f'<td class="soft what">{escape(CAUSES[cause])}</td></tr>'
        for cause, spent in sorted(seconds.items(), key=lambda item: -item[1])
        if spent > 0
    ]
    numbers = '<th class="n">share</th><th class="n">rank time</th>'
    head = f'<tr><th>cause</th>{numbers}<th class="what"></th></tr>'
    table = f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'
    return _section(
        "Where the time went", f'<div class="bar">{charts.ledger(seconds)}</div>', table
    )


def _legend(causes: Iterable[str]) -> str:
    shown = [
        f'<span><i class="c-{cause}"></i>{cause}</span>' for cause in CAUSES if cause in causes
    ]
    return f'<div class="legend">{"".join(shown)}</div>'


def _timeline(report: JobReport, axis: Axis) -> str:
    if not report.timeline:
        return ""
    causes = {c for lane in report.timeline for span in lane.spans for c in span.shares}
    picture = charts.timeline(report.timeline, axis, report.incidents)
    note = "<span>red lines: faults that broke a round, by number</span>"
    legend = _legend(causes).replace("</div>", f"{note}</div>") if report.repaired else ""
    return _section("What every rank did", _plot(picture), legend or _legend(causes))


def _goodput(report: JobReport, axis: Axis) -> str:
    if not report.goodput_over_time:
        return ""
    causes = {cause for bucket in report.goodput_over_time for cause in bucket.seconds}
    return _section(
        "Goodput over time", _plot(charts.goodput(report.goodput_over_time, axis)), _legend(causes)
    )


# ---- incidents ----


def _incidents(report: JobReport) -> str:
    if not report.incidents:
        return _section("Incidents", "<p>None.</p>")
    kinds = ", ".join(f"{number} {kind}" for kind, number in report.incident_kinds.items())
    told = f"<p class='soft'>{report.incident_count} in all: {escape(kinds)}."
    hidden = report.incident_count - len(report.incidents)
    if hidden:
        told += f" The newest {len(report.incidents)} are below; `holdfast incidents` has all."
    longest = max((sum(one.phases.values()) for one in report.incidents if one.rung), default=0.0)
    seen = {name for one in report.incidents for name in one.phases}
    swatches = [
        f'<span><i class="p{i}"></i>{name.replace("_", " ")}</span>'
        for i, name in enumerate(PHASES)
        if name in seen
    ]
    legend = f'<div class="legend">{"".join(swatches)}</div>' if longest else ""
    rows = [_incident(one, longest) for one in reversed(report.incidents)]
    return _section("Incidents", f"{told}</p>", legend, *rows)


def _incident(one: IncidentReport, longest_s: float) -> str:
    where = f"node {one.node}" if one.node else "the job"
    facts = [moment(one.at), one.kind, where, f"round {one.round}"]
    if one.lost_steps:
        facts.append(f"{one.lost_steps} steps redone")
    if one.action and one.action not in one.line:
        facts.append(one.action)
    repaired = one.rung is not None and one.phases
    bar = charts.phases(one, longest_s) if repaired else ""
    detail = "\n".join([*one.also[:20], one.detail.rstrip()[-DETAIL_CHARS:]]).strip()
    more = (
        f"<details><summary>detail</summary><pre>{escape(detail)}</pre></details>" if detail else ""
    )
    line = one.line if len(one.line) <= 400 else one.line[:400] + "…"
    return (
        f'<div class="incident-row"><h3><span class="num">{one.id}</span>{escape(line)}</h3>'
        f'{bar}<div class="soft">{escape(" · ".join(facts))}</div>{more}</div>'
    )


# ---- saves, speed, nodes ----


def _checkpoints(report: JobReport, axis: Axis) -> str:
    if not report.saves and not report.status.checkpoints:
        return ""
    rows = []
    for one in report.status.checkpoints:
        newest = [s for s in report.saves if s.checkpointer == one.checkpointer]
        sizes = [s.size_bytes for s in newest if s.size_bytes]
        took = [s.tiers["storage"].seconds for s in newest if "storage" in s.tiers]
        cells = [
            str(one.in_memory if one.in_memory is not None else "–"),
            str(one.on_storage if one.on_storage is not None else "–"),
            size(sizes[-1]) if sizes else "–",
            duration(sorted(took)[len(took) // 2]) if took else "–",
            str(one.skipped),
            str(one.failed + one.failures),
        ]
        numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        rows.append(f"<tr><td>{escape(one.checkpointer)}</td>{numbers}</tr>")
    heads = ("step in memory", "on storage", "size", "usual write", "skipped", "failed")
    head = "".join(f'<th class="n">{name}</th>' for name in heads)
    table = f"<table><tr><th>checkpointer</th>{head}</tr>{''.join(rows)}</table>"
    note = '<p class="legend">▼ was loaded by all ranks and verified; × failed</p>'
    picture = _plot(charts.saves(report.saves, axis)) + note if report.saves else ""
    return _section("Checkpoints", picture, f'<div class="scroll">{table}</div>' if rows else "")


def _speed(report: JobReport, axis: Axis) -> str:
    if not any(one.steps_per_s is not None for one in report.speed):
        return ""
    return _section(
        "Speed",
        '<p class="legend">steps per second</p>',
        _plot(charts.steps_per_s(report.speed, axis)),
        '<p class="legend">highest finished step</p>',
        _plot(charts.steps(report.speed, axis)),
    )


def _losses(report: JobReport, axis: Axis) -> str:
    if not report.losses:
        return ""
    legend = '<p class="legend">as the script told it; a gap is where it was no finite number</p>'
    return _section("Loss", legend, _plot(charts.losses(report.losses, axis)))


def _nodes(report: JobReport, axis: Axis) -> str:
    nodes, loads = report.status.nodes, {load.node: load for load in report.loads}
    named: list[tuple[str, str, str, int]]
    named = [(one.node, one.host, one.state, len(one.ranks)) for one in nodes[:MOST_NODES]]
    named = named or [(load.node, "", "gone", 0) for load in report.loads]
    if not named:
        return ""
    rows = []
    for node, host, state, ranks in named:
        load = loads.get(node)
        sparks = [charts.sparkline(load, which, axis) if load else "" for which in range(3)]
        cells = "".join(f"<td>{spark or '–'}</td>" for spark in sparks)
        rows.append(
            f"<tr><td>{escape(node)}</td><td>{escape(host)}</td><td>{escape(state)}</td>"
            f'<td class="n">{ranks or "–"}</td>{cells}</tr>'
        )
    heads = "<th>node</th><th>host</th><th>state</th><th class='n'>ranks</th>"
    heads += "<th>CPU</th><th>memory</th><th>GPU</th>"
    notes = [f"excluded: {host}: {why}" for host, why in report.status.excluded.items()]
    notes += [f"suspect: {node}: {why}" for node, why in report.status.suspects.items()]
    if len(nodes) > MOST_NODES:
        notes.append(f"{len(nodes) - MOST_NODES} more nodes: `holdfast status` has all")
    told = "".join(f"<p>{escape(note)}</p>" for note in notes[:50])
    table = f"<table><tr>{heads}</tr>{''.join(rows)}</table>"
    return _section("Nodes", f'<div class="scroll">{table}</div>', told)


def _footer(report: JobReport) -> str:
    return (
        f"<footer>Made by holdfast {escape(report.version)} on {moment(report.made_at)}."
        " Causes add up to the wall clock of every rank.</footer>"
    )
