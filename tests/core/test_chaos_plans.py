"""Injected faults: what each strikes and when, that it strikes once, and what reports say of it."""

from __future__ import annotations

from typing import Any

import pytest
from driver import Driver, encoded, replayed, revived
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_job_machine import JobMachine

from holdfast.core import report
from holdfast.core.chaos import plans as chaos
from holdfast.core.chaos.plans import LOOKAHEAD, Chaos
from holdfast.messages.actions import AnyAction, Inject, StartWorkers
from holdfast.messages.chaos import FAULT_NAMES, FAULTS, Injection, Trap, complaint
from holdfast.messages.events import CoordinatorRestarted, FaultAsked, FaultTold
from holdfast.messages.records import Place, World
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time


def world(*slots: int, round: int = 1) -> World:
    places, first = [], 0
    for index, count in enumerate(slots):
        node = NodeId(f"host{index}:{100 + index}")
        places.append(
            Place(
                node=node,
                group_rank=index,
                first_rank=Rank(first),
                slots=count,
                first_role_rank=first,
                role_size=0,
            )
        )
        first += count
    return World(
        round=RoundNumber(round),
        places=tuple(places),
        size=first,
        store_address="",
        store_port=1,
        frozen_at=Time(0.0),
    )


def ask(driver: Driver, kind: Any, **more: Any) -> list[AnyAction]:
    injection = Injection(kind=kind, **more)
    return driver.take(FaultAsked(at=driver.at, injection=injection))


def told(driver: Driver, trap: Trap, outcome: Any = "done", **more: Any) -> list[AnyAction]:
    said: dict[str, Any] = {"node": trap.node, "round": driver.round, "step": trap.step}
    return driver.take(FaultTold(at=driver.at, trap=trap, outcome=outcome, **{**said, **more}))


def request(state: Chaos, injection: Injection, world: World) -> None:
    event = FaultAsked(at=Time(0.0), injection=injection)
    chaos.asked(state, event, world, StepNumber(0), event.at)


def traps(actions: list[AnyAction]) -> list[Trap]:
    return [action.trap for action in actions if isinstance(action, Inject)]


def laid(actions: list[AnyAction]) -> list[Trap]:
    return [t for a in actions if isinstance(a, StartWorkers) for t in a.part.traps]


# ---- whom and when ------------------------------------------------------------------------------

seeds = st.none() | st.integers(0, 1 << 53)
kinds = st.sampled_from(FAULT_NAMES)
at_steps = kinds.filter(lambda kind: kind != "cont")


@given(kind=kinds, seed=seeds, every=st.integers(1, 1000), count=st.integers(1, 50))
def test_each_stretch_of_steps_has_exactly_one(
    kind: Any, seed: int | None, every: int, count: int
) -> None:
    injection = Injection(kind=kind, every=every, seed=seed)
    for occurrence in range(1, count + 1):
        step = chaos.step_of(injection, occurrence)
        assert (occurrence - 1) * every < step <= occurrence * every
        if seed is None:
            assert step == occurrence * every


@given(
    kind=at_steps,
    seed=seeds,
    every=st.integers(1, 100),
    slots=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    others=st.lists(at_steps, max_size=3),
)
def test_the_same_seed_means_the_same_faults_whatever_else_was_asked_for(
    kind: Any, seed: int | None, every: int, slots: list[int], others: list[Any]
) -> None:
    injection = Injection(kind=kind, every=every, seed=seed)
    alone, among = chaos.opened([injection]), Chaos()
    for other in others:
        request(among, Injection(kind=other, every=7), world(*slots))
    request(among, injection, world(*slots))
    chaos.begin_round(alone, world(*slots))

    def seen(traps: list[Trap]) -> list[tuple[Any, ...]]:
        return [(t.kind, t.rank, t.node, t.step, t.spot) for t in traps]

    mine = [t for t in among.traps if t.injection == len(among.plans)]
    assert seen(alone.traps) == seen(mine)
    assert len(alone.traps) == LOOKAHEAD


@given(seed=st.integers(0, 1 << 53), slots=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_any_is_somebody_of_this_world_and_sooner_or_later_everybody(
    seed: int, slots: list[int]
) -> None:
    here = world(*slots)
    injection = Injection(kind="kill", every=1, seed=seed)
    found = {chaos.target(injection, n, here) for n in range(1, 60 * here.size)}
    by_rank = {Rank(p.first_rank + i): p.node for p in here.places for i in range(p.slots)}
    assert found == {(node, rank) for rank, node in by_rank.items()}


@given(seed=st.integers(0, 1 << 53))
def test_any_rank_of_a_node_is_one_of_its_own(seed: int) -> None:
    here = world(2, 3, 1)
    for name in ("1", "host1", "host1:101"):
        found = chaos.target(Injection(kind="hang", node=name, at_step=5, seed=seed), 1, here)
        assert found is not None
        assert found[1] in (2, 3, 4)


def test_what_befalls_a_node_counts_the_steps_of_its_first_rank() -> None:
    found = chaos.target(Injection(kind="netcut", node="1"), 1, world(2, 2))
    assert found == (NodeId("host1:101"), Rank(2))
    of_rank = chaos.target(Injection(kind="kill-agent", ranks=(3,)), 1, world(2, 2))
    assert of_rank == (NodeId("host1:101"), Rank(3))


@pytest.mark.parametrize(
    ("injection", "says"),
    [
        (Injection(kind="kill", at_step=1, every=2), "not both"),
        (Injection(kind="kill", value=3), "takes no value"),
        (Injection(kind="exit", value=256), "from 0 to 255"),
        (Injection(kind="exit", value=1.5), "whole number"),
        (Injection(kind="slow", value=0.5), "from 1"),
        (Injection(kind="cont", at_step=5), "stopped rank comes to no step"),
        (Injection(kind="kill", ranks=(1,), node="0"), "not both"),
        (Injection(kind="kill", ranks=(1, 1)), "same rank twice"),
        (Injection(kind="kill-coordinator", ranks=(1,)), "one coordinator"),
    ],
)
def test_what_makes_no_sense_is_refused(injection: Injection, says: str) -> None:
    assert says in complaint(injection)
    assert says in chaos.refusal(Chaos(), injection, world(2), StepNumber(0), {})


def test_what_the_round_does_not_have_is_refused() -> None:
    def why(highest: int = 0, **more: Any) -> str:
        return chaos.refusal(Chaos(), Injection(**more), world(2, 2), StepNumber(highest), {})

    assert why(kind="kill", ranks=(3,)) == ""
    assert "ranks 0 to 3" in why(kind="kill", ranks=(4,))
    assert "no node x" in why(kind="netcut", node="x")
    assert "step 5 is over" in why(highest=7, kind="kill", at_step=5)
    assert "no round" in chaos.refusal(Chaos(), Injection(kind="kill"), None, StepNumber(0), {})
    assert chaos.refusal(Chaos(), Injection(kind="kill", at_step=5), None, StepNumber(0), {}) == ""


def test_a_node_that_is_not_there_is_told_with_those_that_are() -> None:
    here = world(*[1] * 10)
    why = chaos.refusal(Chaos(), Injection(kind="netcut", node="x"), here, StepNumber(0), {})
    assert "it has 0 (host0:100), 1 (host1:101)" in why
    assert why.endswith("7 (host7:107) and 2 more")


def test_every_fault_says_what_it_is() -> None:
    assert set(FAULTS) == set(FAULT_NAMES)


# ---- in a job -----------------------------------------------------------------------------------


def test_a_schedule_is_laid_before_the_first_script_begins() -> None:
    schedule = (Injection(kind="kill", ranks=(1,), at_step=50), Injection(kind="hang", every=100))
    driver = Driver(chaos=schedule)
    found = laid(driver.join("a"))
    assert [(t.kind, t.step) for t in found] == [
        ("kill", 50),
        *(("hang", step) for step in (100, 200, 300, 400)),
    ]
    assert found[0].rank == 1


def test_each_node_gets_only_its_own_traps() -> None:
    schedule = (Injection(kind="kill", ranks=(0, 2), at_step=50),)
    driver = Driver(min_nodes=2, max_nodes=2, chaos=schedule)
    driver.join("a")
    starts = [a for a in driver.join("b") if isinstance(a, StartWorkers)]
    assert [[t.rank for t in a.part.traps] for a in starts] == [[0], [2]]


def test_what_happened_does_not_happen_again_when_the_step_is_taken_again() -> None:
    driver = Driver(chaos=(Injection(kind="kill", ranks=(1,), at_step=50),))
    (trap,) = laid(driver.join("a"))
    driver.after(1).start_all()
    driver.after(1).step_all(49)
    told(driver, trap)
    driver.exit(1, step=50, signal=9)
    again = driver.ready("a")
    assert laid(again) == []
    driver.after(1).start_all()
    driver.after(1).step_all(40, steps=1)
    assert report.status(driver.job, driver.at, True).faults.pending == []


def test_what_did_not_happen_in_a_broken_round_happens_in_the_next() -> None:
    driver = Driver(chaos=(Injection(kind="kill", ranks=(1,), at_step=50),))
    driver.running("a", step=10)
    driver.exit(0, step=12, code=3)
    (trap,) = laid(driver.ready("a"))
    assert (trap.rank, trap.step) == (1, 50)


def test_what_comes_again_and_again_is_laid_ahead_of_training() -> None:
    driver = Driver(chaos=(Injection(kind="slow", every=10, value=2),)).running("a", step=1)
    assert [t.step for t in driver.job.of(Chaos).traps] == [10, 20, 30, 40]
    assert [t.step for t in traps(driver.after(1).step(0, 25))] == [50, 60]
    assert [t.step for t in traps(driver.after(1).step(0, 1000))] == [1010, 1020, 1030, 1040]


def test_of_what_is_asked_for_now_the_node_is_told_at_once() -> None:
    driver = Driver().running("a", step=5)
    (trap,) = traps(ask(driver, "kill", ranks=(1,)))
    assert (trap.kind, trap.rank, trap.step, trap.node) == ("kill", 1, 0, "a")
    assert [trap] == driver.job.of(Chaos).traps


def test_several_ranks_are_several_injections() -> None:
    driver = Driver().running("a", step=5)
    found = traps(ask(driver, "stop", ranks=(0, 1)))
    assert [(t.injection, t.rank) for t in found] == [(1, 0), (2, 1)]


def test_what_was_to_happen_now_does_not_happen_in_the_next_round() -> None:
    driver = Driver().running("a", step=5)
    ask(driver, "hang", ranks=(1,))
    driver.exit(0, step=6, signal=9)
    assert laid(driver.ready("a")) == []
    assert driver.job.of(Chaos).plans[0].refused == "its round ended before"


def test_a_node_that_comes_back_is_told_again() -> None:
    driver = Driver().running("a", step=5)
    (trap,) = traps(ask(driver, "hang", ranks=(1,)))
    assert traps(driver.resume("a", 1, busy=True)) == [trap]
    told(driver, trap)
    assert traps(driver.resume("a", 1, busy=True)) == []


def test_a_refusal_ends_it() -> None:
    driver = Driver(chaos=(Injection(kind="gpu-error", every=10),)).running("a", step=5)
    told(driver, driver.job.of(Chaos).traps[0], "refused", detail="no GPU")
    assert driver.job.of(Chaos).traps == []
    assert traps(driver.after(1).step(0, 25)) == []
    (refused,) = report.status(driver.job, driver.at, True).faults.refused
    assert refused.why == "no GPU"


def test_an_occurrence_that_came_to_nothing_does_not_end_the_rest() -> None:
    driver = Driver(chaos=(Injection(kind="corrupt-image", every=10),)).running("a", step=5)
    told(driver, driver.job.of(Chaos).traps[0], "missed", detail="no image")
    assert [t.step for t in driver.job.of(Chaos).traps] == [20, 30, 40]
    assert driver.job.of(Chaos).count == 0


def test_the_coordinator_dies_after_it_was_written_down() -> None:
    driver = Driver().running("a", step=5)
    (order,) = ask(driver, "kill-coordinator")
    assert isinstance(order, Inject)
    assert order.node == chaos.COORDINATOR
    assert driver.job.of(Chaos).count == 1
    driver.take(CoordinatorRestarted(at=driver.at))
    assert driver.job.of(Chaos).plans[0].over


def test_at_a_step_the_coordinator_dies_when_a_rank_has_come_there() -> None:
    driver = Driver().running("a", step=5)
    (trap,) = traps(ask(driver, "kill-coordinator", at_step=20))
    assert (trap.node, trap.step) == ("a", 20)
    (order,) = told(driver, trap)
    assert isinstance(order, Inject)
    assert order.node == chaos.COORDINATOR
    assert told(driver, trap) == [], "and not twice"


def test_it_all_survives_the_coordinator() -> None:
    driver = Driver(chaos=(Injection(kind="kill", every=10, seed=3),)).running("a", step=5)
    ask(driver, "hang", ranks=(1,), at_step=50)
    told(driver, driver.job.of(Chaos).traps[0])
    assert encoded(replayed(driver.history, revive_at=3)) == encoded(driver.job)
    assert encoded(revived(driver.job)) == encoded(driver.job)


# ---- what strikes nothing ---------------------------------------------------------------------


def faults(driver: Driver) -> Any:
    return report.status(driver.job, driver.at, True).faults


def test_a_rank_that_has_finished_is_refused() -> None:
    driver = Driver().running("a", step=5)
    driver.exit(1, step=9, code=0)

    def why(**more: Any) -> str:
        asked = Injection(**more)
        job = driver.job
        return chaos.refusal(job.of(Chaos), asked, job.world, job.highest, job.ranks)

    assert why(kind="kill", ranks=(1,)) == "rank 1 has finished: its script has ended"
    assert why(kind="kill", ranks=(0,)) == ""
    assert "1 has finished" in why(kind="kill", ranks=(1,), at_step=50)


def test_a_fault_whose_rank_finishes_before_its_step_says_so() -> None:
    driver = Driver(chaos=(Injection(kind="kill", ranks=(1,), at_step=50),)).running("a", step=5)
    assert not faults(driver).pending[0].missed
    driver.exit(1, step=9, code=0)
    (pending,) = faults(driver).pending
    assert pending.missed
    assert pending.line.endswith("(missed: rank 1 has finished)")


def test_a_fault_whose_step_its_rank_has_passed_says_so() -> None:
    driver = Driver(chaos=(Injection(kind="kill", ranks=(1,), at_step=50),)).running("a", step=5)
    driver.after(1).step_all(60)
    (pending,) = faults(driver).pending
    assert pending.line.endswith("(missed: rank 1 is past that step)")


def test_a_scheduled_fault_for_a_rank_that_the_round_does_not_have_says_so() -> None:
    driver = Driver(chaos=(Injection(kind="kill", ranks=(7,), at_step=50),)).running("a", step=5)
    (pending,) = faults(driver).pending
    assert pending.why == "there is no rank 7: this round has ranks 0 to 1"
    assert pending.why in pending.line


def test_a_fault_that_the_job_ended_before_is_listed_as_not_injected() -> None:
    driver = Driver(chaos=(Injection(kind="kill", ranks=(1,), at_step=50),)).running("a", step=5)
    ask(driver, "hang", ranks=(0,))
    for rank in (0, 1):
        driver.exit(rank, step=9, code=0)
    told = faults(driver)
    assert told.pending == []
    assert [(one.fault, one.outcome, one.why) for one in told.refused] == [
        ("kill", "missed", "the job ended before"),
        ("hang", "missed", "the job ended before"),
    ]


def test_occurrences_that_training_was_too_fast_for_are_counted() -> None:
    driver = Driver(chaos=(Injection(kind="slow", every=10, value=2),)).running("a", step=1)
    (first, *_) = driver.job.of(Chaos).traps
    driver.after(1).step(0, 1000)
    assert "; 100 skipped: their steps were over before" in faults(driver).pending[0].line
    told(driver, first)
    assert "; 99 skipped" in faults(driver).pending[0].line, "word of it came late"


def test_a_request_that_the_job_has_outrun_is_counted() -> None:
    driver = Driver().running("a", step=5)
    ask(driver, "kill", ranks=(9,))
    (reason,) = report.status(driver.job, driver.at, True).refused
    assert reason == "FaultAsked: a fault was requested, and then the job changed"


# ---- what came of it ----------------------------------------------------------------------------


def injected(driver: Driver) -> list[bool]:
    return [one.injected is not None for one in report.incidents(driver.job)]


def break_down(driver: Driver, kind: Any, rank: int, **how: Any) -> None:
    (trap,) = traps(ask(driver, kind, ranks=(rank,)))
    told(driver, trap, step=StepNumber(6))
    driver.after(0.01).exit(how.pop("of", rank), step=6, **how)


def test_an_incident_that_was_asked_for_says_so() -> None:
    driver = Driver().running("a", step=5)
    break_down(driver, "kill", 1, signal=9)
    assert injected(driver) == [True]
    (incident,) = driver.job.incidents
    assert "[injected: kill on rank 1 at step 6]" in report.incident_line(driver.job, incident)


def test_a_real_one_does_not() -> None:
    driver = Driver().running("a", step=5)
    driver.exit(1, step=6, signal=9)
    driver.ready("a")
    driver.after(1).start_all()
    driver.after(1).step_all(7, steps=1)
    break_down(driver, "kill", 1, signal=9)
    assert injected(driver) == [False, True]


def test_neither_does_that_of_another_rank() -> None:
    driver = Driver().running("a", step=5)
    break_down(driver, "kill", 1, of=0, signal=9)
    assert injected(driver) == [False]


def test_nor_that_of_another_kind() -> None:
    driver = Driver().running("a", step=5)
    break_down(driver, "slow", 1, signal=9)
    assert injected(driver) == [False]


def test_nor_one_long_after() -> None:
    driver = Driver().running("a", step=5)
    (trap,) = traps(ask(driver, "kill", ranks=(1,)))
    told(driver, trap)
    driver.after(chaos.NEAR_S + 1).exit(1, step=6, signal=9)
    assert injected(driver) == [False]


def test_nor_one_of_the_next_round() -> None:
    driver = Driver().running("a", step=5)
    break_down(driver, "kill", 1, of=0, signal=9)
    driver.ready("a")
    driver.after(1).start_all()
    driver.exit(1, step=6, steps=1, signal=9)
    assert injected(driver) == [False, False]


def test_nor_one_that_was_known_before_the_fault() -> None:
    driver = Driver().running("a", step=5)
    driver.exit(1, step=6, signal=9)
    driver.ready("a")
    driver.after(0.1).start_all()
    driver.after(0.1).step_all(6, steps=1)
    (trap,) = traps(ask(driver, "kill", ranks=(1,)))
    told(driver, trap, round=RoundNumber(1), step=StepNumber(6))
    assert injected(driver) == [False]


def test_a_lost_node_was_cut_off_on_purpose() -> None:
    driver = Driver(min_nodes=1, max_nodes=2).running("a", "b", step=5)
    (trap,) = traps(ask(driver, "netcut", node="1"))
    told(driver, trap)
    driver.lose(trap.node)
    assert injected(driver) == [True]


def test_the_ledger_does_not_care() -> None:
    def books(asked: bool) -> dict[str, float]:
        driver = Driver().running("a", step=5)
        if asked:
            (trap,) = traps(ask(driver, "kill", ranks=(1,)))
            told(driver, trap)
        driver.exit(1, step=6, signal=9)
        driver.after(1).ready("a")
        driver.after(1).start_all()
        driver.after(1).step_all(7, steps=1)
        return report.goodput(driver.job, driver.at).seconds

    assert books(asked=True) == books(asked=False)


# ---- any sequence of events ---------------------------------------------------------------------


class ChaosMachine(JobMachine):
    """The whole job, with faults asked for at any moment, and told of in any way."""

    def deliver(self, action: AnyAction) -> None:
        if not isinstance(action, Inject):
            super().deliver(action)

    @rule(
        kind=kinds,
        when=st.sampled_from(["now", "at", "every"]),
        number=st.integers(1, 20),
        seed=st.none() | st.integers(0, 5),
        ranks=st.lists(st.integers(0, 5), max_size=2),
    )
    def ask_for_fault(
        self, kind: Any, when: str, number: int, seed: int | None, ranks: list[int]
    ) -> None:
        at_step = number if when == "at" else None
        every = number if when == "every" else None
        injection = Injection(
            kind=kind, ranks=tuple(ranks), at_step=at_step, every=every, seed=seed
        )
        self.take(FaultAsked(at=self.at(0), injection=injection))

    @precondition(lambda self: self.job.of(Chaos).traps)
    @rule(
        index=st.integers(0, 50),
        outcome=st.sampled_from(["armed", "done", "missed", "refused"]),
        old=st.booleans(),
    )
    def tell_of_fault(self, index: int, outcome: Any, old: bool) -> None:
        laid = self.job.of(Chaos).traps
        trap = laid[index % len(laid)]
        event = FaultTold(
            at=self.at(0),
            node=trap.node,
            round=RoundNumber(max(0, self.job.membership.round - old)),
            trap=trap,
            outcome=outcome,
            step=trap.step,
        )
        before = self.job.of(Chaos).count
        for _ in range(2):  # Said again, it changes nothing.
            self.take(event)
        assert self.job.of(Chaos).count - before == (outcome == "done")


ChaosMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestChaosMachine = ChaosMachine.TestCase
