"""Which silence is a hang, who is named for it, and what comes of it for the job."""

from __future__ import annotations

from typing import Any

import pytest
from driver import Driver, encoded, kinds, revived
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.hangs import rules as hangs
from holdfast.core.hangs.rules import FORGIVE_S, Hang, Hangs
from holdfast.core.job import handle, validate
from holdfast.messages.actions import AnyAction, StartWorkers, StopWorkers
from holdfast.messages.events import Progress, RanksStalled, VerdictReached
from holdfast.messages.hangs import LINES, Paces, Stall, StallKind
from holdfast.messages.units import NodeId, Rank, RoundNumber, Time

NODE = NodeId("n")
LOAD, ITEM = 5 * LINES + 12, 5 * LINES + 40
"""Two lines of one function."""


def stall(rank: int, kind: StallKind, **more: Any) -> Stall:
    said = {"where": "forward", "for_s": 2.0, "limit_s": 1.6, **more}
    return Stall(rank=Rank(rank), kind=kind, **said)


def judged(*stalls: Stall, size: int) -> Hang | None:
    state = Hangs()
    found = hangs.stalled(state, NODE, stalls, size, Time(0))
    hangs.validate(state)
    return found


def named(*stalls: Stall, size: int) -> int | None:
    found = judged(*stalls, size=size)
    return None if found is None else found.stall.rank


# ---- the rules ---------------------------------------------------------------------------------


def test_a_stopped_rank_is_a_hang_whatever_the_others_do() -> None:
    assert named(stall(2, "stopped"), size=4) == 2


@pytest.mark.parametrize("kind", ["still", "gil"])
def test_a_rank_that_does_not_move_while_others_wait_is_a_hang(kind: StallKind) -> None:
    assert named(stall(0, "waits"), stall(2, kind), size=4) == 2


def test_ranks_that_all_wait_wait_for_something_that_will_not_come() -> None:
    all_wait = [stall(rank, "waits") for rank in range(3)]
    assert judged(*all_wait, size=3) is not None
    assert judged(*all_wait, size=4) is None, "one is still on its way"


def test_a_busy_rank_while_others_wait_is_no_hang_until_it_is_overdue() -> None:
    waiting = [stall(rank, "waits", overdue=True) for rank in (1, 2, 3)]
    assert named(stall(0, "busy"), *waiting, size=4) is None
    assert named(stall(0, "busy", overdue=True), *waiting, size=4) == 0


def test_ranks_that_wait_for_one_that_makes_progress_are_never_overdue() -> None:
    """Rank 0 evaluates for an hour, and every batch is a mark."""
    assert named(*[stall(rank, "waits", overdue=True) for rank in (1, 2, 3)], size=4) is None


@pytest.mark.parametrize("kind", ["still", "gil", "busy"])
def test_nobody_waits_is_no_hang_until_somebody_is_overdue(kind: StallKind) -> None:
    calm = [stall(rank, kind, place=LOAD) for rank in range(3)]
    assert named(*calm, size=3) is None
    assert named(*calm, stall(3, kind, place=LOAD, overdue=True), size=4) == 3


def test_no_rank_moves_and_they_are_not_in_one_place_is_a_hang() -> None:
    """On a GPU nobody can be seen to wait: `loss.item()` is a line like any other."""
    waiting = [stall(rank, "still", place=ITEM) for rank in (0, 1, 3)]
    assert named(*waiting, stall(2, "still", place=LOAD), size=4) == 2
    assert named(*waiting, stall(2, "gil"), size=4) == 2
    assert named(*waiting, size=4) is None, "one of them is not past its deadline"
    assert named(*waiting, stall(2, "busy"), size=4) is None


def test_one_that_goes_round_is_compared_by_its_function() -> None:
    function, other = 5 * LINES, 6 * LINES
    waiting = [stall(rank, "still", place=ITEM) for rank in (0, 1)]
    assert named(*waiting, stall(2, "still", place=function), size=3) is None
    assert named(*waiting, stall(2, "still", place=other), size=3) == 2
    assert named(*waiting, stall(2, "still", place=0), size=3) is None, "it is nowhere for long"


def test_of_two_places_the_one_with_fewer_ranks_is_suspected_then_who_stands_longest() -> None:
    few = stall(5, "still", place=LOAD)
    assert named(*[stall(r, "still", place=ITEM) for r in range(5)], few, size=6) == 5
    longer = stall(1, "still", place=LOAD, for_s=2.1)
    assert named(stall(0, "still", place=ITEM), longer, size=2) == 1


def test_stalls_of_several_nodes_are_seen_together() -> None:
    state = Hangs()
    waits = (stall(0, "waits"), stall(1, "waits"))
    assert hangs.stalled(state, NodeId("a"), waits, 4, Time(0)) is None
    found = hangs.stalled(state, NodeId("b"), (stall(3, "still"),), 4, Time(0))
    assert found is not None
    assert (found.node, found.stall.rank, found.standing) == (NodeId("b"), 3, 3)


def test_a_rank_that_moves_on_is_forgotten() -> None:
    state = Hangs()
    assert hangs.stalled(state, NodeId("a"), (stall(0, "still"),), 2, Time(0)) is None
    assert hangs.stalled(state, NodeId("a"), (), 2, Time(0)) is None
    assert hangs.stalled(state, NodeId("b"), (stall(1, "waits"),), 2, Time(0)) is None


KINDS: tuple[StallKind, ...] = ("stopped", "gil", "waits", "still", "busy")
stalls = st.lists(
    st.tuples(st.sampled_from(KINDS), st.booleans(), st.sampled_from((0, LOAD, ITEM))), max_size=6
)


@given(stalls, st.integers(0, 2))
def test_who_waits_is_never_named_while_somebody_else_might_be_the_reason(
    drawn: list[tuple[StallKind, bool, int]], others: int
) -> None:
    found = [
        stall(rank, kind, overdue=overdue, place=place)
        for rank, (kind, overdue, place) in enumerate(drawn)
    ]
    hang = judged(*found, size=len(found) + others)
    if hang is None:
        assert not any(each.kind == "stopped" for each in found)
        assert not any(each.overdue and each.kind != "waits" for each in found)
    elif hang.stall.kind == "waits":
        assert all(each.kind == "waits" for each in found)
        assert others == 0
    elif all(each.kind == "busy" for each in found):
        assert hang.stall.overdue


# ---- alarms ------------------------------------------------------------------------------------


def test_each_alarm_is_counted_for_where_it_was_and_forgotten_with_the_hours() -> None:
    state = Hangs()

    def alarm(at: float, where: str) -> int:
        both = (stall(0, "waits"), stall(1, "still", where=where))
        assert hangs.stalled(state, NODE, both, 2, Time(at)) is not None
        hangs.round_over(state)
        hangs.validate(state)
        return state.alarms[where]

    assert [alarm(0, "forward"), alarm(10, "forward"), alarm(20, "data")] == [1, 2, 1]
    assert alarm(10 + FORGIVE_S, "forward") == 2
    assert alarm(10 + 50 * FORGIVE_S, "forward") == 1


def test_a_rank_that_somebody_stopped_is_no_false_alarm() -> None:
    state = Hangs()
    assert hangs.stalled(state, NODE, (stall(1, "stopped"),), 2, Time(0)) is not None
    assert state.alarms == {}


# ---- the job -----------------------------------------------------------------------------------


class Watcher(Driver):
    """A job whose agents tell of ranks that stand still."""

    def stalled(self, node: str, *found: Stall, round: int | None = None) -> list[AnyAction]:
        number = self.round if round is None else RoundNumber(round)
        return self.take(RanksStalled(at=self.at, node=NodeId(node), round=number, stalls=found))

    def verdict(self, incident: int, *guilty: int, sentence: str = "rank 1 sleeps") -> None:
        ranks = tuple(map(Rank, guilty))
        self.take(VerdictReached(at=self.at, incident=incident, guilty=ranks, sentence=sentence))

    def hang(self, kind: StallKind = "still", **more: Any) -> list[AnyAction]:
        """Rank 1 hangs, the others wait."""
        self.stalled("b", stall(2, "waits"), stall(3, "waits"))
        return self.stalled("a", stall(0, "waits"), stall(1, kind, **more))


def two_nodes(step: int = 10) -> Watcher:
    job = Watcher(min_nodes=2, max_nodes=2)
    job.running("a", "b", step=step)
    return job


def test_a_hang_opens_an_incident_and_all_nodes_look_before_they_stop() -> None:
    job = two_nodes()
    actions = job.after(5).hang(where="data", for_s=2.0)
    stops = [action for action in actions if isinstance(action, StopWorkers)]
    assert {(s.node, s.grace_s, s.examine) for s in stops} == {("a", 0.0, 1), ("b", 0.0, 1)}
    (incident,) = job.job.incidents
    assert (incident.kind, incident.node, incident.rank, incident.step) == ("hang", "a", 1, 10)
    assert incident.signature == "hang in data: the rank does not move"
    assert incident.fault_at == job.now - 2.0


def test_those_who_wait_for_an_answer_are_left_waiting_until_they_were_looked_at() -> None:
    assert kinds(two_nodes().hang()) == ["StopWorkers", "StopWorkers", "Diagnose"]


def test_word_of_another_round_another_node_or_a_stranger_is_ignored() -> None:
    job = two_nodes()
    before = encoded(job.job)
    assert job.stalled("a", stall(0, "waits"), stall(1, "still"), round=0) == []
    assert job.stalled("a", stall(0, "waits"), stall(1, "still"), round=2) == []
    assert job.stalled("c", stall(0, "waits"), stall(1, "still")) == []
    assert encoded(job.job) == before
    assert job.stalled("a", stall(2, "stopped"), stall(77, "stopped")) == [], "ranks of another"


def test_word_that_waited_for_a_coordinator_that_was_gone_is_ignored() -> None:
    job = two_nodes()
    both = (stall(0, "waits"), stall(1, "still"))
    old = RanksStalled(at=job.at, node=NodeId("a"), round=job.round, stalls=both)
    job.after(60)
    assert job.take(old) == []
    assert kinds(job.stalled("a", *both)) == ["StopWorkers", "StopWorkers", "Diagnose"], (
        "it is told again"
    )


def test_a_hang_that_is_being_repaired_is_not_opened_twice() -> None:
    job = two_nodes()
    job.hang()
    assert job.hang() == []
    assert len(job.job.incidents) == 1


def test_ranks_that_have_finished_are_not_waited_for() -> None:
    job = two_nodes()
    for rank in (2, 3):
        job.exit(rank, step=10, code=0)
    assert kinds(job.stalled("a", stall(0, "waits"), stall(1, "waits"))) == [
        "StopWorkers",
        "StopWorkers",
        "Diagnose",
    ]
    assert job.job.incidents[0].rank is None, "nobody is to blame, as far as can be seen"


def test_a_rank_that_finishes_is_what_the_others_wait_for_when_that_is_told_again() -> None:
    job = two_nodes()
    for rank in (1, 2):
        job.exit(rank, step=10, code=0)
    both = (stall(0, "waits"),)
    job.stalled("b", stall(3, "waits"))
    assert kinds(job.stalled("a", *both)) == ["StopWorkers", "StopWorkers", "Diagnose"]


def test_the_verdict_names_who_it_was() -> None:
    job = two_nodes()
    job.hang()
    job.verdict(1, 3, sentence="rank 3 on b sleeps in train.py:5 (load)")
    incident = job.job.incidents[0]
    assert (incident.rank, incident.node) == (3, "b")
    assert incident.detail == "rank 3 on b sleeps in train.py:5 (load)"


@pytest.mark.parametrize("number", [-1, 0, 2, 99])
def test_a_verdict_on_no_incident_changes_nothing(number: int) -> None:
    job = two_nodes()
    job.hang()
    before = encoded(job.job)
    job.verdict(number, 3)
    assert encoded(job.job) == before


def test_a_verdict_that_comes_late_does_not_touch_the_new_round() -> None:
    job = two_nodes()
    job.hang()
    job.all_ready()
    job.after(1).start_all()
    job.after(1).step_all(11, steps=1)
    job.verdict(1, 1, sentence="late")
    assert job.job.incidents[0].detail == "late"
    assert job.job.state.name == "running"


def test_a_verdict_does_not_hide_a_death_that_was_the_cause() -> None:
    job = two_nodes()
    job.after(5).hang(for_s=1.0)
    job.exit(2, step=10, signal=11, at=Time(job.now - 3))
    job.verdict(1, 1, sentence="rank 1 waits")
    (incident,) = job.job.incidents
    assert (incident.kind, incident.rank) == ("signal", 2)
    assert incident.detail != "rank 1 waits"


def test_what_was_learnt_goes_to_every_node_of_the_next_round() -> None:
    job = two_nodes()
    paces = Paces(0.02, {"forward": 0.5, "first step": 3.0})
    progress = (job.progress(0, 11),)
    job.take(Progress(at=job.at, node=NodeId("a"), round=job.round, ranks=progress, paces=paces))
    job.hang(where="forward")
    starts = [action for action in job.all_ready() if isinstance(action, StartWorkers)]
    assert len(starts) == 2
    for start in starts:
        assert start.part.paces == paces
        assert start.part.alarms == {"forward": 1}


def test_a_longest_time_shrinks_slowly_when_things_become_faster() -> None:
    state = Hangs()
    for longest_s in (10.0, 1.0, 1.0):
        hangs.note_paces(state, NODE, Paces(None, {"data": longest_s}))
    assert hangs.paces(state).longest_s["data"] == pytest.approx(8.1)


def test_the_median_node_says_how_long_a_step_takes() -> None:
    state = Hangs()
    assert hangs.paces(state) == Paces()
    for number, step_s in enumerate((0.1, 9.0, 0.2)):
        hangs.note_paces(state, NodeId(str(number)), Paces(step_s))
    assert hangs.paces(state).step_s == 0.2


def test_stalls_survive_the_journal() -> None:
    job = two_nodes()
    job.stalled("a", stall(0, "waits", place=LOAD), stall(1, "waits"))
    again = revived(job.job)
    validate(again)
    told = RanksStalled(
        at=job.at,
        node=NodeId("b"),
        round=job.round,
        stalls=(stall(2, "waits"), stall(3, "waits")),
    )
    assert kinds(handle(again, told, job.at)) == ["StopWorkers", "StopWorkers", "Diagnose"]


# ---- the same hang again -----------------------------------------------------------------------


def again_and_again(job: Watcher, at_most: int, step: int | None = None, **how: Any) -> int:
    """Let it hang until the job gives up; how often it hung. `step`: training gets on each time."""
    for times in range(1, at_most + 1):
        job.after(5).hang(**how)
        job.all_ready()
        if job.job.result is not None:
            return times
        job.after(1).start_all()
        reached = 10 if step is None else 10 + times * step
        job.after(1).step_all(reached, steps=reached)
    return at_most


def test_a_rank_that_may_only_be_slow_is_tried_often_and_then_the_job_ends() -> None:
    job = two_nodes()
    assert again_and_again(job, 20) == 5
    assert job.job.result is not None
    assert job.job.result.code == 93
    assert "at step 10, 5 times in a row" in job.job.result.reason


def test_hangs_at_the_same_step_are_the_same_however_the_ranks_stood() -> None:
    job = two_nodes()
    ways: list[StallKind] = ["still", "gil", "still", "gil", "still"]
    for kind in ways:
        assert job.job.result is None
        again_and_again(job, 1, kind=kind)
    assert job.job.result is not None


def test_ranks_that_wait_for_each_other_again_and_again_end_the_job_sooner() -> None:
    job = two_nodes()
    assert again_and_again(job, 20, kind="waits") == 3


def test_a_job_that_advances_goes_on_however_often_it_hangs() -> None:
    job = two_nodes()
    assert again_and_again(job, 40, step=1) == 40
    assert job.job.result is None


def test_a_rank_that_somebody_stops_again_and_again_says_nothing_about_the_script() -> None:
    job = two_nodes()
    assert again_and_again(job, 40, kind="stopped") == 40
    assert job.job.result is None


def test_the_reason_for_giving_up_is_the_verdict() -> None:
    job = two_nodes()
    again_and_again(job, 4)
    job.after(5).hang()
    job.verdict(len(job.job.incidents), 1, sentence="rank 1 on a sleeps in train.py:5 (load)")
    job.all_ready()
    assert job.job.result is not None
    assert job.job.result.reason.startswith("rank 1 on a sleeps in train.py:5 (load) at step 10")
