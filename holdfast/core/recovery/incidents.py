"""The job's incidents: how one opens, learns more about itself, and closes."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.decisions import Note
from holdfast.core.faults import Fault, subject
from holdfast.messages.records import Incident
from holdfast.messages.units import CauseId, Time

QUIET = frozenset({"storage", "straggler", "overload", "unfit", "internal"})
"""Kinds of incident that break no round."""
ALSO_AT_MOST = 100
"""Consequential deaths listed with an incident: there can be one for each of 80,000 ranks."""


def opened(number: int, fault: Fault, cause: CauseId, now: Time) -> Incident:
    return Incident(
        id=number,
        kind=fault.kind,
        node=fault.node,
        rank=fault.rank,
        round=fault.round,
        step=fault.step,
        signature=fault.signature,
        detail=fault.detail,
        cause=cause,
        fault_at=min(fault.at, now),
        opened_at=now,
    )


def noted(number: int, note: Note, cause: CauseId, now: Time) -> Incident:
    """Make an incident that breaks no round: it is closed at once."""
    return Incident(
        id=number,
        kind=note.kind,
        node=note.node,
        rank=note.rank,
        round=note.round,
        step=note.step,
        signature=note.signature,
        action=note.action,
        detail=note.detail,
        cause=cause,
        fault_at=now,
        opened_at=now,
        closed_at=now,
    )


def mention(incident: Incident, other: Fault) -> None:
    """List a death that was not the cause."""
    if len(incident.also) < ALSO_AT_MOST:
        incident.also.append(f"{subject(other)} {other.signature}")


def last_fault(incidents: Sequence[Incident]) -> Incident | None:
    """Find the newest incident that broke a round."""
    return next((i for i in reversed(incidents) if i.kind not in QUIET), None)


def validate(incidents: Sequence[Incident]) -> None:
    assert [i.id for i in incidents] == list(range(1, len(incidents) + 1))
    assert sum(i.closed_at is None for i in incidents) <= 1, "two incidents are open"
