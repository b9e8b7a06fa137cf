"""Ranks that called different collectives are told apart from those that only look different."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.collectives import Difference, difference, odd_dead
from holdfast.messages.evidence import Collective


def called(op: str = "gloo:all_reduce", number: int = 4, **more: Any) -> Collective:
    return Collective(
        **{"group": "0", "state": "scheduled", "age_s": 2.0, "op": op, "number": number, **more}
    )


def between(*calls: Collective | list[Collective]) -> Difference | None:
    """The difference between ranks that made these calls."""
    noted = {r: c if isinstance(c, list) else [c] for r, c in enumerate(calls)}
    return difference("0", noted, range(len(calls)))


def test_different_operations_under_one_number_never_meet() -> None:
    found = between(called(), called("gloo:barrier"), called())
    assert found is not None
    assert (found.number, found.odd, found.certain) == (4, (1,), True)
    assert found.calls == {"all_reduce": (0, 2), "barrier": (1,)}


def test_an_all_reduce_of_another_size_under_gloo_never_meets_the_others() -> None:
    found = between(*[called(sizes=f"Float[{n}]") for n in (3, 3, 5000)])
    assert found is not None
    assert (found.odd, found.certain) == ((2,), True)
    in_nccl = between(*[called("nccl:all_reduce", sizes=f"Float[{n}]") for n in (3, 3, 5)])
    assert in_nccl is not None
    assert not in_nccl.certain, "NCCL may finish it"


@pytest.mark.parametrize(
    "calls",
    [
        [called(sizes="Float[2, 3]"), called(sizes="Float[6]")],
        [called("gloo:all_gather", sizes="Float[3]"), called("gloo:all_gather", sizes="Float[5]")],
        [called("nccl:all_gather"), called("nccl:_all_gather_base")],
        [called("nccl:all_to_all", sizes="Float[3]"), called("nccl:all_to_all_single")],
        [called("gloo:send 0->1"), called("gloo:recv 1<-0")],
        [[called("nccl:all_reduce"), called("nccl:broadcast")], called("nccl:all_reduce")],
    ],
    ids=["shapes", "uneven", "all_gather", "all_to_all", "point to point", "coalesced"],
)
def test_what_meets_is_no_difference(calls: list[Any]) -> None:
    assert between(*calls) is None


@pytest.mark.parametrize(
    "calls",
    [
        [called(), called("gloo:barrier", age_s=0.1)],
        [called(), called("gloo:barrier", age_s=None)],
        [called("custom:all_reduce"), called("custom:barrier")],
        [called("gloo:all_reduce"), called("gloo:my_op")],
        [called(state="completed"), called("gloo:barrier", state="completed")],
        [[called("nccl:reduce"), called("nccl:scatter")], called("nccl:gather")],
        [called("gloo:broadcast", sizes="Float[3]"), called("gloo:broadcast", sizes="Float[5]")],
    ],
    ids=["a moment", "age", "backend", "operation", "finished", "coalesced", "broadcast"],
)
def test_what_may_be_explained_otherwise_is_not_certain(calls: list[Any]) -> None:
    found = between(*calls)
    assert found is not None
    assert not found.certain


def test_while_a_member_is_missing_nothing_is_certain() -> None:
    found = difference("0", {0: [called()], 1: [called("gloo:barrier")]}, range(3))
    assert found is not None
    assert not found.certain


def test_two_that_differ_have_no_majority() -> None:
    found = between(called(), called("gloo:barrier"))
    assert found is not None
    assert (found.odd, found.certain) == ((), True)


# ---- among the dead ----


def test_of_ranks_that_died_together_the_odd_one_is_the_cause() -> None:
    """Four gloo ranks: one passed 5000 elements; rank 0, which received them, was aborted."""
    last = {1: [called(sizes="Float[5000]")], 2: [called(sizes="Float[3]")]}
    last[3] = last[2]
    assert odd_dead(last, silent=[0])[0] == (1,)


def test_the_one_that_was_aborted_is_the_cause_if_all_others_agree() -> None:
    """Four gloo ranks: one passed 5 elements where the others passed 3000, and was aborted."""
    last = {r: [called(sizes="Float[3000]")] for r in (0, 2, 3)}
    assert odd_dead(last, silent=[1]) == ((1,), None)
    assert odd_dead(last) == ((), None), "none of them was aborted"
    assert odd_dead({2: last[2]}, silent=[1]) == ((), None), "one alone agrees with anybody"
    assert odd_dead(last, silent=[1, 4]) == ((), None)


def test_of_two_that_differ_none_is_named_but_the_difference_is() -> None:
    odd, found = odd_dead({0: [called(sizes="Float[3]")], 1: [called(sizes="Float[5]")]})
    assert odd == ()
    assert found is not None
    assert found.calls == {"all_reduce of Float[3]": (0,), "all_reduce of Float[5]": (1,)}


def test_the_newest_collectives_of_several_groups_are_compared_group_by_group() -> None:
    last = {r: [called(group="1", number=9), called(number=7)] for r in range(3)}
    last[1] = [called(group="1", number=9), called("gloo:barrier", number=7)]
    assert odd_dead(last)[0] == (1,)
