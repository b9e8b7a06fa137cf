"""The trace shows every second that the ledger booked, and every incident."""

from __future__ import annotations

from reported import an_incident

from holdfast.messages.reports import Booking
from holdfast.messages.units import Rank, RoundNumber, StepNumber, Time
from holdfast.view.trace import INCIDENTS, RANKS, trace

OPENED = Time(1000.0)


def booking(rank: int, cause: str, begin: float, end: float) -> Booking:
    where = (RoundNumber(1), StepNumber(7))
    return Booking(Rank(rank), cause, Time(OPENED + begin), Time(OPENED + end), *where)  # type: ignore[arg-type]


def test_each_booking_is_a_slice_on_its_ranks_track() -> None:
    drawn = trace("j", OPENED, [booking(1, "productive", 0.5, 2.0), booking(0, "wait", 0, 1)], [])
    slices = [event for event in drawn["traceEvents"] if event["ph"] == "X"]
    assert [(s["pid"], s["tid"], s["name"], s["ts"], s["dur"]) for s in slices] == [
        (RANKS, 1, "productive to step 7", 500_000, 1_500_000),
        (RANKS, 0, "wait", 0, 1_000_000),
    ]
    tracks = [e["args"]["name"] for e in drawn["traceEvents"] if e["name"] == "thread_name"]
    assert tracks == ["rank 0", "rank 1"]


def test_an_open_incident_lasts_as_far_as_its_repair_has_come() -> None:
    closed = an_incident(at=Time(1001.0), lost_s=3.0, phases={"detect": 1.0, "stop": 2.0})
    still = an_incident(id=2, at=Time(1002.0), lost_s=None, phases={"detect": 0.5})
    drawn = trace("j", OPENED, [], [closed, still])
    slices = [event for event in drawn["traceEvents"] if event["ph"] == "X"]
    assert [(s["pid"], s["ts"], s["dur"]) for s in slices] == [
        (INCIDENTS, 1_000_000, 3_000_000),
        (INCIDENTS, 2_000_000, 500_000),
    ]
