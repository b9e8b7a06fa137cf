"""Waits for ranks that are gone are ended, and groups can be made anew: with real gloo ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
from group_ranks import INNOCENTS, KINDS, ROOT, Line, playing

from holdfast.inprocess import groups

pytest.importorskip("torch.distributed")

FREED_S = 20.0
"""Far less than any wait in here, far more than leaving takes on a busy machine; `bench/inprocess.py`
says how long that is."""


@pytest.fixture(scope="module")
def blocked() -> Iterator[dict[str, Line]]:
    """What rank 0 saw in each kind of wait; rank 1 stays alive and silent."""
    with playing("blocked", 2, len(KINDS)) as (first, second):
        seen = {}
        for kind in KINDS:
            seen[kind] = first.said()
            second.go_on()
        seen["innocents"] = first.said()
        yield seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_whose_peer_is_silent_is_freed(blocked: dict[str, Line], kind: str) -> None:
    print(kind, blocked[kind])
    assert blocked[kind]["waited"]
    assert blocked[kind]["left_s"] < FREED_S


def test_connections_of_others_survive(blocked: dict[str, Line]) -> None:
    assert blocked["innocents"] == dict.fromkeys(INNOCENTS, True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pair_that_never_connected_is_freed(rank: int) -> None:
    with playing("lazy", 2, 1, TORCH_GLOO_LAZY_INIT="1", BLOCKED=str(rank)) as ranks:
        line = ranks[rank].said()
        print(line)
        assert line["waited"]
        assert line["left_s"] < FREED_S


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_peer_never_came_is_freed(rank: int) -> None:
    with playing("alone", 2, 1, [rank]) as (one,):
        line = one.said()
        print(line)
        assert line["waited"]
        assert line["left_s"] < FREED_S


def test_a_client_that_a_store_had_before_survives() -> None:
    """As under torchrun, whose store this process may use for other things."""
    with playing("shared", 2, 1, [1], TORCHELASTIC_USE_AGENT_STORE="True") as (one,):
        line = one.said()
        assert line["waited"]
        assert line["left_s"] < FREED_S
        assert line["answered"]


def test_fifty_rounds_leave_nothing_behind() -> None:
    with playing("rounds", 2, 50) as ranks:
        lines = [[rank.said() for _ in range(50)] for rank in ranks]
    for seen in lines:
        for name in ("left_s", "forget_s", "init_s", "step_s"):
            times = sorted(line[name] for line in seen[1:])
            print(f"{name}: median {times[25] * 1e3:.1f} ms, worst {times[-1] * 1e3:.1f} ms")
        print("resident KiB", [line["resident_kib"] for line in seen[::7]])
        assert len({line["threads"] for line in seen[1:]}) == 1
        assert len({line["descriptors"] for line in seen[1:]}) == 1
        assert seen[-1]["resident_kib"] - seen[9]["resident_kib"] < 3000


def test_meshes_and_fsdp_can_be_made_anew_under_the_same_names() -> None:
    with playing("fsdp", 2, 4) as ranks:
        lines = [[rank.said() for _ in range(4)] for rank in ranks]
    for seen in lines:
        print([round(line["forget_s"] * 1e3, 1) for line in seen])
        assert len({str(line["names"]) for line in seen}) == 1
        assert len({line["loss"] for line in seen}) == 1
        assert len({(line["threads"], line["descriptors"]) for line in seen[1:]}) == 1


def test_the_others_go_on_without_a_rank_that_was_killed() -> None:
    with playing("killed", 4, 2) as ranks:
        for rank in ranks:
            rank.said()
        ranks[0].process.kill()
        for rank in ranks[1:]:
            line = rank.said()
            print(line)
            assert line["left_s"] < FREED_S
            assert line["sum"] == 3


def test_a_collective_that_nobody_waited_for_leaves_nothing_behind() -> None:
    with playing("functional", 2, 4) as ranks:
        lines = [ranks[0].said() for _ in range(4)]
    assert {line["works"] for line in lines} == {0}
    assert len({(line["threads"], line["descriptors"]) for line in lines[1:]}) == 1


def test_frames_of_an_exception_let_go_of_what_they_hold() -> None:
    class Held:
        pass

    references = []

    def inner() -> None:
        held = Held()
        references.append(weakref.ref(held))
        raise ValueError("inner")

    def outer() -> None:
        held = Held()
        references.append(weakref.ref(held))
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("outer") from error

    caught: BaseException | None = None
    try:
        outer()
    except RuntimeError as error:
        caught = error
    assert all(one() is not None for one in references)
    groups.drop_frames(caught)
    assert all(one() is None for one in references)
    assert str(caught) == "outer"


def test_without_torch_there_is_nothing_to_do() -> None:
    code = (
        "import sys\n"
        "from holdfast.inprocess import groups\n"
        "assert groups.abort_groups()\n"
        "groups.forget_groups()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )
