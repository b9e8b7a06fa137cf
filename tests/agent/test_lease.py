"""How long ranks run without word from the coordinator, in simulated time."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.agent.lease import FOREVER, RoundLease
from holdfast.messages.units import RoundNumber
from holdfast.messages.wire import Lease
from holdfast.shm.vital_signs import VITALS_BYTES, Vitals
from holdfast.sim.clock import START, SimClock
from holdfast.sim.loop import SimLoop

FOR_S = 3.0


@dataclass
class Fate:
    dead: bool = False
    paused_until: float = 0.0


@dataclass
class Ranks:
    """Ranks that are told what to do, and in whose page the lease is noted."""

    round: RoundNumber = RoundNumber(1)
    busy: bool = True
    told: list[tuple[str, float]] = field(default_factory=list)
    """What they were told, and after how long."""
    page: Vitals = field(default_factory=lambda: Vitals(memoryview(bytearray(VITALS_BYTES))))
    clock: SimClock = field(default_factory=SimClock)

    def lent_until(self, until: float) -> None:
        self.page.lend(until)

    def pause(self) -> None:
        self.told.append(("pause", self.clock.now - START))

    def go_on(self) -> None:
        self.told.append(("go on", self.clock.now - START))

    def may_run(self) -> bool:
        """Whether a worker that looks at its page would go on."""
        return not self.page.lease_is_over(self.clock.now)


class Node:
    """A node's lease, in simulated time."""

    def __init__(self, for_s: float = FOR_S) -> None:
        self.ranks = Ranks()
        self.lease = RoundLease(lambda: self.ranks)
        self._for_s = for_s
        self.fate = Fate()
        self._loop = SimLoop(self.ranks.clock, self.fate, [])
        self._number = 0

    def beat(self) -> int:
        self._number += 1
        self._loop.enter(self.lease.beat_sent, self._number)
        return self._number

    def answer(self, beat: int, round: int = 1, for_s: float | None = None) -> None:
        lent_s = self._for_s if for_s is None else for_s
        lease = Lease(beat=beat, round=RoundNumber(round), for_s=lent_s, beat_s=1.0)
        self._loop.enter(self.lease.answered, lease)

    def reach_host(self, at: float) -> None:
        self._loop.enter(self.lease.host_reached, START + at)

    def at(self, seconds: float) -> None:
        """Let time pass until so long after the start."""
        while self.ranks.clock.step(START + seconds):
            pass

    @property
    def until(self) -> float:
        return self.lease.until - START


def test_a_lease_counts_from_when_the_beat_was_sent_and_not_from_its_answer() -> None:
    node = Node()
    beat = node.beat()
    node.at(2.0)
    node.answer(beat)
    assert node.until == FOR_S
    node.at(2.9)
    assert node.ranks.told == []
    node.at(4.0)
    assert node.ranks.told == [("pause", FOR_S)]
    assert node.lease.over


def test_each_answer_renews_the_lease() -> None:
    node = Node()
    for second in range(20):
        node.at(float(second))
        beat = node.beat()
        node.at(second + 0.5)
        node.answer(beat)
    assert node.ranks.told == []
    assert node.until == 19.0 + FOR_S


def test_no_lease_is_counted_before_the_first_answer() -> None:
    node = Node()
    node.beat()
    node.at(1000.0)
    assert node.ranks.told == []
    assert node.ranks.may_run()


def test_an_answer_to_a_later_beat_answers_the_earlier_ones_too() -> None:
    node = Node()
    first = node.beat()
    node.at(1.0)
    second = node.beat()
    node.answer(second)
    assert node.until == 1.0 + FOR_S
    node.answer(first)
    assert node.until == 1.0 + FOR_S


def test_an_answer_that_comes_too_late_renews_nothing() -> None:
    node = Node()
    node.answer(node.beat())
    node.at(1.0)
    beat = node.beat()
    node.at(1.0 + FOR_S)
    node.answer(beat)
    assert node.lease.over
    assert node.ranks.told == [("pause", FOR_S)]


def test_an_answer_on_a_stream_that_is_lost_counts_for_nothing() -> None:
    node = Node()
    node.answer(node.beat())
    node.at(1.0)
    beat = node.beat()
    node.lease.stream_lost()
    node.answer(beat)
    assert node.until == FOR_S


def test_ranks_go_on_when_the_round_is_still_theirs() -> None:
    node = Node()
    node.answer(node.beat())
    node.at(10.0)
    assert not node.ranks.may_run()
    node.answer(node.beat())
    assert node.ranks.told == [("pause", FOR_S), ("go on", 10.0)]
    assert not node.lease.over
    assert node.ranks.may_run()
    node.at(20.0)
    assert node.ranks.told[2:] == [("pause", 10.0 + FOR_S)], "and the lease counts again"


def test_ranks_whose_places_are_given_to_others_do_not_go_on() -> None:
    for round in (0, 2):
        node = Node()
        node.answer(node.beat())
        node.at(10.0)
        node.answer(node.beat(), round=round)
        assert node.ranks.told == [("pause", FOR_S)]
        assert node.lease.over
        assert not node.ranks.may_run()


def test_a_node_without_ranks_has_its_lease_again_in_any_round() -> None:
    node = Node()
    node.answer(node.beat(), round=0)
    node.ranks.busy = False
    node.at(10.0)
    assert node.lease.over
    node.answer(node.beat(), round=0)
    assert not node.lease.over
    assert node.ranks.may_run()


def test_while_a_lease_runs_an_answer_of_another_round_renews_it() -> None:
    """The order that ends these ranks, or begins theirs, is on its way."""
    node = Node()
    node.answer(node.beat())
    node.at(1.0)
    node.answer(node.beat(), round=2)
    assert node.until == 1.0 + FOR_S


# ---- the coordinator's host ----


def test_a_host_that_answers_renews_the_lease() -> None:
    node = Node()
    node.answer(node.beat())
    node.at(2.0)
    node.reach_host(1.5)
    assert node.until == 1.5 + FOR_S
    node.at(1.5 + FOR_S - 0.1)
    assert node.ranks.told == []
    assert node.ranks.may_run()


def test_a_host_that_answered_earlier_does_not_shorten_the_lease() -> None:
    node = Node()
    node.at(2.0)
    node.answer(node.beat())
    node.reach_host(0.5)
    assert node.until == 2.0 + FOR_S


def test_a_host_that_answers_does_not_bring_back_a_lease_that_is_over() -> None:
    node = Node()
    node.answer(node.beat())
    node.at(10.0)
    node.reach_host(10.0)
    assert node.lease.over
    assert node.ranks.told == [("pause", FOR_S)]
    assert not node.ranks.may_run()


# ---- a job of one node ----


def test_a_lease_that_nobody_else_could_get_never_ends() -> None:
    node = Node(for_s=0.0)
    node.answer(node.beat())
    assert node.lease.until == FOREVER
    node.at(10_000.0)
    node.reach_host(10_000.0)
    assert node.ranks.told == []
    assert node.ranks.may_run()


def test_a_lease_that_became_endless_is_not_counted_any_more() -> None:
    node = Node()
    node.answer(node.beat())
    node.answer(node.beat(), for_s=0.0)
    node.at(100.0)
    assert node.ranks.told == []
    assert node.ranks.may_run()


def test_a_shorter_lease_does_not_take_back_what_was_promised() -> None:
    node = Node()
    node.answer(node.beat(), for_s=10.0)
    node.at(1.0)
    node.answer(node.beat(), for_s=3.0)
    assert node.until == 10.0


# ---- what workers see of it ----


def test_the_page_of_each_rank_says_when_the_lease_is_over() -> None:
    node = Node()
    node.answer(node.beat())
    assert not node.ranks.page.lease_is_over(START + FOR_S - 0.1)
    assert node.ranks.page.lease_is_over(START + FOR_S + 0.1)
    node.at(2.0)
    node.answer(node.beat())
    assert not node.ranks.page.lease_is_over(START + FOR_S + 0.1)


def test_ranks_stop_themselves_when_the_agent_is_stopped() -> None:
    node = Node()
    node.answer(node.beat())
    node.fate.paused_until = START + 60.0
    node.at(FOR_S + 1.0)
    assert node.ranks.told == [], "the agent does not run"
    assert not node.ranks.may_run()


def test_ranks_that_stopped_themselves_go_on_when_the_answer_is_read_before_the_end_is_noticed() -> (
    None
):
    node = Node()
    node.answer(node.beat())
    node.fate.paused_until = START + 60.0
    node.at(FOR_S + 1.0)
    assert not node.ranks.may_run()
    node.answer(node.beat())
    assert node.ranks.told[-1] == ("go on", FOR_S + 1.0)
    assert node.ranks.may_run()
    assert not node.lease.over


def test_an_end_that_was_not_noticed_yet_is_one_that_no_host_brings_back() -> None:
    node = Node()
    node.answer(node.beat())
    node.fate.paused_until = START + 60.0
    node.at(FOR_S + 1.0)
    node.reach_host(FOR_S + 1.0)
    assert node.lease.over
    assert not node.ranks.may_run()


def test_an_end_that_was_not_noticed_yet_holds_for_another_round() -> None:
    node = Node()
    node.answer(node.beat())
    node.fate.paused_until = START + 60.0
    node.at(FOR_S + 1.0)
    node.answer(node.beat(), round=2)
    assert node.lease.over
    assert not node.ranks.may_run()
