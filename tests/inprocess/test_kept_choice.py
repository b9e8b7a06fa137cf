"""Which step ranks go on from, for any standing of theirs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.inprocess.kept.choice import (
    LivingChoice,
    LivingRefusal,
    RankStanding,
    choose,
    diverged,
)
from holdfast.inprocess.kept.keep import _decoded, _encoded

PARTS = st.sampled_from([11, 22])
STANDINGS = st.lists(
    st.builds(
        RankStanding,
        step=st.integers(-1, 4),
        whole=st.booleans(),
        spoilt=st.booleans(),
        needs=PARTS,
        holds=PARTS,
    ),
    min_size=1,
    max_size=6,
)


def held(standings: list[RankStanding], step: int, part: int) -> list[int]:
    return [
        rank
        for rank, one in enumerate(standings)
        if one.whole and one.step == step and one.holds == part
    ]


@given(STANDINGS)
def test_the_newest_step_is_chosen_that_is_held_for_every_rank(
    standings: list[RankStanding],
) -> None:
    possible = [
        step for step in range(5) if all(held(standings, step, one.needs) for one in standings)
    ]
    found = choose(standings)
    if not possible:
        assert isinstance(found, LivingRefusal)
        return
    assert isinstance(found, LivingChoice)
    assert found.step == max(possible)
    for rank, one in enumerate(standings):
        having = held(standings, found.step, one.needs)
        assert found.sources[rank] in having
        assert rank not in having or found.sources[rank] == rank


@given(STANDINGS)
def test_nothing_is_lost_only_if_no_step_was_finished_and_no_object_is_spoilt(
    standings: list[RankStanding],
) -> None:
    found = choose(standings)
    if isinstance(found, LivingRefusal):
        trained = any(one.step > 0 or one.spoilt for one in standings)
        assert found.nothing_lost == (not trained)


def test_ranks_without_state_are_shared_among_those_that_have_it() -> None:
    has, lacks = RankStanding(7, True, False, 11, 11), RankStanding(needs=11)
    found = choose([lacks, has, lacks, has, lacks])
    assert isinstance(found, LivingChoice)
    assert found.sources == {0: 1, 1: 1, 2: 3, 3: 3, 4: 1}


def test_only_holders_of_the_same_part_at_the_chosen_step_are_compared() -> None:
    one, other = RankStanding(7, True, False, 11, 11), RankStanding(7, True, False, 22, 22)
    behind = RankStanding(6, True, False, 11, 11)
    found = choose([one, other, behind, one])
    assert isinstance(found, LivingChoice)
    assert diverged(found, [one, other, behind, one], [5, 6, 0, 5]) is None
    told = diverged(found, [one, other, behind, one], [5, 6, 0, 9])
    assert told is not None
    assert told.startswith("ranks 0 and 3 both hold step 7")


@given(STANDINGS, st.text(max_size=300))
def test_a_standing_is_told_as_a_row_of_numbers(standings: list[RankStanding], text: str) -> None:
    for one in standings:
        told = RankStanding(one.step, one.whole, one.spoilt, one.needs, one.holds, text)
        found = _decoded(_encoded(told))
        assert all(-(1 << 63) <= number < 1 << 63 for number in _encoded(told))
        assert found.trouble == text.encode()[:192].decode(errors="ignore").rstrip("\0")
        assert (found.step, found.whole, found.needs) == (one.step, one.whole, one.needs)
