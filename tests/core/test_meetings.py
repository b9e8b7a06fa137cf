"""Barriers and votes: who is waited for, who is told what, and what ends with the round."""

from __future__ import annotations

from typing import Any

import pytest
from driver import encoded, raised, replayed, revived
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_store import Askers, answers, put, wait

from holdfast.core import job as jobs
from holdfast.core.requests import barriers as meetings
from holdfast.core.requests.barriers import Attendance, Meetings
from holdfast.messages.requests import (
    MAX_LISTED,
    AnyRequest,
    CastVote,
    Denied,
    Granted,
    JoinBarrier,
    Tally,
)
from holdfast.messages.units import Rank


def barrier(name: str = "here", timeout_s: float | None = None) -> JoinBarrier:
    return JoinBarrier(name=name, timeout_s=timeout_s)


def vote(ballot: bool | int | str, name: str = "go", timeout_s: float | None = None) -> CastVote:
    return CastVote(name=name, ballot=ballot, timeout_s=timeout_s)


@pytest.fixture
def job() -> Askers:
    """Three ranks on one node."""
    driver = Askers()
    driver.running("a", slots=3, step=4)
    return driver


def test_a_barrier_opens_when_the_last_rank_comes(job: Askers) -> None:
    assert job.ask(0, barrier()) == []
    assert job.ask(2, barrier()) == []
    assert answers(job.ask(1, barrier())) == {0: Granted(), 1: Granted(), 2: Granted()}


def test_a_name_can_be_used_again_at_once(job: Askers) -> None:
    for number in (1, 2, 3):
        assert job.ask(0, barrier(), number) == []
        assert job.ask(1, barrier(), number) == []
        assert set(answers(job.ask(2, barrier(), number))) == {0, 1, 2}


def test_names_and_kinds_do_not_mix(job: Askers) -> None:
    job.ask(0, barrier("x"))
    job.ask(1, barrier("y"))
    assert job.ask(2, vote(True, "x")) == []
    assert answers(job.ask(2, barrier("y"), channel=1)) == {}
    assert set(answers(job.ask(0, barrier("y"), channel=1))) == {0, 1, 2}


def test_an_answer_that_was_lost_is_given_again(job: Askers) -> None:
    for rank in range(3):
        job.ask(rank, barrier())
    assert answers(job.ask(1, barrier(), 1)) == {1: Granted()}
    assert not job.job.requests.open


def test_a_rank_that_ended_counts_as_arrived(job: Askers) -> None:
    job.ask(0, barrier())
    job.ask(1, barrier())
    assert answers(job.exit(2, code=0)) == {0: Granted(), 1: Granted()}
    job.ask(0, barrier(), 2)
    assert set(answers(job.ask(1, barrier(), 2))) == {0, 1}


def test_a_rank_that_ended_while_a_thread_of_it_waited_is_not_told(job: Askers) -> None:
    job.ask(2, barrier())
    job.ask(2, wait("k"), channel=1)
    assert job.exit(2, code=0) == []
    job.ask(0, barrier())
    assert set(answers(job.ask(1, barrier()))) == {0, 1}


def test_a_rank_that_died_does_not_block_the_others(job: Askers) -> None:
    job.ask(0, barrier())
    job.ask(1, vote(True))
    fenced = answers(job.exit(2, 4, signal=9))
    assert {
        rank: answer.reason for rank, answer in fenced.items() if isinstance(answer, Denied)
    } == {
        0: "fenced",
        1: "fenced",
    }
    job.all_ready()
    assert [job.ask(rank, barrier()) for rank in (0, 1)] == [[], []]
    assert set(answers(job.ask(2, barrier()))) == {0, 1, 2}


@pytest.mark.parametrize("error", ["FencedError", "RequestTimeout", "StoreTimeout"])
def test_who_waited_in_vain_is_not_to_blame(job: Askers, error: str) -> None:
    job.exit(0, 4, code=1, raised=raised(error))
    job.after(1).exit(2, 4, signal=11)
    job.all_ready()
    (incident,) = job.job.incidents
    assert incident.rank == 2


def test_who_gave_up_waiting_is_not_there(job: Askers) -> None:
    job.ask(0, barrier(timeout_s=1))
    job.now += 1
    late = answers(job.tick())[0]
    assert isinstance(late, Denied)
    assert late.reason == "timeout"
    job.ask(1, barrier())
    assert job.ask(2, barrier()) == []
    assert set(answers(job.ask(0, barrier(), 2))) == {0, 1, 2}


def test_a_later_call_takes_the_place_of_an_earlier_one(job: Askers) -> None:
    job.ask(0, barrier())
    (again,) = job.ask(0, barrier(), channel=1)
    assert (again.channel, again.answer.reason) == (0, "joined again")
    job.ask(1, barrier())
    assert [(a.rank, a.channel) for a in job.ask(2, barrier())] == [(0, 1), (1, 0), (2, 0)]


def test_all_get_the_same_tally(job: Askers) -> None:
    job.ask(0, vote(True))
    job.ask(1, vote(False))
    told = answers(job.ask(2, vote(True)))
    tally = Tally(counts=((True, 2), (False, 1)), voters=3, absent=0)
    assert told == {0: tally, 1: tally, 2: tally}
    assert (tally.yes, tally.no, tally.all_yes, tally.unanimous) == (2, 1, False, False)


def test_yes_is_not_one(job: Askers) -> None:
    job.ask(0, vote(True))
    job.ask(1, vote(1))
    tally = answers(job.ask(2, vote("1")))[0]
    assert isinstance(tally, Tally)
    assert (tally.yes, tally.count(1), tally.count("1"), tally.count(0)) == (1, 1, 1, 0)


def test_who_ended_before_the_vote_is_absent(job: Askers) -> None:
    job.ask(0, vote(True))
    job.exit(1, code=0)
    tally = answers(job.ask(2, vote(True)))[0]
    assert tally == Tally(counts=((True, 2),), voters=2, absent=1)
    assert tally.all_yes


def test_a_tally_does_not_grow_with_the_world() -> None:
    job = Askers()
    job.running("a", slots=MAX_LISTED + 20)
    for rank in range(MAX_LISTED + 19):
        job.ask(rank, vote(rank))
    tally = answers(job.ask(MAX_LISTED + 19, vote(7)))[0]
    assert isinstance(tally, Tally)
    assert len(tally.counts) == MAX_LISTED
    assert tally.counts[0] == (7, 2)
    assert tally.voters == MAX_LISTED + 20


def test_a_restarted_coordinator_knows_who_came(job: Askers) -> None:
    job.ask(0, barrier(timeout_s=50))
    job.ask(1, vote("x"))
    job.job = revived(job.job)
    job.ask(1, barrier(), channel=1)
    assert set(answers(job.ask(2, barrier()))) == {0, 1, 2}
    assert encoded(replayed(job.history)) == encoded(job.job)


def test_the_machine_by_itself_never_keeps_an_empty_meeting() -> None:
    state, all_of_two = Meetings(), Attendance(present=2, ended=0)
    assert meetings.join(state, barrier(), Rank(0), "0/0", all_of_two) == (None, None)
    meetings.withdraw(state, barrier(), Rank(0))
    assert state == Meetings()
    meetings.join(state, vote(False), Rank(1), "1/0", all_of_two)
    (over,) = meetings.ended(state, Attendance(present=1, ended=1))
    assert over.askers == ("1/0",)
    assert over.answer == Tally(counts=((False, 1),), voters=1, absent=1)
    assert state == Meetings()


class MeetingMachine(RuleBasedStateMachine):
    """Any order of asking, repeating, timing out, ending, dying and replaying.

    Every request of a channel is answered exactly once, not counting answers that were asked for again.
    """

    @initialize(slots=st.integers(1, 4))
    def open(self, slots: int) -> None:
        self.job = Askers()
        self.job.running("a", slots=slots, step=3)
        self.numbers: dict[tuple[int, int], int] = {}
        self.open_: dict[tuple[int, int], AnyRequest] = {}
        self.last: dict[tuple[int, int], tuple[int, AnyRequest]] = {}

    def hear(self, actions: list[Any]) -> None:
        told = [a for a in actions if type(a).__name__ == "Answered"]
        places = [(a.rank, a.channel) for a in told]
        assert len(set(places)) == len(places), "told twice"
        for answer in told:
            place = (answer.rank, answer.channel)
            assert answer.number == self.numbers[place]
            assert place in self.open_, "an answer that nobody waits for"
            del self.open_[place]

    @property
    def living(self) -> list[int]:
        if self.job.job.state.name != "running":
            return []
        return [rank for rank, state in self.job.job.ranks.items() if not state.finished]

    @rule(
        pick=st.integers(0, 3),
        channel=st.integers(0, 1),
        request=st.sampled_from(
            [
                barrier("x"),
                barrier("y", timeout_s=2.0),
                vote(True, "x"),
                vote(2, "x", timeout_s=1.0),
                wait("k"),
                put(k=b"v"),
            ]
        ),
    )
    def ask(self, pick: int, channel: int, request: AnyRequest) -> None:
        if not self.living:
            return
        rank = self.living[pick % len(self.living)]
        if (rank, channel) in self.open_:
            return
        number = self.numbers[rank, channel] = self.numbers.get((rank, channel), 0) + 1
        self.open_[rank, channel] = request
        self.last[rank, channel] = (number, request)
        self.hear(self.job.ask(rank, request, number, channel))

    @rule(pick=st.integers(0, 9))
    def ask_again(self, pick: int) -> None:
        places = [place for place in self.last if place[0] in self.living]
        if not places:
            return
        place = places[pick % len(places)]
        number, request = self.last[place]
        actions = self.job.ask(place[0], request, number, place[1])
        if place in self.open_:
            assert actions == [], "it still waits"
        else:
            assert [(a.rank, a.channel, a.number) for a in actions] == [(*place, number)]

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 20.0]))
    def wait(self, seconds: float) -> None:
        until = self.job.now + seconds
        while (deadline := jobs.deadline(self.job.job)) is not None and deadline <= until:
            self.job.now = deadline
            self.hear(self.job.tick())
        self.job.now = until

    @rule(pick=st.integers(0, 3))
    def end(self, pick: int) -> None:
        if len(self.living) > 1:
            rank = self.living[pick % len(self.living)]
            for place in [place for place in self.open_ if place[0] == rank]:
                del self.open_[place]
            self.hear(self.job.exit(rank, code=0))

    @rule(pick=st.integers(0, 3))
    def die(self, pick: int) -> None:
        if self.living:
            self.hear(self.job.exit(self.living[pick % len(self.living)], 3, signal=9))
            assert not self.open_, "somebody waits in a round that is over"
            self.job.all_ready()
            self.numbers.clear()
            self.last.clear()

    @rule()
    def revive(self) -> None:
        self.job.job = revived(self.job.job)

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        if not hasattr(self, "job") or self.job.job.state.name != "running":
            return
        desk = self.job.job.requests
        assert {(h.asked.rank, h.asked.channel) for h in desk.open.values()} == set(self.open_)

    def teardown(self) -> None:
        if hasattr(self, "job"):
            assert encoded(replayed(self.job.history)) == encoded(self.job.job)


TestMeetingMachine = MeetingMachine.TestCase
