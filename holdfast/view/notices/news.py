"""Decides which incidents are worth a notice now, so that a storm of them is not one of messages.

An incident is told when it is over, since most are repaired before a person could read of them; one
that is still open after OPEN_S is told as it is, and once more when it is over. The first few are told
at once. After that a notice goes out once in PACE_S at most, and holds all that has happened since.
Time is given; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from holdfast.messages.reports import IncidentReport
from holdfast.messages.units import Seconds, Time

BURST = 3
PACE_S: Seconds = 60.0
OPEN_S: Seconds = 30.0


class NoticesTold(Struct):
    """What notices have told, which outlives the process that sends them."""

    through: int = 0
    """All incidents up to this number, but for those below."""
    open: list[int] = []
    """Those that were told while they were open."""


class IncidentNews:
    """The incidents of a job that are still to be told."""

    def __init__(self, told: NoticesTold) -> None:
        self.told = told
        self._allowance = float(BURST)
        self._at: Time | None = None

    def due(self, incidents: Sequence[IncidentReport], now: Time) -> list[IncidentReport]:
        """Return the incidents to tell now; none while others are told too often already."""
        new = self.untold(incidents, now)
        if not new or not self._may_tell(now):
            return []
        self._allowance -= 1
        return new

    def untold(
        self, incidents: Sequence[IncidentReport], now: Time, all: bool = False
    ) -> list[IncidentReport]:
        """Return the incidents that are worth telling and were not told; with `all`, open ones too."""
        return [
            one
            for one in incidents
            if (one.id > self.told.through and (all or _is_over(one) or now - one.at >= OPEN_S))
            or (one.id in self.told.open and _is_over(one))
        ]

    def next_at(self, incidents: Sequence[IncidentReport], now: Time) -> Time | None:
        """Return when there will be something to tell if nothing happens until then."""
        open = [one.at + OPEN_S for one in incidents if one.id > self.told.through]
        waits = (
            [Time(now + (1 - self._allowed(now)) * PACE_S)] if self.untold(incidents, now) else []
        )
        later = [Time(at) for at in (*open, *waits) if at > now]
        return min(later, default=None)

    def tell(self, told: Sequence[IncidentReport], incidents: Sequence[IncidentReport]) -> None:
        """Note that these were told."""
        ids = {one.id for one in told}
        skipped = [one.id for one in incidents if one.id > self.told.through and one.id not in ids]
        through = max([self.told.through, *ids], default=0)
        # An incident that is open and was passed over is told when it is over.
        passed = [id for id in skipped if id < through]
        still_open = [one.id for one in told if not _is_over(one)]
        kept = [id for id in self.told.open if id not in ids]
        self.told = NoticesTold(through=through, open=sorted({*kept, *passed, *still_open}))

    def _may_tell(self, now: Time) -> bool:
        self._allowance, self._at = self._allowed(now), now
        return self._allowance >= 1

    def _allowed(self, now: Time) -> float:
        since = 0.0 if self._at is None else max(0.0, now - self._at)
        return min(float(BURST), self._allowance + since / PACE_S)


def _is_over(incident: IncidentReport) -> bool:
    return incident.lost_s is not None
