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
from holdfast.core.stragglers.windows import WINDOW_S, WINDOWS, Judged, RankScores, Stragglers
from holdfast.messages.timings import CpuShortage, Finding, RankTimings, Timing
from holdfast.messages.units import Rank, StepNumber, Time

REPORT_STEPS = 10
WAITING = {"backward", "optimizer", "step"}


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


def take(
    state: Stragglers, report: RankTimings, step: int = 10, after_s: float = WINDOW_S
) -> Judged:
    """A report that comes so long after the first one of its window."""
    if state.opened_at is None:
        state.opened_at = Time(0.0)
    judged = slowness.take(state, [report], StepNumber(step), Time(state.opened_at + after_s))
    slowness.validate(state)
    return judged


def train(
    state: Stragglers, ranks: list[dict[str, float]], steps: int, start: int = 0, **more: Any
) -> list[Finding]:
    found: list[Finding] = []
    for at in range(start, start + steps, REPORT_STEPS):
        for report in reports(ranks, **more):
            found += take(state, report, at + REPORT_STEPS).findings
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


@pytest.mark.parametrize("between", [0.0, 5.0, 50.0])
@pytest.mark.parametrize("where", ["data", "forward", "between"])
@pytest.mark.parametrize("own", ["", "own-"])
def test_a_rank_whose_steps_take_twice_as_long_scores_half_wherever_the_time_lies(
    own: str, where: str, between: float
) -> None:
    """As `holdfast chaos slow` does: the other times are what they were."""
    sections = f"data {own}forward {own}backward {own}optimizer between step"
    healthy = {**works(), "between": between}
    slow = {**healthy, where: healthy[where] + sum(healthy.values())}
    state = world(4)
    found = train(state, [healthy, healthy, slow, healthy], 40, sections=sections)
    assert [(f.rank, f.kind, f.section) for f in found] == [(2, "relative", where)]
    assert relative(state) == pytest.approx([1.0, 1.0, 0.5, 1.0], abs=0.05)


def test_time_between_phases_counts_though_only_some_steps_are_followed() -> None:
    """Of 200 steps eight were followed; each has its phases once, and 9 of its 10 s between them."""

    def said(rank: int, forward_s: float) -> RankTimings:
        followed = {"forward": forward_s, "optimizer": 0.5, "between": 9.0}
        times = [timing(name, [s] * 8, waits=False) for name, s in followed.items()]
        return RankTimings(rank=Rank(rank), timings=(*times, timing("step", [10.0] * 200)))

    state = world(2)
    for _ in range(WINDOWS):
        for report in (said(0, 0.1), said(1, 0.5)):
            assert not take(state, report).findings
    assert relative(state) == pytest.approx([1.0, 0.96])


def test_who_loses_little_of_a_step_slows_nobody_down() -> None:
    """Its forward takes three times as long, in steps that the network fills."""
    model = Model(data=0.0, forward=0.01, backward=0.02, optimizer=0.0)
    ranks = [works({}, model), works({"compute": 3.0}, model)]
    state = world(2)
    sections = "own-forward own-backward step"
    assert train(state, ranks, 60, sections=sections) == []
    assert relative(state)[1] is not None
    assert relative(state)[1] > 0.75


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


def test_two_slow_windows_are_not_enough_nor_are_two_good_ones() -> None:
    slow, good = [works(), works({"compute": 2.0})], [works(), works()]
    state = world(2)
    for ranks in (slow, good, slow, slow, good, slow, slow):
        assert train(state, ranks, 10) == []
    assert [f.began for f in train(state, slow, 10)] == [True]
    for ranks in (good, slow, good, good, slow):
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
    for report in reports([works()] * 2, steps=7):
        take(state, report)
    assert slowness.scores(state) == {r: RankScores(None, None) for r in range(2)}
    assert take(Stragglers(), *reports([works()])) == Judged()


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
            assert not take(state, said).findings
    assert relative(state) == [1.0, 1.0]


def test_small_reports_are_gathered_until_there_are_enough() -> None:
    ranks = [works(), works({"compute": 2.0})]
    state = world(2)
    found = []
    for at in range(2, 31, 2):
        for report in reports(ranks, steps=2):
            found += take(state, report, at).findings
    assert [(f.rank, f.step) for f in found] == [(1, 24)]


def test_a_window_lasts_five_seconds_however_short_the_steps_are() -> None:
    """Else steps of a millisecond would be judged a hundred times a second, and once wrongly."""
    state, found = world(2), list[float]()
    ranks = [works(), works({"compute": 2.0})]
    for at in range(60):
        judged = slowness.take(state, reports(ranks, steps=1000), StepNumber(at), Time(at / 2))
        found += [at / 2 for _ in judged.findings]
    assert found == [WINDOWS * (WINDOW_S + 0.5) - 0.5]


def test_steps_that_are_reported_late_are_counted_from_then_on() -> None:
    state = world(2)
    for name, count in (("data", 10), ("step", 1)):
        said = RankTimings(rank=Rank(0), timings=(timing(name, [1.0] * count),))
        assert take(state, said) == Judged()
    assert not state.full


def test_a_rank_that_is_silent_or_late_does_not_keep_the_others_from_being_judged() -> None:
    ranks = [works(), works({"compute": 2.0}), works()]
    state = world(3)
    found = []
    for at in range(10, 101, 10):
        for report in reports(ranks)[:2]:
            found += take(state, report, at).findings
    assert [f.rank for f in found] == [1]
    assert relative(state)[2] is None
    for report in reports(ranks):
        take(state, report)
    assert relative(state)[2] == pytest.approx(1.0)


def test_a_section_that_one_rank_lacks_still_counts_for_the_others() -> None:
    ranks = [works(), works(), works({"data": 100.0})]
    state = world(3)
    found = []
    for _ in range(WINDOWS):
        said = reports(ranks)
        said[0] = RankTimings(rank=Rank(0), timings=said[0].timings[1:])
        for report in said:
            found += take(state, report).findings
    assert [(f.rank, f.section) for f in found] == [(2, "data")]


def test_a_section_that_only_one_rank_has_counts_for_nobody() -> None:
    state = world(3)
    for _ in range(4):
        said = reports([works()] * 3)
        log = timing("log", [50.0] * 10, False)
        said[0] = RankTimings(rank=Rank(0), timings=(*said[0].timings, log))
        assert not any(take(state, report).findings for report in said)
    assert relative(state) == [1.0] * 3


def test_medians_of_zero_are_no_trouble() -> None:
    state = world(3)
    for _ in range(4):
        said = [
            RankTimings(rank=Rank(r), timings=(timing(name, [second] * 10),))
            for r, (name, second) in enumerate([("data", 0.0), ("data", 0.0), ("data", 1e-9)])
        ]
        for report in said:
            take(state, report)
    assert relative(state) == [None, None, 0.0]
    state = world(2)
    train(state, [dict.fromkeys(works(), 0.0)] * 2, 40, sections="data forward")
    assert relative(state) == [None, None]


def test_reports_of_ranks_that_are_not_in_the_round_are_dropped() -> None:
    state = world(2)
    for report in reports([works()] * 4):
        assert not take(state, report).findings
    assert set(slowness.scores(state)) == {0, 1}


# ---- overloaded hosts ----


def starved(report: RankTimings, queued_s: float, **more: float) -> RankTimings:
    shortage = CpuShortage(queued_s=queued_s, **more)
    return msgspec.structs.replace(report, shortage=shortage)


def test_a_rank_is_not_judged_by_a_window_in_which_its_host_had_no_cpu_for_it() -> None:
    state = world(3)
    ranks = [works(), works({"compute": 2.0}), works()]
    for _ in range(10):
        for report in reports(ranks):
            lacked_s = 20.0 if report.rank == 1 else 0.0
            assert not take(state, starved(report, lacked_s)).findings
    assert slowness.scores(state)[Rank(1)] == RankScores(None, None)
    assert relative(state)[0] == 1.0
    found = [f for r in reports(ranks) * WINDOWS for f in take(state, r).findings]
    assert [f.rank for f in found] == [1], "the load is gone, the rank is still slow"


def test_of_all_ranks_on_an_overloaded_host_none_is_judged() -> None:
    state = Stragglers()
    slowness.renew(state, {Rank(r): f"h{r // 2}" for r in range(4)}, StepNumber(0))
    ranks = [works(), works({"compute": 2.0}), works(), works({"compute": 2.0})]
    found: list[Finding] = []
    for _ in range(WINDOWS):
        for report in reports(ranks):
            lacked_s = 20.0 if report.rank == 0 else 0.0
            found += take(state, starved(report, lacked_s)).findings
    assert [f.rank for f in found] == [3]


def test_a_rank_that_waits_and_gets_few_cpus_excuses_only_itself() -> None:
    """Its own work is short, as it waits for a slow rank on the same host: so are its delays."""
    state = Stragglers()
    slowness.renew(state, {Rank(r): "h" for r in range(3)}, StepNumber(0))
    ranks = [works(), works(), works({"compute": 10.0})]
    sections = "data own-forward own-backward own-optimizer step"
    found: list[Finding] = []
    for report in reports(ranks, sections=sections) * WINDOWS:
        lacked_s = 0.5 * 3 * REPORT_STEPS if report.rank == 0 else 0.0
        found += take(state, starved(report, lacked_s)).findings
    assert [f.rank for f in found] == [2]
    assert relative(state)[0] == 1.0, "it is not slow, that much is known"


def test_a_best_time_is_not_learnt_while_there_is_too_little_cpu() -> None:
    state = world(1)
    for report in reports([works({"compute": 0.2})]) * 4:
        take(state, starved(report, 20.0))
    assert train(state, [works()], 80) == []
    assert individual(state) == [pytest.approx(1.0)]


@pytest.mark.parametrize("reason", ["queued", "throttled", "stolen"])
def test_an_overload_is_found_after_several_windows_and_ends_after_as_many(reason: str) -> None:
    state = world(2)

    def windows(share: float, count: int) -> list[tuple[str, bool]]:
        found = []
        for _ in range(count):
            for report in reports([works()] * 2, sections="data own-forward own-backward step"):
                taken_s = 3.35 * REPORT_STEPS
                lacked = {f"{reason}_s": share * taken_s} if report.rank == 0 else {}
                found += take(state, starved(report, **{"queued_s": 0.0, **lacked})).overloads
        return [(one.host, one.began) for one in found]

    assert windows(0.3, WINDOWS - 1) == []
    assert windows(0.0, 1) == []
    assert windows(0.3, WINDOWS) == [("h0", True)]
    shares = slowness.overload(state, "h0")
    assert shares is not None
    assert getattr(shares, reason) == shares.total == pytest.approx(0.3, abs=0.01)
    assert slowness.overload(state, "h1") is None
    assert windows(0.07, 5) == [], "neither overloaded nor relieved"
    assert slowness.overload(state, "h0") is not None
    assert windows(0.01, WINDOWS) == [("h0", False)]
    assert slowness.overload(state, "h0") is None


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


def under_load(
    hosts: list[float], dice: random.Random, noise: float, sections: str
) -> list[RankTimings]:
    """Healthy ranks, one on each host, that get a CPU for a part of their time."""
    ranks = [{k: v * load for k, v in works().items()} for load in hosts]
    said = reports(ranks, sections=sections, noise=noise, dice=dice)
    own_s = sum(works().values()) * REPORT_STEPS
    return [
        starved(report, (load - 1) * own_s * dice.uniform(0.9, 1.0))
        for report, load in zip(said, hosts, strict=True)
    ]


@settings(max_examples=60)
@given(
    st.integers(1, 6),
    st.lists(st.lists(st.just(1.0) | st.floats(1.0, 8.0), min_size=6, max_size=6), min_size=1),
    st.integers(0, 9999),
    st.sampled_from(["", "own-"]),
)
def test_healthy_ranks_are_never_slow_whatever_load_comes_and_goes(
    size: int, loads: list[list[float]], seed: int, own: str
) -> None:
    dice, state = random.Random(seed), world(size)
    sections = f"data {own}forward {own}backward {own}optimizer step"
    for hosts in loads * WINDOWS:
        for report in under_load(hosts[:size], dice, 0.1, sections):
            assert not take(state, report).findings


factors = st.floats(0.5, 4.0)


@settings(max_examples=60)
@given(st.lists(factors, min_size=2, max_size=6), st.integers(-20, 20), st.integers(0, 99))
def test_scores_do_not_depend_on_the_unit_of_time(slow: list[float], power: int, seed: int) -> None:
    scale = 2.0**power
    ranks = [works({"compute": factor}) for factor in slow]
    said = reports(ranks, noise=0.2, dice=random.Random(seed))
    plain, scaled = world(len(slow)), world(len(slow))
    for report in said * WINDOWS:
        found = take(plain, report)
        assert take(scaled, stretched(report, scale)) == found
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
            one += take(straight, a).findings
            two += take(shuffled, b).findings
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
        for finding in take(state, report).findings:
            assert 0 <= finding.score <= 1
        state = msgspec.json.decode(msgspec.json.encode(state), type=Stragglers)
    for scores in slowness.scores(state).values():
        for score in (scores.relative, scores.individual):
            assert score is None or 0 <= score <= 1
