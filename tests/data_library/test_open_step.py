"""Steps that were interrupted: who computes what is left, and what loaders hand out then."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds_of_loaders import Numbers, counted, loaders, together

from holdfast.data import ElasticDataLoader
from holdfast.data.lockstep import Division, Replicas
from holdfast.data.open_step import OpenStep, StepShare, go_on, share_out

WORLDS = st.integers(1, 7)
BATCHES = st.integers(1, 9)


@st.composite
def interrupted(draw: st.DrawFn) -> tuple[OpenStep, frozenset[int]]:
    """A step of which any positions are done."""
    start, size = draw(st.integers(0, 50)), draw(st.integers(1, 60))
    positions = range(start, start + size)
    done = draw(st.sets(st.sampled_from(positions)))
    return OpenStep(draw(st.integers(0, 3)), start, size, start + size), frozenset(done)


def shares(step: OpenStep, done: frozenset[int], world: int, batch: int) -> list[StepShare]:
    return [share_out(step, done, Replicas(world, rank), batch) for rank in range(world)]


@given(interrupted(), WORLDS, BATCHES)
def test_each_position_is_done_or_shared_out_once(
    case: tuple[OpenStep, frozenset[int]], world: int, batch: int
) -> None:
    step, done = case
    dealt = [p for share in shares(step, done, world, batch) for part in share.parts for p in part]
    assert sorted([*done, *dealt]) == list(step.positions)


@given(interrupted(), WORLDS, BATCHES)
def test_no_micro_batch_is_larger_than_the_setting(
    case: tuple[OpenStep, frozenset[int]], world: int, batch: int
) -> None:
    for share in shares(*case, world, batch):
        assert all(len(part) <= batch for part in share.parts)
        assert 1 <= len(share.filler) <= batch


@given(interrupted(), WORLDS, BATCHES)
def test_all_ranks_have_the_same_number_of_micro_batches_and_at_least_the_one_that_reduces(
    case: tuple[OpenStep, frozenset[int]], world: int, batch: int
) -> None:
    left = case[0].size - len(case[1])
    fewest = max(1, -(-left // (world * batch)))
    assert {len(share.parts) for share in shares(*case, world, batch)} == {fewest}


@given(interrupted(), WORLDS, BATCHES)
def test_ranks_get_equally_much_but_for_one_position(
    case: tuple[OpenStep, frozenset[int]], world: int, batch: int
) -> None:
    sizes = [sum(map(len, share.parts)) for share in shares(*case, world, batch)]
    assert max(sizes) - min(sizes) <= 1


@given(interrupted(), WORLDS, BATCHES)
def test_a_filler_counts_nothing_and_the_last_micro_batch_ends_the_step(
    case: tuple[OpenStep, frozenset[int]], world: int, batch: int
) -> None:
    for share in shares(*case, world, batch):
        plans = share.plans()
        assert [plan.info.records for plan in plans] == [len(part) for part in share.parts]
        assert [plan.info.index for plan in plans] == list(range(len(plans)))
        assert [plan.ends for plan in plans] == [False] * (len(plans) - 1) + [True]
        assert {plan.info.global_records for plan in plans} == {case[0].size}


def test_a_rank_that_goes_on_keeps_its_own_micro_batches() -> None:
    step = OpenStep(0, 8, 8, 16)
    share = go_on(step, [(12, 14)], 3, batch=2, kept=2)
    assert share.parts == ((12, 14), (), ())
    assert (share.filler, share.kept) == ((8, 9), 2)


@given(st.integers(1, 200), WORLDS, BATCHES, st.none() | st.integers(1, 40), st.integers(0, 20))
def test_a_step_as_it_is_told_is_the_one_that_is_planned(
    size: int, world: int, batch: int, step_size: int | None, start: int
) -> None:
    for rank in range(world):
        division = Division(
            start=min(start, size),
            stop=size,
            epoch=0,
            world=Replicas(world, rank),
            batch=batch,
            global_batch=step_size,
        )
        own = list(division.positions)
        for plan in division.plans():
            at = plan.info.position
            assert division.step_at(at) == (plan.info.global_records, plan.stop)
            part = division.parts_at(at, plan.info.global_records)[plan.info.index]
            assert list(part) == own[: plan.fresh]
            own = own[plan.fresh :]
        assert division.step_at(size) is None


# ---- loaders -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_each_record_comes_once_though_a_step_is_interrupted_and_the_world_changes(
    data: st.DataObject,
) -> None:
    size = data.draw(st.integers(1, 90), "size")
    start = data.draw(st.integers(0, size - 1), "start")
    terms: dict[str, Any] = {"global_batch": data.draw(st.integers(1, 30)), "shuffle": True}
    batch = data.draw(BATCHES, "batch")
    old = loaders(data.draw(WORLDS, "old world"), size, batch, **terms)
    new = loaders(data.draw(WORLDS, "new world"), size, batch, **terms)
    for loader in [*old, *new]:
        loader.load_state_dict({**loader.state_dict(), "position": start})
    step, done = interrupt(old, data)
    for rank, loader in enumerate(new):
        loader.open_steps.complete(share_out(step, done, Replicas(len(new), rank), batch))
    left = new[0].left
    batches = list(together(new))
    assert len(batches) == left
    order = old[0]._records.order(step.epoch)
    seen = [order.record(p) for p in [*range(start), *done]]
    seen += [record for one in batches for record in counted(one)]
    assert sorted(seen) == list(range(size))


def interrupt(world: list[ElasticDataLoader], data: st.DataObject) -> tuple[OpenStep, set[int]]:
    """Begin a step; return it, with what some ranks have done of it."""
    done: set[int] = set()
    steps = set()
    for loader in world:
        next(iter(loader))
        share = loader._place.current_share()
        assert share is not None
        steps.add(share.step)
        count = data.draw(st.integers(0, len(share.parts)), "done")
        done |= {p for part in share.parts[:count] for p in part}
    (step,) = steps
    return step, done


def test_a_share_is_handed_out_once_and_forgotten_after_its_step() -> None:
    (loader,) = loaders(1, 12, 2, global_batch=4)
    loader.open_steps.complete(share_out(OpenStep(0, 0, 4, 4), {1}, Replicas(1, 0), 2))
    assert [batch.tolist() for batch in islice(loader, 3)] == [[0, 2], [3], [4, 5]]
    loader.set_epoch(1)
    loader.set_epoch(0)
    assert [batch.tolist() for batch in islice(loader, 2)] == [[0, 1], [2, 3]]


def test_a_share_of_the_next_epoch_waits_for_it() -> None:
    (loader,) = loaders(1, 6, 2, global_batch=4)
    loader.load_state_dict({**loader.state_dict(), "position": 6})
    step = OpenStep(1, 0, 4, 4)
    assert loader._place.comes_to(step, 6)
    loader.open_steps.complete(share_out(step, {0, 1, 2}, Replicas(1, 0), 2))
    found = [[b.tolist() for b in loader] for _ in islice(loader.epochs(2), 1)]
    assert found == [[[3], [4, 5]]]


def test_a_share_that_was_begun_is_begun_again_by_the_next_iteration() -> None:
    (loader,) = loaders(1, 12, 2, global_batch=6)
    loader.open_steps.complete(share_out(OpenStep(0, 0, 6, 6), {0}, Replicas(1, 0), 2))
    assert next(iter(loader)).tolist() == [1, 2]
    assert next(iter(loader)).tolist() == [1, 2]


@pytest.mark.parametrize("more", [{"pad": True}, {"num_replicas": 2, "rank": 0}])
def test_loaders_whose_steps_follow_the_world_say_that_they_cannot(more: dict[str, Any]) -> None:
    loader = ElasticDataLoader(Numbers(12), 2, **more)
    next(iter(loader))
    assert not loader.open_steps.able
    assert loader.open_steps.current() is None
