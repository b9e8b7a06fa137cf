"""Decides which incidents are worth a notice now, so that a storm of them is not one of messages.

An incident is told when it is over, since most are repaired before a person could read of them; one
that is still open after OPEN_S is told as it is, and once more when it is over. The first few are told
at once. After that a notice goes out once in PACE_S at most, and holds all that has happened since.

What a target was told is data, which changes when a notice was delivered and not before: whoever is
killed while one is on its way tells it again. Time is given; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from holdfast.messages.reports import IncidentReport
from holdfast.messages.units import Seconds, Time

BURST = 3
PACE_S: Seconds = 60.0
OPEN_S: Seconds = 30.0


class NoticesTold(Struct, frozen=True):
    """What one target was told, which outlives the process that sends notices."""

    through: int = 0
    """All incidents up to this number, but for those below."""
    open: tuple[int, ...] = ()
    """Those that were told while they were open, or were passed over."""
    ended_run: int = 0
    """The run whose end was told: 1 for the first, and one more after each requeue; 0 for none."""
    undelivered: int = 0
    """Notices in a row that the target refused for good."""
    allowance: float = float(BURST)
    """How many notices may go out at once."""
    at: Time = Time(0.0)
    """The time of that allowance."""


def untold(
    told: NoticesTold, incidents: Sequence[IncidentReport], now: Time, all: bool = False
) -> list[IncidentReport]:
    """Return the incidents that are worth telling and were not told; with `all`, open ones too."""
    return [
        one
        for one in incidents
        if (one.id > told.through and (all or _is_over(one) or now - one.at >= OPEN_S))
        or (one.id in told.open and _is_over(one))
    ]


def due(told: NoticesTold, incidents: Sequence[IncidentReport], now: Time) -> list[IncidentReport]:
    """Return the incidents to tell now; none while others are told too often already."""
    return untold(told, incidents, now) if _allowed(told, now) >= 1 else []


def next_at(told: NoticesTold, incidents: Sequence[IncidentReport], now: Time) -> Time | None:
    """Return when there will be something to tell if nothing happens until then."""
    open = [one.at + OPEN_S for one in incidents if one.id > told.through]
    waits = [now + (1 - _allowed(told, now)) * PACE_S] if untold(told, incidents, now) else []
    return min((Time(at) for at in (*open, *waits) if at > now), default=None)


def after(
    told: NoticesTold, new: Sequence[IncidentReport], incidents: Sequence[IncidentReport], now: Time
) -> NoticesTold:
    """Return what a target was told once it has a notice of the new ones of these incidents."""
    ids = {one.id for one in new}
    through = max([told.through, *ids])
    # An incident that is open and was passed over is told when it is over.
    passed = [one.id for one in incidents if told.through < one.id < through and one.id not in ids]
    still_open = [one.id for one in new if not _is_over(one)]
    kept = [id for id in told.open if id not in ids]
    return replace(
        told,
        through=through,
        open=tuple(sorted({*kept, *passed, *still_open})),
        allowance=_allowed(told, now) - 1,
        at=now,
    )


def _allowed(told: NoticesTold, now: Time) -> float:
    return min(float(BURST), told.allowance + max(0.0, now - told.at) / PACE_S)


def _is_over(incident: IncidentReport) -> bool:
    return incident.lost_s is not None
