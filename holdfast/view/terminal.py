"""Prints reports for people: tables on a terminal, tab-separated lines into a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from holdfast.messages.evidence import StackGroup
from holdfast.messages.reports import (
    CAUSES,
    CheckpointerReport,
    GoodputReport,
    IncidentReport,
    RankReport,
    StatusReport,
    StoryStep,
    SupplyReport,
)
from holdfast.messages.tuning import TuningReport
from holdfast.view.data import skipped_lines
from holdfast.view.wording import loss

FRAMES_SHOWN = 12
DETAIL_SHOWN = 12


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    if not sys.stdout.isatty():
        print(title)
        for row in (columns, *rows):
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_status(status: StatusReport) -> None:
    """Print where a job stands."""
    parts = [f"{status.state}, round {status.round}, {status.world_size} ranks, step {status.step}"]
    if status.steps_per_s is not None:
        parts.append(f"{_speed(status.steps_per_s)} steps/s")
    if status.samples_per_s is not None:
        parts.append(f"{_speed(status.samples_per_s)} samples/s")
    if status.loss is not None:
        parts.append(f"loss {loss(status.loss)} at step {status.loss_step}")
    if status.no_step_s is not None:
        parts.append(f"no step for {status.no_step_s:.0f} s")
    title = f"job {status.job}: {', '.join(parts)}"
    rows = [
        (node.node, node.state, *cells)
        for node in status.nodes
        for cells in [_rank(rank) for rank in node.ranks] or [("-",) * 5]
    ]
    print_table(title, ("node", "state", "rank", "pid", "step", "samples/s", "speed"), rows)
    if status.suspicion is not None:
        print(status.suspicion.line)
    for one in status.checkpoints:
        print(_checkpoints(one))
    for tuned in status.tuning:
        if tuned.version or tuned.pending:
            print(tuning_lines(tuned)[0])
    for node in status.nodes:
        if node.overload is not None:
            print(f"overloaded: node {node.node}: {node.overload}")
    for suspect, why in status.suspects.items():
        print(f"suspect: node {suspect}: {why}")
    if status.supply is not None:
        for line in supply_lines(status.supply):
            print(line)
    for host, why in status.excluded.items():
        print(f"excluded: host {host}: {why}")
    for line in skipped_lines(status.skipped_shards):
        print(line)
    for fault in status.faults.pending:
        print(f"fault to come: {fault.line}")
    for fault in status.faults.refused:
        print(f"fault not injected: {fault.line}: {fault.why}")
    for reason, count in status.refused.items():
        print(f"refused: {count} events: {reason}")
    for task, count in status.failed_tasks.items():
        print(f"background task failed: {task}: {count} times, started again each time")
    if status.last_incident:
        print(f"last incident: {status.last_incident}")
    if status.reason:
        print(f"ended with {status.exit_code}: {status.reason}")


def supply_lines(supply: SupplyReport) -> list[str]:
    """Describe what the platform was asked for, and what is missing."""
    counts = ", ".join(f"{count} {status}" for status, count in supply.counts.items())
    away = "" if supply.connected else "; its supplier is away"
    lines = [f"supply: {supply.wanted} nodes wanted of {supply.platform}: {counts or 'none'}{away}"]
    for one in supply.positions:
        if one.node is None and one.status in ("requested", "pending", "running"):
            said = f": {one.detail}" if one.detail else ""
            lines.append(f"  request {one.request}: {one.status} for {one.for_s:.0f} s{said}")
    if supply.refusal is not None:
        lines.append(f"  refused by {supply.platform}: {supply.refusal}")
    lines += [f"  given up: position {number}: {why}" for number, why in supply.given_up.items()]
    lines += [f"cordoned: host {host}: {why}" for host, why in supply.cordoned.items()]
    return lines


def tuning_lines(one: TuningReport) -> list[str]:
    """Describe the settings of a data set's loaders, and their latest changes."""
    settings = one.config.over(one.script)
    lines = [f"{one.dataset}: version {one.version}, {settings}; open on {one.ranks} ranks"]
    if one.pending is not None:
        lines.append(f"  under way: {one.pending}")
    if one.auto is not None:
        lines.append(f"  search for a micro-batch {one.auto}")
    for change in one.changes:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.at))
        where = "" if change.step is None else f" from step {change.step} of round {change.round}"
        why = f" ({change.why})" if change.why else ""
        lines.append(f"  {when} {change.by}: {change.config}: {change.outcome}{where}{why}")
    return lines


def _speed(per_s: float | None) -> str:
    """Write how often a second, without thousands separators: columns are also read by programs."""
    if per_s is None:
        return "-"
    return f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2g}"


def print_story(incident: IncidentReport, steps: Sequence[StoryStep]) -> None:
    """Print the chain of events and actions of one incident."""
    rows = [
        (f"{one.after_s:+.3f} s", _indented(one), one.cause, one.node or "", one.what, one.text)
        for one in steps
    ]
    title = f"incident {incident.id}: {incident.line}"
    print_table(title, ("after", "id", "follows", "node", "what", ""), rows)


def _indented(one: StoryStep) -> str:
    return one.id if one.kind == "event" else f"  {one.id}"


def _rank(rank: RankReport) -> tuple[str, ...]:
    """The cells of one rank.

    The speed is relative to the fastest rank; to the rank's own best if there is no other rank, or if
    that is what makes it a straggler."""
    if rank.score is None or rank.straggler == "individual":
        speed = "-" if rank.own_score is None else f"{rank.own_score:.2f} of its best"
    else:
        speed = f"{rank.score:.2f}"
    slow = ", slow" if rank.straggler else ""
    samples = _speed(rank.samples_per_s)
    return (str(rank.rank), str(rank.pid), str(rank.step), samples, f"{speed}{slow}")


def _checkpoints(one: CheckpointerReport) -> str:
    steps = [
        (one.in_memory, "in memory"),
        (one.on_storage, "on storage"),
        (one.writing, "being written"),
    ]
    where = [f"step {step} {words}" for step, words in steps if step is not None]
    if one.failures:
        where.append(f"{one.failures} failed in a row")
    where += [
        f"{count} saves {words}"
        for count, words in ((one.failed, "failed"), (one.skipped, "skipped"))
        if count
    ]
    return f"checkpoints of {one.checkpointer}: {', '.join(where) or 'none yet'}"


def print_goodput(report: GoodputReport) -> None:
    """Print the ledger, the largest cause first."""
    total = sum(report.seconds.values())
    title = (
        f"job {report.job}: goodput {report.goodput:.1%}"
        f" of {report.wall_s:.1f} s × {report.ranks} ranks"
    )
    since = report.unknown_since
    if since is not None:
        title += f", unknown since {time.strftime('%H:%M:%S', time.localtime(since))}"
    if report.samples is not None:
        title += f"; {_samples(report)}"
    rows = [
        (cause, f"{seconds:.2f}", f"{seconds / total:.1%}", CAUSES[cause])
        for cause, seconds in sorted(report.seconds.items(), key=lambda item: -item[1])
        if seconds
    ]
    print_table(title, ("cause", "rank-seconds", "share", "what it is"), rows)


def _samples(report: GoodputReport) -> str:
    redone = f", {report.redone_samples} redone" if report.redone_samples else ""
    per_s = f", {_speed(report.samples_per_s)}/s while productive" if report.samples_per_s else ""
    return f"{report.samples} samples{redone}{per_s}"


def print_incidents(job: str, incidents: Sequence[IncidentReport]) -> None:
    """Print each incident in a line, then what else is known of it."""
    if not incidents:
        print(f"job {job}: no incidents")
    for incident in incidents:
        print(f"{incident.id}. {incident.line}")
        for line in [*incident.also, *incident.detail.rstrip().splitlines()[-DETAIL_SHOWN:]]:
            print(f"     {line}")


def print_stacks(groups: Sequence[StackGroup]) -> None:
    """Print the stacks of a verdict, one for all ranks that stand at the same place."""
    for group in groups:
        print(f"\n{group.headline}")
        for frame in group.frames[:FRAMES_SHOWN]:
            where = f"{frame.file}:{frame.line}" if frame.line else frame.file
            print(f"    {frame.function}  {where}")
        if len(group.frames) > FRAMES_SHOWN:
            print(f"    ... {len(group.frames) - FRAMES_SHOWN} more")
