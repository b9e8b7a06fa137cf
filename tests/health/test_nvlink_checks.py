from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from fakenode import FakeNode
from hypothesis import given
from hypothesis import strategies as st

from holdfast.health.baseline import NvlinkSeen
from holdfast.health.judgement import Judgement
from holdfast.health.nvlink import WINDOWS, check_nvlink, judge_links
from holdfast.health.nvml import Gpu, Gpus, NvLink, NvmlRefusal

BAD = 15


def board(*gpus: Sequence[NvLink], name: str = "H100") -> Gpus:
    return Gpus(
        "570",
        tuple(Gpu(index=i, uuid=f"G{i}", name=name, links=tuple(g)) for i, g in enumerate(gpus)),
    )


def links(on: int, off: int = 0, replays: int = 0) -> list[NvLink]:
    return [NvLink(i, i < on, replays) for i in range(on + off)]


def looks(*boards: Gpus) -> list[Judgement]:
    found: list[Judgement] = []
    before: NvlinkSeen | None = None
    for each in boards:
        found.append(judge_links(each, before, BAD))
        seen = found[-1].seen
        before = seen if isinstance(seen, NvlinkSeen) else before
    return found


def test_gpus_without_links_are_unknown(fake: FakeNode) -> None:
    fake.gpus({"recovery": 0})
    assert check_nvlink(fake.node(), None).verdict == "unknown"


def test_links_that_were_never_wired_are_no_fault() -> None:
    assert looks(board(links(0, 4), links(0, 4)))[-1].verdict == "unknown"
    assert looks(board(links(4), links(4), links(0, 4)))[-1].verdict == "pass"
    assert looks(board(links(4, 8), links(4, 8)))[-1].verdict == "pass"


def test_a_gpu_with_fewer_links_than_its_like_fails() -> None:
    found = looks(board(links(18), links(17, 1)))[-1]
    assert found.verdict == "fail"
    assert "GPU 1 has 17 NVLinks on, its like 18: [17] are off" in found.reason


def test_a_link_that_went_off_fails_until_it_is_on_again() -> None:
    whole, broken = board(links(4)), board(links(3, 1))
    found = looks(whole, broken, broken, whole)
    assert [f.verdict for f in found] == ["pass", "fail", "fail", "pass"]
    assert "NVLink 3 was on and is off" in found[1].reason


@pytest.mark.parametrize(("grown", "verdict"), [(15, "pass"), (16, "fail")])
def test_errors_at_more_than_half_of_the_last_looks_fail(grown: int, verdict: str) -> None:
    counts = [0, *range(1, grown + 1)] + [grown] * (WINDOWS - grown)
    assert looks(*(board(links(2, replays=n)) for n in counts))[-1].verdict == verdict


def test_one_link_of_one_gpu_is_enough() -> None:
    boards = [board(links(2), [NvLink(0, True), NvLink(1, True, 0, n)]) for n in range(20)]
    found = looks(*boards)[-1]
    assert found.verdict == "fail"
    assert "GPU 1: NVLink 1 had errors at 19 of the last 30 looks" in found.reason


def test_a_burst_is_no_wear_however_large() -> None:
    assert looks(*(board(links(1, replays=n)) for n in (0, 0, 10**9, 10**9)))[-1].verdict == "pass"


@pytest.mark.parametrize(("error", "verdict"), [(999, "unknown"), (3, "pass"), (15, "fail")])
def test_a_counter_that_is_refused(error: int, verdict: str) -> None:
    link = NvLink(0, True, NvmlRefusal(error), NvmlRefusal(error))
    assert looks(board([link]))[-1].verdict == verdict


def test_a_state_that_is_refused_does_not_count_as_off() -> None:
    found = looks(board(links(2)), board([NvLink(0, True), NvLink(1, NvmlRefusal(999))]))
    assert found[-1].verdict == "unknown"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80))
def test_windows_are_what_a_plain_count_says(counts: list[int]) -> None:
    grew = [later > earlier for earlier, later in itertools.pairwise(counts)]
    found = looks(*(board(links(1, replays=n)) for n in counts))[-1]
    assert (found.verdict == "fail") == (sum(grew[-WINDOWS:]) > BAD)
