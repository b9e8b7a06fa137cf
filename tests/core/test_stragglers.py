"""Who slows the others down: one rank, all at once, and nobody who only waits."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from holdfast.core.stragglers import windows as slowness
from holdfast.core.stragglers.windows import RankScores, Stragglers
from holdfast.messages.timings import Finding, RankTimings, Timing
from holdfast.messages.units import Rank, StepNumber

REPORT_STEPS = 10
WAITING = {"backward", "optimizer", "between", "step"}


class Model(Struct):
    """What a step costs a rank that is alone and healthy."""

    data: float = 0.05
    forward: float = 1.0
    backward: float = 2.0
    optimizer: float = 0.1
    network: float = 0.2


def works(factors: dict[str, float] | None = None, model: Model | None = None) -> dict[str, float]:
    """The own work of a rank, by section; `compute` slows all that the accelerator does."""
    factors, model = factors or {}, model or Model()
    compute = factors.get("compute", 1.0)
    return {
        "data": model.data * factors.get("data", 1.0),
        "forward": model.forward * compute * factors.get("forward", 1.0),
        "backward": model.backward * compute * factors.get("backward", 1.0),
        "optimizer": model.optimizer * compute,
    }


def step(
    ranks: list[dict[str, float]], dice: random.Random, noise: float
) -> list[dict[str, float]]:
    """One synchronous step: in backward everybody waits for the slowest."""
    own = [{k: v * dice.uniform(1 - noise, 1 + noise) for k, v in r.items()} for r in ranks]
    ready = [r["data"] + r["forward"] + r["backward"] for r in own]
    timed = []
    for rank, at in zip(own, ready, strict=True):
        wait = max(ready) - at + Model().network
        took = {**rank, "backward": rank["backward"] + wait}
        seen = {f"own-{name}": own_s for name, own_s in rank.items()}
        timed.append({**took, "step": sum(took.values()), **seen})
    return timed


def reports(
    ranks: list[dict[str, float]],
    steps: int = REPORT_STEPS,
    sections: str = "data forward backward optimizer",
    noise: float = 0.0,
    dice: random.Random | None = None,
) -> list[RankTimings]:
    """What the agents say after so many steps."""
    dice = dice or random.Random(1)
    seen = [step(ranks, dice, noise) for _ in range(steps)]
    return [
        RankTimings(
            rank=Rank(rank),
            timings=tuple(
                timing(name, [timed[rank][name] for timed in seen]) for name in sections.split()
            ),
        )
        for rank in range(len(ranks))
    ]


def timing(section: str, samples: list[float], waits: bool | None = None) -> Timing:
    """Of `own-...` the waiting was taken off."""
    return Timing(
        section=section.removeprefix("own-"),
        count=len(samples),
        median_s=median(samples or [0.0]),
        total_s=sum(samples),
        waits=section in WAITING if waits is None else waits,
    )


def world(size: int) -> Stragglers:
    state = Stragglers()
    assert slowness.renew(state, {Rank(r): f"h{r}" for r in range(size)}, StepNumber(0)) == []
    return state


def train(
    state: Stragglers, ranks: list[dict[str, float]], steps: int, start: int = 0, **more: Any
) -> list[Finding]:
    found = []
    for at in range(start, start + steps, REPORT_STEPS):
        for report in reports(ranks, **more):
            found += slowness.take(state, [report], StepNumber(at + REPORT_STEPS))
            slowness.validate(state)
    return found


def relative(state: Stragglers) -> list[float | None]:
    return [scores.relative for scores in slowness.scores(state).values()]


def individual(state: Stragglers) -> list[float | None]:
    return [scores.individual for scores in slowness.scores(state).values()]


def flagged(state: Stragglers) -> list[int]:
    return [rank for rank, scores in slowness.scores(state).items() if scores.straggler]


# ---- one slow rank ----


@pytest.mark.parametrize(
    "sections",
    [
        "data forward backward optimizer",
        "data forward backward optimizer step",
        "data forward step",
        "forward step",
        "forward",
        "data own-forward own-backward own-optimizer",
        "data own-forward own-backward own-optimizer step",
    ],
)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_whose_compute_takes_twice_as_long_scores_half_and_is_named_within_30_steps(
    sections: str, size: int
) -> None:
    dice = random.Random(3)
    ranks = [works() for _ in range(size - 1)] + [works({"compute": 2.0})]
    state = world(size)
    found = train(state, ranks, 30, sections=sections, noise=0.05, dice=dice)
    *others, slow = relative(state)
    assert slow == pytest.approx(0.5, abs=0.05)
    assert all(score is not None and score >= 0.9 for score in others)
    assert [(f.rank, f.kind, f.began) for f in found] == [(size - 1, "relative", True)]
    assert found[0].step <= 30
    assert flagged(state) == [size - 1]


def test_the_straggler_has_the_shortest_backward_and_is_found_all_the_same() -> None:
    ranks = [works(), works(), works(), works({"compute": 2.0})]
    said = {r.rank: {t.section: t.median_s for t in r.timings} for r in reports(ranks)}
    assert min(said, key=lambda rank: said[rank]["backward"]) == 3
    state = world(4)
    assert [f.section for f in train(state, ranks, 30)] == ["backward"]
    assert relative(state) == pytest.approx([1.0, 1.0, 1.0, 0.5], abs=0.01)


def test_slow_data_is_weighed_by_what_it_costs_and_named() -> None:
    ranks = [works(), works(), works({"data": 40.0})]
    state = world(3)
    found = train(state, ranks, 30)
    assert [(f.rank, f.section) for f in found] == [(2, "data")]
    own = works({"data": 40.0})
    expected = (sum(works().values()) + 0.2) / (sum(own.values()) + 0.2)
    assert relative(state)[2] == pytest.approx(expected, abs=0.02)


def test_a_section_that_is_slow_but_costs_next_to_nothing_makes_no_straggler() -> None:
    ranks = [works(), works({"data": 3.0}, Model(data=0.001))]
    for sections in ("data forward backward", "data step", "data backward"):
        state = world(2)
        assert train(state, ranks, 60, sections=sections) == []


def test_a_rank_that_is_slow_only_where_all_wait_is_found_when_waiting_is_measured() -> None:
    ranks = [works(), works(), works({"backward": 3.0})]
    state = world(3)
    sections = "data own-forward own-backward own-optimizer"
    assert [f.rank for f in train(state, ranks, 30, sections=sections)] == [2]
    state = world(3)
    assert train(state, ranks, 60) == []


@pytest.mark.parametrize("own", ["", "own-"])
def test_what_a_script_does_between_the_passes_is_not_as_fast_as_its_forward_pass(own: str) -> None:
    """A model of a moment, in a script that takes its time: it says little about the rank."""
    model = Model(data=0.0, forward=0.001, backward=0.002, optimizer=0.0005)
    sections = f"{own}forward {own}backward {own}optimizer between step"
    noisy = [works({"compute": 1.8}, model), works({}, model)]
    state = world(2)
    assert train(state, [{**r, "between": 1.0} for r in noisy], 60, sections=sections) == []
    assert relative(state) == pytest.approx([1.0, 1.0], abs=0.02)
    dragged = works({"forward": 1000.0}, model)
    state = world(2)
    ranks = [{**dragged, "between": 1.0}, {**works({}, model), "between": 1.0}]
    assert [f.rank for f in train(state, ranks, 30, sections=sections)] == [0]
    assert relative(state)[0] == pytest.approx(0.5, abs=0.05)


def test_a_straggler_that_recovers_is_one_no_more() -> None:
    slow = [works(), works(), works({"compute": 2.0})]
    state = world(3)
    train(state, slow, 30)
    assert flagged(state) == [2]
    found = train(state, [works()] * 3, 30, start=30)
    assert [(f.rank, f.kind, f.began) for f in found] == [(2, "relative", False)]
    assert found[0].score > 0.99
    assert flagged(state) == []


def test_one_slow_window_is_not_enough_nor_is_one_good_one() -> None:
    slow, good = [works(), works({"compute": 2.0})], [works(), works()]
    state = world(2)
    for ranks in (slow, good, slow, good, slow):
        assert train(state, ranks, 10) == []
    assert [f.began for f in train(state, slow, 10)] == [True]
    for ranks in (good, slow, good, slow):
        assert [f for f in train(state, ranks, 10) if f.kind == "relative"] == []


def test_half_of_the_ranks_may_be_stragglers() -> None:
    state = world(4)
    train(state, [works(), works({"compute": 2.0})] * 2, 30)
    assert flagged(state) == [1, 3]


def test_one_rank_that_is_faster_than_all_makes_no_stragglers_of_the_rest() -> None:
    state = world(4)
    assert train(state, [works({"compute": 0.4}), *[works()] * 3], 60) == []
    assert relative(state)[3] == pytest.approx(0.4, abs=0.05)


# ---- all at once ----


def test_a_slowdown_of_all_is_found_in_each_rank_beside_its_own_best() -> None:
    state = world(4)
    assert train(state, [works()] * 4, 40) == []
    found = train(state, [works({"compute": 2.0})] * 4, 30, start=40)
    assert [(f.rank, f.kind) for f in found] == [(r, "individual") for r in range(4)]
    assert individual(state) == pytest.approx([0.5] * 4, abs=0.05)
    assert relative(state) == pytest.approx([1.0] * 4, abs=0.01)


def test_who_waits_for_a_slowed_rank_is_not_slow_beside_its_own_best() -> None:
    own = "data own-forward own-backward own-optimizer"
    for sections in ("data forward backward optimizer", "data forward step", own):
        state = world(4)
        train(state, [works()] * 4, 40, sections=sections)
        ranks = [works(), works(), works({"compute": 3.0}), works()]
        found = train(state, ranks, 40, start=40, sections=sections)
        assert {f.rank for f in found} == {2}


def test_who_waits_for_a_hidden_straggler_or_a_slow_network_is_not_blamed() -> None:
    state = world(3)
    train(state, [works()] * 3, 40)
    assert train(state, [works(), works(), works({"backward": 5.0})], 40, start=40) == []


def test_one_lucky_window_is_nobodys_best() -> None:
    state = world(2)
    train(state, [works()] * 2, 40)
    train(state, [works({"compute": 0.3})] * 2, 10, start=40)
    assert train(state, [works()] * 2, 40, start=50) == []
    assert individual(state) == pytest.approx([1.0] * 2)


# ---- what is not known ----


def test_a_single_rank_has_no_relative_score_but_an_individual_one() -> None:
    state = world(1)
    train(state, [works()], 40)
    assert slowness.scores(state) == {0: RankScores(None, pytest.approx(1.0))}
    assert [f.kind for f in train(state, [works({"compute": 2.0})], 30)] == ["individual"]


def test_before_the_first_window_nothing_is_known() -> None:
    state = world(2)
    slowness.take(state, reports([works()] * 2, steps=7), StepNumber(7))
    assert slowness.scores(state) == {r: RankScores(None, None) for r in range(2)}
    assert slowness.take(Stragglers(), reports([works()]), StepNumber(9)) == []


def test_whoever_shows_only_sections_that_wait_is_unknown_not_fine() -> None:
    state = world(2)
    ranks = [works(), works({"compute": 2.0})]
    for sections in ("backward", "step", "backward step"):
        assert train(state, ranks, 40, sections=sections) == []
        assert relative(state) == individual(state) == [None, None]


def test_few_samples_of_a_section_are_not_judged() -> None:
    state = world(2)
    for _ in range(4):
        rare = [timing("forward", [1.0] * 10), timing("save", [9.0] * 4, False)]
        often = [timing("forward", [1.0] * 10), timing("save", [1.0] * 4, False)]
        for rank, timings in enumerate((rare, often)):
            said = RankTimings(rank=Rank(rank), timings=tuple(timings))
            assert slowness.take(state, [said], StepNumber(10)) == []
    assert relative(state) == [1.0, 1.0]


def test_small_reports_are_gathered_until_there_are_enough() -> None:
    ranks = [works(), works({"compute": 2.0})]
    state = world(2)
    found = []
    for at in range(2, 31, 2):
        found += slowness.take(state, reports(ranks, steps=2), StepNumber(at))
        slowness.validate(state)
    assert [(f.rank, f.step) for f in found] == [(1, 16)]


def test_steps_that_are_reported_late_are_counted_from_then_on() -> None:
    state = world(2)
    for name, count in (("data", 10), ("step", 1)):
        said = RankTimings(rank=Rank(0), timings=(timing(name, [1.0] * count),))
        assert slowness.take(state, [said], StepNumber(1)) == []
        slowness.validate(state)
    assert not state.full


def test_a_rank_that_is_silent_or_late_does_not_keep_the_others_from_being_judged() -> None:
    ranks = [works(), works({"compute": 2.0}), works()]
    state = world(3)
    found = []
    for at in range(10, 71, 10):
        found += slowness.take(state, reports(ranks)[:2], StepNumber(at))
        slowness.validate(state)
    assert [f.rank for f in found] == [1]
    assert relative(state)[2] is None
    for _ in range(3):
        slowness.take(state, reports(ranks), StepNumber(80))
    assert relative(state)[2] == pytest.approx(1.0)


def test_a_section_that_one_rank_lacks_still_counts_for_the_others() -> None:
    ranks = [works(), works(), works({"data": 100.0})]
    state = world(3)
    for _ in range(2):
        said = reports(ranks)
        said[0] = RankTimings(rank=Rank(0), timings=said[0].timings[1:])
        found = slowness.take(state, said, StepNumber(20))
    assert [(f.rank, f.section) for f in found] == [(2, "data")]


def test_a_section_that_only_one_rank_has_counts_for_nobody() -> None:
    state = world(3)
    for _ in range(4):
        said = reports([works()] * 3)
        log = timing("log", [50.0] * 10, False)
        said[0] = RankTimings(rank=Rank(0), timings=(*said[0].timings, log))
        assert slowness.take(state, said, StepNumber(20)) == []
    assert relative(state) == [1.0] * 3


def test_medians_of_zero_are_no_trouble() -> None:
    state = world(3)
    for _ in range(4):
        said = [
            RankTimings(rank=Rank(r), timings=(timing(name, [second] * 10),))
            for r, (name, second) in enumerate([("data", 0.0), ("data", 0.0), ("data", 1e-9)])
        ]
        slowness.take(state, said, StepNumber(10))
        slowness.validate(state)
    assert relative(state) == [None, None, 0.0]
    state = world(2)
    train(state, [dict.fromkeys(works(), 0.0)] * 2, 40, sections="data forward")
    assert relative(state) == [None, None]


def test_reports_of_ranks_that_are_not_in_the_round_are_dropped() -> None:
    state = world(2)
    assert slowness.take(state, reports([works()] * 4), StepNumber(10)) == []
    assert set(slowness.scores(state)) == {0, 1}


# ---- rounds ----


def test_a_new_round_begins_afresh_and_ends_what_was_found() -> None:
    state = world(3)
    train(state, [works(), works(), works({"compute": 2.0})], 30)
    ended = slowness.renew(state, {Rank(r): f"h{r}" for r in range(2)}, StepNumber(40))
    assert [(f.rank, f.kind, f.began, f.step) for f in ended] == [(2, "relative", False, 40)]
    slowness.validate(state)
    assert slowness.scores(state) == {r: RankScores(None, None) for r in range(2)}


@pytest.mark.parametrize(
    ("hosts", "slow"), [(("h0", "h1"), [0, 1]), (("h0", "x"), [0]), (("h0", "h1", "h2"), [])]
)
def test_a_best_time_outlives_a_round_on_the_same_host_in_a_world_of_the_same_size(
    hosts: tuple[str, ...], slow: list[int]
) -> None:
    state = world(2)
    train(state, [works()] * 2, 40)
    slowness.renew(state, {Rank(r): host for r, host in enumerate(hosts)}, StepNumber(40))
    found = train(state, [works({"compute": 2.0})] * len(hosts), 40, start=40)
    assert [f.rank for f in found if f.kind == "individual"] == slow


# ---- for all inputs ----


@settings(max_examples=60)
@given(st.integers(1, 16), st.integers(0, 9999), st.booleans())
def test_a_tenth_of_noise_makes_nobody_a_straggler(size: int, seed: int, whole: bool) -> None:
    dice, state = random.Random(seed), world(size)
    sections = "data forward step" if whole else "data forward backward optimizer"
    ranks = [works()] * size
    assert train(state, ranks, 80, sections=sections, noise=0.1, dice=dice) == []


factors = st.floats(0.5, 4.0)


@settings(max_examples=60)
@given(st.lists(factors, min_size=2, max_size=6), st.integers(-20, 20), st.integers(0, 99))
def test_scores_do_not_depend_on_the_unit_of_time(slow: list[float], power: int, seed: int) -> None:
    scale = 2.0**power
    ranks = [works({"compute": factor}) for factor in slow]
    said = reports(ranks, noise=0.2, dice=random.Random(seed))
    plain, scaled = world(len(slow)), world(len(slow))
    for _ in range(3):
        found = slowness.take(plain, said, StepNumber(10))
        assert slowness.take(scaled, [stretched(r, scale) for r in said], StepNumber(10)) == found
    assert slowness.scores(plain) == slowness.scores(scaled)


def stretched(report: RankTimings, by: float) -> RankTimings:
    timings = tuple(
        msgspec.structs.replace(t, median_s=t.median_s * by, total_s=t.total_s * by)
        for t in report.timings
    )
    return RankTimings(rank=report.rank, timings=timings)


@settings(max_examples=60)
@given(st.lists(factors, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_reports_within_a_window_does_not_matter(
    slow: list[float], dice: random.Random
) -> None:
    said = reports([works({"compute": factor}) for factor in slow])
    straight, shuffled = world(len(slow)), world(len(slow))
    for _ in range(4):
        mixed = said[:]
        dice.shuffle(mixed)
        one, two = [], []
        for a, b in zip(said, mixed, strict=True):
            one += slowness.take(straight, [a], StepNumber(10))
            two += slowness.take(shuffled, [b], StepNumber(10))
        assert one == two
    assert slowness.scores(straight) == slowness.scores(shuffled)
    assert msgspec.json.encode(straight.ranks) == msgspec.json.encode(shuffled.ranks)


@settings(max_examples=60)
@given(st.lists(factors, min_size=2, max_size=8))
def test_a_score_is_the_best_ranks_work_over_the_ranks_own(slow: list[float]) -> None:
    state = world(len(slow))
    train(state, [works({"compute": f}, Model(data=0.0)) for f in slow], 10)
    assert relative(state) == pytest.approx([min(slow) / f for f in slow], rel=0.08)


sections = st.sampled_from(["data", "forward", "backward", "step", "mine"])
seconds = st.floats(0, 1e12) | st.sampled_from([0.0, 5e-324, 1e-300])
timings = st.builds(
    Timing,
    section=sections,
    count=st.integers(0, 20) | st.just(1 << 53),
    median_s=seconds,
    total_s=seconds,
    waits=st.booleans(),
)


@settings(max_examples=150)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 4), st.lists(timings, max_size=5)), max_size=20),
)
def test_whatever_is_reported_scores_are_numbers_from_0_to_1_or_unknown(
    size: int, told: list[tuple[int, list[Timing]]]
) -> None:
    state = world(size)
    for rank, said in told:
        report = RankTimings(rank=Rank(rank), timings=tuple(said))
        for finding in slowness.take(state, [report], StepNumber(1)):
            assert 0 <= finding.score <= 1
        slowness.validate(state)
        state = msgspec.json.decode(msgspec.json.encode(state), type=Stragglers)
    for scores in slowness.scores(state).values():
        for score in (scores.relative, scores.individual):
            assert score is None or 0 <= score <= 1
