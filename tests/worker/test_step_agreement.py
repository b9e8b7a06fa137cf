"""How ranks agree on completing a step that was interrupted, each by itself."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.data.open_step import OpenStep
from holdfast.worker.elastic.unfinished import StepStanding, agree

STEP = OpenStep(epoch=1, start=64, size=32, stop=96)


def standing(rank: int, done: int = 4, **more: Any) -> StepStanding:
    """One of four ranks, which have eight positions each in micro-batches of two."""
    given: dict[str, Any] = {
        "able": True,
        "batch": 2,
        "known": True,
        "step": STEP,
        "base": 4,
        "done": done,
        "left": 8 - done,
        "parts": (8 - done) // 2,
        "world": 4,
        "rank": rank,
        **more,
    }
    return StepStanding(**given)


FRESH = StepStanding(able=True, batch=2)


def test_ranks_that_are_all_there_go_on_with_their_own_until_the_slowest_is_done() -> None:
    agreed = agree([standing(0, 8), standing(1, 2), standing(2, 4), standing(3, 0)])
    assert agreed is not None
    assert (agreed.own, agreed.done) == (4, 14)


def test_at_least_one_micro_batch_is_left_because_it_reduces() -> None:
    agreed = agree([standing(rank, 8) for rank in range(4)])
    assert agreed is not None
    assert agreed.own == 1


def test_what_a_fresh_rank_lacks_is_shared_out() -> None:
    agreed = agree([standing(0), FRESH, standing(2), standing(3)])
    assert agreed is not None
    assert (agreed.own, agreed.done, agreed.base) == (0, 12, 4)


def test_another_world_or_other_ranks_share_out() -> None:
    for rows in (
        [standing(0), standing(2), standing(3)],
        [standing(1), standing(0), standing(2), standing(3)],
        [*(standing(rank) for rank in range(4)), FRESH],
        [standing(0), standing(1, left=2, parts=1), standing(2), standing(3)],
    ):
        agreed = agree(rows)
        assert agreed is not None
        assert agreed.own == 0


def test_the_smallest_micro_batch_of_all_holds() -> None:
    agreed = agree([standing(0, batch=8), replace(FRESH, batch=3)])
    assert agreed is not None
    assert agreed.batch == 3


def test_a_step_begins_anew_where_nothing_is_done_or_ranks_do_not_fit() -> None:
    assert agree([FRESH, FRESH]) is None
    assert agree([standing(0, 0), standing(1, 0)]) is None
    assert agree([standing(0), replace(standing(1), able=False)]) is None
    assert agree([standing(0), standing(1, step=replace(STEP, start=32))]) is None
    assert agree([standing(0), standing(1, base=3)]) is None


@given(st.lists(st.integers(0, 8), min_size=1, max_size=9), st.booleans(), st.integers(1, 99))
def test_a_standing_survives_its_row(done: list[int], able: bool, batch: int) -> None:
    for rank, count in enumerate(done):
        one = standing(rank, count, able=able, batch=batch)
        assert StepStanding.of_row(one.row()) == one
