"""What the parts of a repair took adds up to what was lost, whatever several clocks say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.report import lost_s, phases
from holdfast.messages.records import Incident
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

MOMENTS = st.floats(0.0, 100.0).map(Time)


@given(fault=MOMENTS, gone=st.none() | MOMENTS, marks=st.lists(MOMENTS, min_size=5, max_size=5))
def test_the_parts_are_the_whole(fault: Time, gone: Time | None, marks: list[Time]) -> None:
    incident = Incident(
        id=1,
        kind="exit",
        node=NodeId("n"),
        rank=Rank(0),
        round=RoundNumber(1),
        step=StepNumber(1),
        signature="",
        fault_at=fault,
        gone_at=gone,
        opened_at=marks[0],
        stopped_at=marks[1],
        frozen_at=marks[2],
        started_at=marks[3],
        back_at=marks[4],
        closed_at=marks[4],
    )
    parts = phases(incident)
    torn_down = [] if gone is None else ["teardown"]
    assert list(parts) == [*torn_down, "detect", "stop", "rendezvous", "start", "first_step"]
    assert min(parts.values()) >= 0.0
    assert sum(parts.values()) == pytest.approx(lost_s(incident), abs=1e-9)
