"""Writes numbers as people read them, and the few sentences of a report."""

from __future__ import annotations

import time

from holdfast.messages.records import Cause
from holdfast.view.report.facts import JobReport
from holdfast.view.wording import percent


def duration(seconds: float) -> str:
    """Write a time span with two units at most."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24:,} d {hours % 24} h"


def moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at)).strip()


def clock(at: float, span_s: float) -> str:
    """Write a time on an axis."""
    layout = "%H:%M:%S" if span_s < 1800 else "%H:%M" if span_s < 2 * 86400 else "%m-%d %H:%M"
    return time.strftime(layout, time.localtime(at))


def count(number: float) -> str:
    return f"{number:,.0f}"


def short(number: float) -> str:
    """Write a number in a few characters."""
    if number < 1e5:
        return f"{number:,.0f}"
    for unit, each in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if number < 1000 * each:
            return f"{number / each:.1f} {unit}"
    return f"{number / 1e12:,.1f} T"


def speed(per_s: float | None) -> str:
    if per_s is None:
        return "–"
    if per_s >= 1000:
        return f"{per_s:,.0f}"
    return f"{per_s:.1f}" if per_s >= 10 else f"{per_s:.2f}"


def size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size_bytes < 1000 or unit == "TB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    raise AssertionError


def outcome(report: JobReport) -> tuple[str, str]:
    """Return how the job stands: a class ("good", "bad", "live") and a word."""
    status = report.status
    if status.state == "lost":
        return "bad", "lost"
    if status.exit_code is None:
        return "live", status.state
    return ("good", "finished") if status.exit_code == 0 else ("bad", "failed")


def headline(report: JobReport) -> str:
    """Tell the job in a sentence or two."""
    status, goodput = report.status, report.goodput
    ranks = f"{round(goodput.ranks, 1):g} ranks"
    told = (
        f"{count(status.step)} steps in {duration(status.wall_s)} on {ranks};"
        f" {percent(goodput.goodput)} of the time were steps finished for the first time."
    )
    if report.repaired:
        median = duration(report.recovery_s or 0.0)
        slowest = duration(report.slowest_recovery_s or 0.0)
        times = "time" if report.repaired == 1 else "times"
        told += f" Training was interrupted {report.repaired} {times}"
        told += f" and back within {slowest}."
        if report.repaired > 1:
            told = told[:-1] + f" at most, {median} as a rule."
    elif report.incident_count == 0:
        told += " There was no fault."
    if status.state == "lost":
        told += " No process runs it any more, though it has not ended."
    return told


def lost_s(report: JobReport) -> float:
    """Return the rank-seconds that faults cost."""
    causes: tuple[Cause, ...] = ("redo", "detect", "stop", "rendezvous", "restore")
    return sum(report.goodput.seconds.get(cause, 0.0) for cause in causes)
