"""Writes the report of a job as Markdown, for a ticket or a chat: pictures are rows of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.messages.reports import CAUSES
from holdfast.view.report.facts import GoodputBucket, JobReport
from holdfast.view.report.wording import (
    count,
    duration,
    headline,
    lost_s,
    moment,
    outcome,
)
from holdfast.view.wording import loss, percent

BLOCKS = "▁▂▃▄▅▆▇█"
INCIDENTS_SHOWN = 50
COLUMNS = 72


def markdown(report: JobReport) -> str:
    """Write the report."""
    return "\n".join([*_lines(report), ""])


def _lines(report: JobReport) -> Iterator[str]:
    status = report.status
    yield f"# {_plain(status.job)}: {outcome(report)[1]}"
    yield from ("", headline(report), "")
    if status.reason and status.exit_code:
        yield from (f"> exit code {status.exit_code}: {_plain(status.reason)}", "")
    yield from _table(("", ""), _numbers(report))
    yield from ("", "## Where the time went", "")
    yield from _table(("cause", "share", "rank time", "what it is"), _causes(report), "lrrl")
    yield from ("", "Productive share over time:", "", f"    {_sparks(report.goodput_over_time)}")
    yield from ("", f"## Incidents ({report.incident_count})", "")
    for one in reversed(report.incidents[-INCIDENTS_SHOWN:]):
        yield f"- **{one.id}** {moment(one.at)}: {_plain(one.line)}"
    if report.incident_count > INCIDENTS_SHOWN:
        yield f"- … `holdfast incidents {status.job}` has all {report.incident_count}"
    if not report.incident_count:
        yield "None."
    if status.checkpoints:
        yield from ("", "## Checkpoints", "")
        heads = ("checkpointer", "in memory", "on storage", "skipped", "failed")
        yield from _table(heads, _checkpoints(report), "lrrrr")
    notes = [f"- excluded: {host}: {why}" for host, why in status.excluded.items()]
    notes += [f"- suspect: {node}: {why}" for node, why in status.suspects.items()]
    if notes:
        yield from ("", "## Nodes", "", *map(_plain, notes))
    yield from ("", f"Made by holdfast {report.version} on {moment(report.made_at)}.")


def _numbers(report: JobReport) -> list[tuple[str, ...]]:
    status, goodput = report.status, report.goodput
    rows = [
        ("opened", moment(status.opened_at)),
        ("wall clock", duration(status.wall_s)),
        ("goodput", percent(goodput.goodput)),
        ("steps", count(status.step)),
        ("ranks", f"{round(goodput.ranks, 1):g}"),
        ("restarts", str(status.restarts)),
        ("rank time lost to faults", duration(lost_s(report))),
    ]
    if report.price is not None:
        rows.append(("what that cost", report.price.of(lost_s(report))))
    if status.loss is not None:
        rows.append(("loss", f"{loss(status.loss)} at step {count(status.loss_step or 0)}"))
    if report.recovery_s is not None:
        rows.append(("usual recovery", duration(report.recovery_s)))
    return list(rows)


def _causes(report: JobReport) -> list[tuple[str, ...]]:
    seconds = report.goodput.seconds
    total = sum(seconds.values())
    return [
        (cause, percent(spent / total), duration(spent), CAUSES[cause])
        for cause, spent in sorted(seconds.items(), key=lambda item: -item[1])
        if spent > 0
    ]


def _checkpoints(report: JobReport) -> list[tuple[str, ...]]:
    return [
        (
            one.checkpointer,
            str(one.in_memory if one.in_memory is not None else "–"),
            str(one.on_storage if one.on_storage is not None else "–"),
            str(one.skipped),
            str(one.failed + one.failures),
        )
        for one in report.status.checkpoints
    ]


def _sparks(buckets: Sequence[GoodputBucket]) -> str:
    each = max(1, -(-len(buckets) // COLUMNS))
    found = []
    for first in range(0, len(buckets), each):
        part = buckets[first : first + each]
        total = sum(sum(bucket.seconds.values()) for bucket in part)
        good = sum(bucket.seconds.get("productive", 0.0) for bucket in part)
        found.append(BLOCKS[min(7, int(8 * good / total))] if total else " ")
    return "".join(found)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "") -> Iterator[str]:
    marks = [" ---: |" if side == "r" else " --- |" for side in sides.ljust(len(heads), "l")]
    yield "|" + "".join(f" {head} |" for head in heads)
    yield "|" + "".join(marks)
    for row in rows:
        yield "|" + "".join(f" {_plain(cell)} |" for cell in row)


def _plain(text: str) -> str:
    """Keep a text on its line and in its cell."""
    escaped = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
    return escaped if len(escaped) <= 500 else escaped[:500] + "…"
