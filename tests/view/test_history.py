"""What a viewer remembers is what the ledger booked: exact while small, and never a second off."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import home_with, simulated

from holdfast.coordinator.journal import replay_spans
from holdfast.core.ledger.books import Account, Ledger
from holdfast.messages.reports import Booking
from holdfast.messages.units import Rank, RoundNumber, StepNumber, Time
from holdfast.view.follower import Follower
from holdfast.view.history import timeline as timelines
from holdfast.view.history.grid import CauseGrid
from holdfast.view.history.lanes import (
    AWAY,
    CAUSE_NAMES,
    LAST_STEP,
    Lane,
    LaneSpan,
    coarse,
)
from holdfast.view.history.series import Series
from holdfast.view.history.timeline import RankBlock, Timeline

pieces = st.lists(
    st.tuples(st.floats(0.001, 1000.0), st.integers(0, len(CAUSE_NAMES) - 1)),
    min_size=1,
    max_size=300,
)


def seconds_of(spans: list[LaneSpan]) -> dict[int, float]:
    found: dict[int, float] = defaultdict(float)
    for span in spans:
        for cause, seconds in span.parts.items():
            found[cause] += seconds
    return found


def fill(lane: Lane, given: list[tuple[float, int]], most: int | None = None) -> float:
    at = lane.begin
    for length, cause in given:
        lane.add(at, at + length, cause)
        at += length
        if most is not None and len(lane) > most:
            lane.consolidate()
    return at


@given(pieces)
def test_a_lane_is_exact_while_it_is_short(given_pieces: list[tuple[float, int]]) -> None:
    lane = Lane(100.0)
    end = fill(lane, given_pieces)
    at, expected = 100.0, []
    for length, cause in given_pieces:
        if expected and expected[-1][2] == cause:
            expected[-1] = (expected[-1][0], at + length, cause)
        else:
            expected.append((at, at + length, cause))
        at += length
    got = [(s.begin, s.end, *s.parts) for s in lane.between(0.0, end + 1)]
    assert got == expected


@given(pieces, st.integers(16, 40))
def test_a_long_lane_is_bounded_and_loses_no_second(
    given_pieces: list[tuple[float, int]], most: int
) -> None:
    lane = Lane(0.0)
    end = fill(lane, given_pieces, most)
    spans = list(lane.between(0.0, end))
    assert len(spans) <= most
    assert all(a.end == b.begin for a, b in pairwise(spans))
    expected: dict[int, float] = defaultdict(float)
    for length, cause in given_pieces:
        expected[cause] += length
    got = seconds_of(spans)
    for cause in range(len(CAUSE_NAMES)):
        assert got[cause] == pytest.approx(expected[cause], rel=1e-5, abs=1e-4)
    newest, length = given_pieces[-1][1], given_pieces[-1][0]
    assert spans[-1].parts.keys() == {newest}, "what is new is exact"
    assert spans[-1].end - spans[-1].begin >= length - 1e-6


@given(pieces, st.floats(0.5, 500.0))
def test_coarse_spans_are_few_and_keep_every_second(
    given_pieces: list[tuple[float, int]], width: float
) -> None:
    lane = Lane(0.0)
    end = fill(lane, given_pieces)
    exact = list(lane.between(0.0, end))
    merged = list(coarse(exact, width))
    assert len(merged) <= 2 * end / width + 2
    exact_s, merged_s = seconds_of(exact), seconds_of(merged)
    for cause in exact_s:
        assert merged_s[cause] == pytest.approx(exact_s[cause], rel=1e-9, abs=1e-9)


def test_a_rank_that_was_away_has_a_gap() -> None:
    lane = Lane(0.0)
    lane.add(0.0, 1.0, 0)
    lane.add(5.0, 6.0, 0)
    assert [list(s.parts) for s in lane.between(0.0, 6.0)] == [[0], [AWAY], [0]]


@given(
    st.lists(
        st.tuples(st.floats(0.0, 5000.0), st.floats(0.001, 3000.0), st.integers(0, 3)), max_size=40
    ),
    st.floats(0.0, 2000.0),
    st.floats(10.0, 4000.0),
    st.integers(1, 20),
)
@settings(max_examples=200)
def test_a_grid_holds_all_seconds_where_they_were(
    spans: list[tuple[float, float, int]], since: float, length: float, count: int
) -> None:
    grid = CauseGrid(0.0, 64)
    expected: dict[int, float] = defaultdict(float)
    for begin, took, cause in spans:
        grid.add(begin, begin + took, cause)
        expected[cause] += took
    for cause, row in grid.seconds().items():
        assert sum(row) == pytest.approx(expected[cause], rel=1e-9, abs=1e-6)
    parts = grid.between(since, since + length, count)
    step = length / count
    for number, part in enumerate(parts):
        begin, end = since + number * step, since + (number + 1) * step
        for cause in range(4):
            outer = sum(
                _overlap(b, b + took, begin - grid.width, end + grid.width)
                for b, took, c in spans
                if c == cause
            )
            assert part.get(cause, 0.0) <= outer + 1e-6


def _overlap(begin: float, end: float, since: float, until: float) -> float:
    return max(0.0, min(end, until) - max(begin, since))


def test_a_series_is_bounded_and_spans_all_time() -> None:
    series: Series[int] = Series(most=64, every_s=1.0)
    for at in range(10_000):
        series.add(float(at), at)
    points = series.points()
    assert 32 <= len(points) <= 66
    assert points[0] == (0.0, 0)
    assert points[-1] == (9_999.0, 9_999)
    assert series.newest == (9_999.0, 9_999)


# ---- a whole job ----


def test_the_timeline_of_a_small_job_is_every_booking() -> None:
    home = home_with(simulated())
    follower = Follower.open(home)
    _, bookings = replay_spans(home.journal)
    timeline = follower.history.timeline
    now = follower.now
    for rank in range(timeline.ranks):
        expected: list[list[object]] = []
        for each in (b for b in bookings if b.rank == rank):
            if expected and expected[-1][2] == each.cause and expected[-1][1] == each.begin:
                expected[-1][1] = each.end
            else:
                expected.append([each.begin, each.end, each.cause])
        (lane,) = timeline.lanes(
            follower.job.opened_at, now, 1 << 20, [RankBlock("r", rank, 1)], now
        )
        booked = [[s.begin, s.end, *s.shares] for s in lane.spans]
        assert booked[: len(expected)] == expected
        assert len(booked) <= len(expected) + 1, "and what is not booked yet"
    follower.close()


def test_the_goodput_over_time_adds_up_to_the_ledger() -> None:
    follower = Follower.open(home_with(simulated()))
    now, report = follower.now, follower.goodput()
    end = follower.job.opened_at + report.wall_s
    parts = follower.history.timeline.seconds(follower.job.opened_at, end, 50, end)
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for cause, seconds in part.items():
            total[cause] += seconds
    for cause, seconds in report.seconds.items():
        assert total[cause] == pytest.approx(seconds, rel=1e-6, abs=1e-3), cause
    assert now >= end
    follower.close()


def test_ranks_of_a_large_job_are_answered_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST_SPANS", 400 * 64)
    timeline = Timeline.begun(0.0, {})
    for rank in range(400):
        timeline.take(booked(rank, at, at + 1.0, "productive") for at in range(100))
        timeline.take([booked(rank, 100.0, 150.0, "stop"), booked(rank, 150.0, 200.0, "init")])
    blocks = [RankBlock(f"rank {rank}", rank, 1) for rank in range(400)]
    lanes = timeline.lanes(0.0, 200.0, 100, blocks, 200.0)
    assert sum(lane.ranks for lane in lanes) == 400
    assert len(lanes) <= timelines.GROUPS
    for lane in lanes:
        shown: dict[str, float] = defaultdict(float)
        for span in lane.spans:
            for cause, share in span.shares.items():
                shown[cause] += share * (span.end - span.begin)
        assert shown == pytest.approx({"productive": 100.0, "stop": 50.0, "init": 50.0}, abs=1.0)


def test_what_is_not_booked_yet_counts_until_now() -> None:
    accounts = {Rank(0): Account(Time(0.0), Time(0.0), "start")}
    timeline = Timeline.begun(0.0, accounts)
    assert timeline.ranks == 1
    assert timeline.seconds(0.0, 8.0, 2, 8.0) == [{"start": 4.0}, {"start": 4.0}]
    (lane,) = timeline.lanes(0.0, 8.0, 10, [RankBlock("rank 0", 0, 1)], 8.0)
    assert [tuple(span) for span in lane.spans] == [(0.0, 8.0, {"start": 1.0}, 0)]


def booked(rank: int, begin: float, end: float, cause: str) -> Booking:
    return Booking(
        Rank(rank),
        cause,
        Time(begin),
        Time(end),
        RoundNumber(1),
        StepNumber(1),  # type: ignore[arg-type]
    )


def test_every_incident_has_the_story_that_a_replay_tells() -> None:
    from holdfast.coordinator.journal import replay_story
    from holdfast.core.story import Recorder

    home, recorder = home_with(simulated()), Recorder()
    snapshot = replay_story(home.journal, recorder)
    assert snapshot is not None
    follower = Follower.open(home)
    assert follower.job.incidents
    for incident in follower.job.incidents:
        story = follower.history.stories.of(incident.id)
        assert story is not None
        expected = recorder.story(snapshot.job, incident.id)
        if not story.left_out:
            assert story.steps(incident) == expected
        else:
            assert len(story.steps(incident)) + sum(story.left_out.values()) == len(expected)
    follower.close()


def test_saves_are_remembered_with_their_tiers() -> None:
    follower = Follower.open(home_with(simulated()))
    saves = follower.history.checkpoints.saves()
    tiers = [tier for save in saves for tier in save.tiers]
    assert {"memory", "storage"} <= set(tiers)
    assert any(tier.verified for save in saves for tier in save.tiers.values())
    assert follower.history.rounds[-1][1] == follower.job.membership.round
    assert follower.history.speed.points()
    assert follower.job.of(Ledger).spans == []
    follower.close()


def test_a_span_knows_the_step_that_was_finished_when_it_began() -> None:
    lane = Lane(0.0)
    for index in range(100):
        lane.add(2.0 * index, 2.0 * index + 1, 0, 10 * index)
        lane.add(2.0 * index + 1, 2.0 * index + 2, 1, 10 * index + 10)
    exact = {span.begin: span.step for span in lane.between(0.0, 200.0)}
    assert exact[4.0] == 20
    assert exact[5.0] == 30
    lane.consolidate()
    assert all(span.step == exact[span.begin] for span in lane.between(0.0, 200.0))


def test_a_step_beyond_what_a_lane_can_hold_stays_at_its_highest() -> None:
    lane = Lane(0.0)
    lane.add(0.0, 1.0, 0, LAST_STEP + 5)
    assert [span.step for span in lane.between(0.0, 1.0)] == [LAST_STEP]
