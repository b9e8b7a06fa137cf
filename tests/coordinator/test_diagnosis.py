"""What all agents saw comes together once; nobody waits for it for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.coordinator import diagnosis
from holdfast.coordinator.diagnosis import Examinations, fitting
from holdfast.messages import wire
from holdfast.messages.evidence import Frame, RankEvidence, ThreadStack, Verdict
from holdfast.messages.units import NodeId, Rank, RoundNumber
from holdfast.messages.wire import Why
from holdfast.wire.framing import MAX_FRAME_BYTES

A, B = NodeId("a"), NodeId("b")
Closed = list[tuple[Verdict, list[RankEvidence]]]


def seen(node: NodeId, rank: int, function: str = "load", state: str = "S") -> RankEvidence:
    frame = Frame(file="train.py", line=7, function=function)
    main = ThreadStack(name="MainThread", frames=(frame,))
    return RankEvidence(
        node=node,
        round=RoundNumber(1),
        rank=Rank(rank),
        pid=100 + rank,
        process_state=state,  # type: ignore[arg-type]
        stacks=(main,),
        stack_source="py-spy",
    )


def told(number: int, *evidence: RankEvidence, more: bool = False) -> wire.EvidenceTaken:
    return wire.EvidenceTaken(examination=number, evidence=evidence, more=more)


def holding(
    folder: Path, scenario: Callable[[Examinations, Closed], Coroutine[Any, Any, None]]
) -> None:
    closed: Closed = []
    asyncio.run(scenario(Examinations(folder), closed))


def opened(
    held: Examinations, closed: Closed, number: int = 1, nodes: tuple[NodeId, ...] = (A, B)
) -> None:
    held.open(number, nodes, 4, (), lambda verdict, evidence: closed.append((verdict, evidence)))


def test_it_is_over_when_every_node_has_told_all_it_saw(tmp_path: Path) -> None:
    async def scenario(held: Examinations, closed: Closed) -> None:
        opened(held, closed)
        held.add(B, told(1, seen(B, 3, state="T"), more=True))
        held.add(B, told(1, seen(B, 2)))
        assert closed == []
        held.add(A, told(1, seen(A, 1)))
        ((verdict, evidence),) = closed
        assert [each.rank for each in evidence] == [1, 2, 3]
        assert verdict.guilty == (3,)
        assert "is stopped" in verdict.sentence

    holding(tmp_path, scenario)


def test_what_was_seen_is_kept_with_the_incident(tmp_path: Path) -> None:
    async def scenario(held: Examinations, closed: Closed) -> None:
        opened(held, closed, number=7, nodes=(A,))
        held.add(A, told(7, seen(A, 0), seen(A, 1, state="T")))
        assert list(tmp_path.iterdir()) == [], "a suspicion is no incident"
        held.keep(7, incident=2)
        folder = tmp_path / "2"
        assert sorted(path.name for path in folder.iterdir()) == [
            "rank_0.json",
            "rank_1.json",
            "verdict.json",
        ]
        kept = msgspec.json.decode((folder / "rank_1.json").read_bytes(), type=RankEvidence)
        assert kept == closed[0][1][1]
        verdict = msgspec.json.decode((folder / "verdict.json").read_bytes(), type=Verdict)
        assert verdict == closed[0][0]

    holding(tmp_path, scenario)


def test_who_only_asks_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario(held: Examinations, closed: Closed) -> None:
        opened(held, closed, number=-3, nodes=(A,))
        held.add(A, told(-3))
        ((verdict, evidence),) = closed
        assert evidence == []
        assert verdict.sentence.startswith("unknown")
        assert list(tmp_path.iterdir()) == []

    holding(tmp_path, scenario)


def test_when_its_time_is_up_it_says_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "LIMIT_S", 0.02)

    async def scenario(held: Examinations, closed: Closed) -> None:
        opened(held, closed)
        held.add(A, told(1, seen(A, 1, state="T"), more=True))
        while not closed:
            await asyncio.sleep(0.005)
        assert closed[0][0].guilty == (1,)
        held.add(B, told(1, seen(B, 2)))
        assert len(closed) == 1

    holding(tmp_path, scenario)


def test_what_is_still_being_looked_at_is_kept_once_it_was_seen(tmp_path: Path) -> None:
    async def scenario(held: Examinations, closed: Closed) -> None:
        opened(held, closed, nodes=(A,))
        held.keep(1, incident=5)
        held.add(A, told(1, seen(A, 1, state="T")))
        assert (tmp_path / "5" / "rank_1.json").exists()

    holding(tmp_path, scenario)


def test_without_a_node_to_ask_nothing_is_known(tmp_path: Path) -> None:
    async def scenario(held: Examinations, closed: Closed) -> None:
        opened(held, closed, nodes=())
        await asyncio.sleep(0)
        ((verdict, evidence),) = closed
        assert (verdict.guilty, evidence) == ((), [])

    holding(tmp_path, scenario)


def test_who_was_not_asked_or_speaks_for_another_is_not_heard(tmp_path: Path) -> None:
    async def scenario(held: Examinations, closed: Closed) -> None:
        opened(held, closed, nodes=(A,))
        held.add(B, told(1, seen(B, 3)))
        held.add(A, told(99, seen(A, 1)))
        held.add(A, told(1, seen(A, 1), seen(B, 2)))
        assert [each.rank for each in closed[0][1]] == [1]

    holding(tmp_path, scenario)


def test_a_full_disk_does_not_cost_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("in the way")

    async def scenario(held: Examinations, closed: Closed) -> None:
        opened(held, closed, nodes=(A,))
        held.keep(1, incident=1)
        held.add(A, told(1, seen(A, 1, state="T")))
        assert closed[0][0].guilty == (1,)

    holding(tmp_path, scenario)


def test_an_answer_is_cut_until_it_fits_into_a_frame() -> None:
    long = ThreadStack(
        name="MainThread",
        frames=tuple(Frame(file="f" * 400, line=n, function="g" * 400) for n in range(120)),
    )
    evidence = tuple(msgspec.structs.replace(seen(A, rank), stacks=(long,)) for rank in range(200))
    verdict = Verdict(guilty=(), sentence="unknown")
    whole = Why(verdict=verdict, evidence=evidence, suspicion=None, detects=True)
    cut = fitting(whole)
    assert len(msgspec.msgpack.encode(cut)) <= MAX_FRAME_BYTES < len(msgspec.msgpack.encode(whole))
    assert cut.verdict == whole.verdict
    assert 0 < len(cut.evidence) < 200
