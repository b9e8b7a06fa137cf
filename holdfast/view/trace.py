"""Draws a job in the trace format that Perfetto and chrome://tracing open.

The first track holds the incidents; below it each rank has a track with one slice per booking of the
ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.messages.reports import Booking, IncidentReport
from holdfast.messages.units import Seconds, Time

INCIDENTS = 0
RANKS = 1
"""Process ids of the two groups of tracks."""


def trace(
    job: str, opened_at: Time, bookings: Sequence[Booking], incidents: Sequence[IncidentReport]
) -> dict[str, Any]:
    """Build the trace; times in it count from `opened_at`."""
    events = [
        _label("process_name", INCIDENTS, 0, f"job {job}"),
        _label("process_name", RANKS, 0, "ranks"),
        *(_label("thread_name", RANKS, r, f"rank {r}") for r in sorted({b.rank for b in bookings})),
    ]
    for each in bookings:
        steps = each.cause in ("productive", "redo")
        name = f"{each.cause} to step {each.step}" if steps else each.cause
        where = {"round": each.round, "step": each.step}
        begin_s, took_s = each.begin - opened_at, each.end - each.begin
        events.append(_slice(RANKS, each.rank, name, each.cause, begin_s, took_s, where))
    for incident in incidents:
        name = f"incident {incident.id}: {incident.signature}"
        begin_s = incident.at - opened_at
        took_s = sum(incident.phases.values()) if incident.lost_s is None else incident.lost_s
        told = {"line": incident.line, "also": incident.also}
        events.append(_slice(INCIDENTS, 0, name, "incident", begin_s, took_s, told))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(
    pid: int,
    tid: int,
    name: str,
    category: str,
    begin_s: float,
    took_s: Seconds,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": category,
        "ts": round(begin_s * 1e6),
        "dur": max(1, round(took_s * 1e6)),
        "args": arguments,
    }


def _label(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
