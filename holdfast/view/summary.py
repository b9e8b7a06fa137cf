"""Writes the summary that `holdfast run` prints when a job is over."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_TRY_AGAIN
from holdfast.messages.reports import GoodputReport, IncidentReport, StatusReport
from holdfast.view.data import skipped_lines

INCIDENTS_SHOWN = 10


def summary(
    status: StatusReport, goodput: GoodputReport, incidents: Sequence[IncidentReport]
) -> list[str]:
    """Summarize a job in a few lines: its end, its steps and goodput, the nodes that are to
    blame, shards that were left out, its last incidents."""
    lines = [_headline(status)]
    total = sum(goodput.seconds.values())
    if status.step and total:
        spent = sorted(goodput.seconds.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{cause} {s / total:.1%}" for cause, s in spent if s / total >= 0.001)
        lines.append(
            f"{status.step} steps in {goodput.wall_s:.1f} s on {goodput.ranks} ranks,"
            f" goodput {goodput.goodput:.1%} ({shown})"
        )
    lines += [f"suspect: node {node}: {why}" for node, why in status.suspects.items()]
    lines += skipped_lines(status.skipped_shards)
    lines += [f"excluded: host {host}: {why}" for host, why in status.excluded.items()]
    if len(incidents) > INCIDENTS_SHOWN:
        lines.append(
            f"{len(incidents)} incidents, the last {INCIDENTS_SHOWN} of them"
            " (`holdfast incidents` has all):"
        )
    lines += [f"incident {each.id}: {each.line}" for each in incidents[-INCIDENTS_SHOWN:]]
    return lines


def _headline(status: StatusReport) -> str:
    if status.exit_code is None:
        return f"job {status.job}: not ended properly"
    if status.exit_code == 0:
        return f"job {status.job} finished"
    advice = {
        EXIT_TRY_AGAIN: " (try again)",
        EXIT_DO_NOT_REQUEUE: " (do not requeue: it would fail again)",
    }.get(status.exit_code, "")
    return f"job {status.job} ended with exit code {status.exit_code}{advice}: {status.reason}"
