"""The job's incidents: how one opens, learns more about itself, and closes."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.decisions import Note
from holdfast.core.faults import Fault, subject
from holdfast.messages.records import Incident
from holdfast.messages.units import CauseId, Time

QUIET = frozenset(
    {
        *("storage", "data", "straggler", "overload", "unfit", "suspect", "ending", "supply"),
        "internal",
    }
)
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
        gone_at=fault.gone_at,
        opened_at=now,
        also=[fault.victim] if fault.victim else [],
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
    told = other.victim or f"{subject(other)} {other.signature}"
    if len(incident.also) < ALSO_AT_MOST and told not in incident.also:
        incident.also.append(told)


def validate(incidents: Sequence[Incident]) -> None:
    assert [i.id for i in incidents] == list(range(1, len(incidents) + 1))
    assert sum(i.closed_at is None for i in incidents) <= 1, "two incidents are open"
