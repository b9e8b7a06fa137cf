"""Writes notices: what is posted to a webhook, or given to a command.

A notice is one JSON object. Its `text` is all that Slack, Mattermost and their like show of it; the
other keys are for programs. Keys are added, never renamed or removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_TRY_AGAIN
from holdfast.messages.reports import GoodputReport, IncidentReport, StatusReport
from holdfast.messages.units import Seconds, Time
from holdfast.view.wording import duration, percent, plain

NoticeKind = Literal["incident", "incidents", "finished", "failed", "lost"]
"""One incident; a digest of several; the end of the job, in order or not; a job that nobody runs."""
LINES_SHOWN = 10


class NoticeIncident(Struct, frozen=True, kw_only=True):
    """An incident as a notice tells it."""

    id: int
    kind: str
    node: str
    rank: int | None
    at: Time
    lost_s: Seconds | None
    lost_steps: int
    open: bool
    """Whether it is being repaired still."""
    line: str


class Notice(Struct, frozen=True, kw_only=True):
    """What there is to tell about a job."""

    text: str
    """All of it for people, in a few lines."""
    kind: NoticeKind
    job: str
    host: str
    """Machine that hosts the job's coordinator."""
    at: Time
    state: str
    round: int
    step: int
    goodput: float
    wall_s: Seconds
    incidents: list[NoticeIncident]
    """Those that no notice has told yet; the newest ones of many."""
    incidents_new: int
    """How many these are."""
    incidents_total: int
    exit_code: int | None = None
    reason: str | None = None
    undelivered: int = 0
    """Earlier notices that could not be delivered to this target."""


@dataclass(frozen=True)
class JobSeen:
    """A job at the moment of a notice."""

    status: StatusReport
    goodput: GoodputReport
    incidents: Sequence[IncidentReport]
    host: str
    at: Time


def of_incidents(seen: JobSeen, new: Sequence[IncidentReport], undelivered: int = 0) -> Notice:
    """Tell of incidents: one by one, or of several in a digest."""
    job = f"job {seen.status.job}"
    if len(new) == 1:
        return _notice("incident", f"{job}: {plain(new[0].line)}", seen, new, undelivered)
    text = "\n".join([f"{job}: {len(new)} incidents", *_listed(new)])
    return _notice("incidents", text, seen, new, undelivered)


def of_the_end(seen: JobSeen, new: Sequence[IncidentReport], undelivered: int = 0) -> Notice:
    """Tell of the end of a job, with incidents that were not told yet."""
    status, total = seen.status, len(seen.incidents)
    kind, ended = _end(status)
    lines = [
        f"job {status.job} {ended}: {status.step:,} steps in {duration(status.wall_s)}, "
        f"goodput {percent(seen.goodput.goodput)}, {_counted(total)}",
        *_listed(new),
    ]
    return _notice(kind, "\n".join(lines), seen, new, undelivered)


def _end(status: StatusReport) -> tuple[NoticeKind, str]:
    if status.exit_code is None:
        return "lost", "is lost (nobody runs it, and it has not ended)"
    if status.exit_code == 0:
        return "finished", "finished"
    advice = {
        EXIT_TRY_AGAIN: ", try again",
        EXIT_DO_NOT_REQUEUE: ", do not requeue: it would fail again",
    }.get(status.exit_code, "")
    return "failed", f"gave up (exit code {status.exit_code}{advice}): {plain(status.reason or '')}"


def _counted(incidents: int) -> str:
    return "no incidents" if not incidents else f"{incidents} incident{'s' * (incidents > 1)}"


def _listed(new: Sequence[IncidentReport]) -> list[str]:
    more = len(new) - LINES_SHOWN
    earlier = [f"... {more} more before these"] if more > 0 else []
    return [*earlier, *(f"{one.id}. {plain(one.line)}" for one in new[-LINES_SHOWN:])]


def _notice(
    kind: NoticeKind, text: str, seen: JobSeen, new: Sequence[IncidentReport], undelivered: int
) -> Notice:
    status = seen.status
    return Notice(
        text=text,
        kind=kind,
        job=status.job,
        host=seen.host,
        at=seen.at,
        state=status.state,
        round=status.round,
        step=status.step,
        goodput=seen.goodput.goodput,
        wall_s=status.wall_s,
        incidents=[_short(one) for one in new[-LINES_SHOWN:]],
        incidents_new=len(new),
        incidents_total=len(seen.incidents),
        exit_code=status.exit_code,
        reason=status.reason,
        undelivered=undelivered,
    )


def _short(one: IncidentReport) -> NoticeIncident:
    return NoticeIncident(
        id=one.id,
        kind=one.kind,
        node=one.node,
        rank=one.rank,
        at=one.at,
        lost_s=one.lost_s,
        lost_steps=one.lost_steps,
        open=one.lost_s is None,
        line=plain(one.line),
    )
