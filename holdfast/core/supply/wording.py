"""Says what is wanted of the platform and what has come, for reports."""

from __future__ import annotations

from collections import Counter

from holdfast.core.supply.events import SupplyMachine
from holdfast.core.supply.state import WantedNode
from holdfast.core.view import View
from holdfast.messages.reports import PositionReport, SupplyReport
from holdfast.messages.units import Time

SHOWN = 64
"""Positions that a report lists; those that are not filled come first."""


def report(supply: SupplyMachine, job: View, now: Time) -> SupplyReport | None:
    """Report on the platform; None if there is none."""
    if not supply.active:
        return None
    counts = Counter(p.status for p in supply.positions.values())
    ordered = sorted(supply.positions.values(), key=lambda p: (bool(p.node), p.number))
    return SupplyReport(
        platform=supply.platform,
        connected=supply.connected,
        wanted=supply.wanted(job),
        counts=dict(counts),
        positions=[_position(one, now) for one in ordered[:SHOWN]],
        given_up={str(number): why for number, why in supply.given_up.items()},
        cordoned=dict(supply.cordoned),
        refusal=supply.refusal or None,
        plans=supply.plans,
    )


def _position(one: WantedNode, now: Time) -> PositionReport:
    return PositionReport(
        position=one.number,
        request=one.request,
        status=one.status,
        for_s=round(max(0.0, now - one.since), 3),
        node=one.node or None,
        host=one.host or None,
        reason=one.reason,
        detail=one.detail or None,
        memory_mib=one.memory_mib or None,
    )
