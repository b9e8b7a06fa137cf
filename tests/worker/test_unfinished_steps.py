"""A step that was interrupted is completed: by real gloo ranks, some of which are killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changing_worlds import BATCH, GLOBAL_BATCH, SIZE, STEPS, Fault, train

FOUR = (0, 1, 2, 3)
PASSES = GLOBAL_BATCH // BATCH
"""Micro-batches of a step, on all ranks together."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train([FOUR], tmp_path_factory.mktemp("undisturbed"))


Check = Callable[[list[dict[str, Any]], float], None]


@pytest.fixture
def check(undisturbed: list[dict[str, Any]]) -> Check:
    def compare(ranks: list[dict[str, Any]], bound: float) -> None:
        for found in ranks:
            assert found["samples"] == STEPS * GLOBAL_BATCH
            for key, value in undisturbed[0]["model"].items():
                if bound:
                    torch.testing.assert_close(found["model"][key], value, rtol=0, atol=bound)
                else:
                    assert torch.equal(found["model"][key], value), key

    return compare


def computed_in(ranks: list[dict[str, Any]], step: int, entry: int) -> Counter[int]:
    """Records whose gradients these ranks computed in an entry for that step."""
    every = (one for found in ranks for one in found["computed"])
    return Counter(record for e, s, record in every if (e, s) == (entry, step))


def test_an_exception_costs_one_micro_batch_and_no_bit(check: Check, tmp_path: Path) -> None:
    ranks = train([FOUR, FOUR], tmp_path, Fault(1, 2, 2, "forward", kill=False))
    check(ranks, 0.0)
    assert [found["restored"].step for found in ranks] == [2] * 4
    first, again = computed_in(ranks, 2, 0), computed_in(ranks, 2, 1)
    # The others had finished all of theirs when the reduction failed.
    assert first.total() == GLOBAL_BATCH - 2 * BATCH
    assert again.total() == 2 * BATCH
    assert max((first + again).values()) == 1


def test_a_killed_ranks_micro_batches_are_shared_out_over_its_successor_and_the_survivors(
    check: Check, tmp_path: Path
) -> None:
    ranks = train([FOUR, (0, 1, 4, 3)], tmp_path, Fault(2, 1, 2, "forward"))
    check(ranks, 1e-6)
    survivors = [found for rank, found in enumerate(ranks) if rank != 2]
    assert computed_in(survivors, 1, 0).total() == GLOBAL_BATCH * 3 // 4
    again = computed_in(ranks, 1, 1)
    assert again.total() == GLOBAL_BATCH // 4
    assert set(again.values()) == {1}
    assert not again.keys() & computed_in(survivors, 1, 0).keys()
    assert all(found["restored"].records_done == GLOBAL_BATCH * 3 // 4 for found in ranks)


def test_a_world_that_shrinks_completes_the_step_with_the_same_result(
    check: Check, tmp_path: Path
) -> None:
    ranks = train([FOUR, (0, 2, 3)], tmp_path, Fault(1, 4, 2, "forward"))
    check(ranks, 1e-6)
    once = computed_in(ranks, 4, 0) + computed_in(ranks, 4, 1)
    assert (once.total(), set(once.values())) == (GLOBAL_BATCH, {1})


def test_a_world_that_grows_completes_the_step_with_the_same_result(
    check: Check, tmp_path: Path
) -> None:
    ranks = train([(0, 1, 2), FOUR], tmp_path, Fault(1, 3, 1, "forward", kill=False))
    check(ranks, 1e-6)
    once = computed_in(ranks, 3, 0) + computed_in(ranks, 3, 1)
    assert (once.total(), set(once.values())) == (GLOBAL_BATCH, {1})


def test_a_step_that_is_interrupted_twice_is_completed(check: Check, tmp_path: Path) -> None:
    faults = [Fault(1, 2, 3, "forward"), Fault(3, 2, 0, "forward", entry=1)]
    ranks = train([FOUR, (0, 2, 3), (0, 2)], tmp_path, *faults)
    check(ranks, 1e-6)
    survivors = sum((computed_in(ranks, 2, entry) for entry in range(3)), Counter[int]())
    assert (survivors.total(), set(survivors.values())) == (GLOBAL_BATCH, {1})


def test_objects_made_anew_take_the_gradients_over(check: Check, tmp_path: Path) -> None:
    fault = Fault(1, 2, 2, "forward", kill=False)
    ranks = train([FOUR, FOUR], tmp_path, fault, remake=True)
    check(ranks, 0.0)
    assert computed_in(ranks, 2, 1).total() == 2 * BATCH


def test_gradients_are_whole_though_only_some_buckets_were_reduced(
    check: Check, tmp_path: Path
) -> None:
    fault = Fault(1, 2, 3, "buckets")
    ranks = train([FOUR, (0, 4, 2, 3)], tmp_path, fault, bucket_mb=1e-5)
    check(ranks, 1e-6)
    assert computed_in(ranks, 2, 1).total() == GLOBAL_BATCH // 4


def test_a_torn_backward_pass_costs_this_ranks_micro_batches_alone(
    check: Check, tmp_path: Path
) -> None:
    fault = Fault(1, 2, 2, "backward", kill=False)
    ranks = train([FOUR, FOUR], tmp_path, fault)
    check(ranks, 0.0)
    assert computed_in(ranks, 2, 1).total() == GLOBAL_BATCH // 4


def test_a_fault_after_the_reduction_is_made_good(check: Check, tmp_path: Path) -> None:
    """Some ranks may have taken the step by then, and the others get their state."""
    ranks = train([FOUR, FOUR], tmp_path, Fault(1, 2, 3, "reduced", kill=False))
    check(ranks, 1e-6)


def test_redo_begins_the_step_again_and_loses_no_bit(check: Check, tmp_path: Path) -> None:
    fault = Fault(2, 1, 2, "forward")
    ranks = train([FOUR, (0, 1, 4, 3)], tmp_path, fault, unfinished="redo")
    check(ranks, 0.0)
    assert computed_in(ranks, 1, 1).total() == GLOBAL_BATCH


def test_completing_a_step_takes_fewer_passes_than_redoing_it(tmp_path: Path) -> None:
    fault, worlds = Fault(2, 1, 2, "forward"), [FOUR, (0, 1, 4, 3)]
    passes = {
        kind: sum(r["passes"][1] for r in train(worlds, tmp_path / kind, fault, unfinished=kind))
        for kind in ("share", "redo")
    }
    left = (STEPS - 1) * PASSES
    assert passes == {"share": left - PASSES + 4, "redo": left}


def test_rank_zero_can_be_the_one_that_is_killed(check: Check, tmp_path: Path) -> None:
    ranks = train([FOUR, (4, 1, 2, 3)], tmp_path, Fault(0, 5, 1, "forward"))
    check(ranks, 1e-6)
    assert SIZE * 2 == STEPS * GLOBAL_BATCH
    assert computed_in(ranks, 5, 1).total() == GLOBAL_BATCH // 4
