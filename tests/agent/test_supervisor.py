"""Orders that come twice, late or in one breath."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast, get_args
from unittest.mock import MagicMock

from holdfast.agent import supervisor
from holdfast.agent.supervisor import Supervisor
from holdfast.agent.worker_monitor import WorkerMonitor
from holdfast.clock import JobClock
from holdfast.messages.actions import EndProcess, Finish, NodeAction, StartWorkers, StopWorkers
from holdfast.messages.events import AnyEvent, NodeLeft, NodeReady, WorkerExited
from holdfast.messages.hangs import HangTerms
from holdfast.messages.records import Part
from holdfast.messages.units import NodeId, Rank, RoundNumber, Time

NODE = NodeId("a")


class FakeStarter:
    """Offers ports, and never gets a process for a rank."""

    def __init__(self) -> None:
        self.port = MagicMock(number=1)
        self.started: list[int] = []
        self.error: Exception | None = None

    async def start(self, part: Part, monitor: WorkerMonitor) -> None:
        self.started.append(part.round)
        if self.error is not None:
            raise self.error
        await asyncio.get_running_loop().create_future()

    def renew_port(self) -> None:
        self.port.number += 1


class Stage:
    """A supervisor on a node where nothing ever runs, and what it told."""

    def __init__(self) -> None:
        self.told: list[AnyEvent] = []
        self.busy = False
        """Whether it said so at the end of the scenario."""
        self.starter = FakeStarter()
        clock = JobClock()
        clock.adopt(Time(1000.0), 0.0)
        stream, snapshots = MagicMock(), MagicMock()
        stream.send = self.told.append
        snapshots.when_settled = lambda limit_s, act: act()
        self.supervisor = Supervisor(
            node=NODE,
            clock=clock,
            stream=stream,
            table=MagicMock(),
            pool=MagicMock(),
            snapshots=snapshots,
            starter=cast(Any, self.starter),
            tester=MagicMock(),
            hang_terms=HangTerms(),
            save_deadline_s=1.0,
        )

    def start(self, round: int) -> None:
        self.supervisor.act(StartWorkers(id="start", node=NODE, part=part(round)))

    def stop(self, round: int) -> None:
        stop = StopWorkers(id="stop", node=NODE, round=RoundNumber(round), grace_s=1.0, why="")
        self.supervisor.act(stop)

    def end_process(self, round: int, rank: int) -> None:
        order = EndProcess(id="end", node=NODE, round=RoundNumber(round), rank=Rank(rank))
        self.supervisor.act(order)

    def finish(self) -> None:
        self.supervisor.act(Finish(id="finish", node=NODE, code=0, reason="", grace_s=1.0))


def part(round: int) -> Part:
    return Part(
        round=RoundNumber(round),
        first_rank=Rank(0),
        slots=1,
        world_size=1,
        first_role_rank=0,
        role_size=1,
        group_rank=0,
        group_world_size=1,
        store_address="127.0.0.1",
        store_port=1,
        restarts=0,
        max_restarts=0,
    )


def play(scenario: Callable[[Stage], Coroutine[Any, Any, None]]) -> Stage:
    async def run() -> Stage:
        stage = Stage()
        await scenario(stage)
        stage.busy = stage.supervisor.busy
        return stage

    return asyncio.run(run())


def ready(stage: Stage) -> list[tuple[int, int]]:
    return [(told.round, told.store_port) for told in stage.told if isinstance(told, NodeReady)]


def test_a_start_that_comes_twice_or_late_starts_nothing() -> None:
    async def scenario(stage: Stage) -> None:
        for round in (2, 2, 1):
            stage.start(round)
            await asyncio.sleep(0)

    stage = play(scenario)
    assert stage.starter.started == [2]
    assert stage.busy


def test_a_round_that_is_stopped_before_it_could_begin_leaves_the_node_idle() -> None:
    async def scenario(stage: Stage) -> None:
        stage.start(1)
        stage.stop(1)
        await asyncio.sleep(0.01)

    stage = play(scenario)
    assert stage.starter.started == []
    assert ready(stage) == [(1, 2)]
    assert not stage.busy


def test_a_stop_that_comes_again_is_answered_with_the_same_port() -> None:
    async def scenario(stage: Stage) -> None:
        stage.start(1)
        await asyncio.sleep(0)
        stage.stop(1)
        stage.stop(1)

    assert ready(play(scenario)) == [(1, 2), (1, 2)]


def test_a_stop_of_another_round_does_nothing() -> None:
    async def scenario(stage: Stage) -> None:
        stage.start(2)
        await asyncio.sleep(0)
        stage.stop(1)

    stage = play(scenario)
    assert stage.told == []
    assert stage.busy


def test_what_follows_from_an_order_names_it() -> None:
    async def scenario(stage: Stage) -> None:
        stage.starter.error = OSError("no memory")
        stage.start(1)
        await asyncio.sleep(0.01)
        stage.stop(1)
        stage.finish()

    told = play(scenario).told
    assert [(type(event), event.cause) for event in told] == [
        (WorkerExited, "start"),
        (NodeReady, "stop"),
        (NodeLeft, "finish"),
    ]


def test_a_process_is_ended_only_in_the_round_that_the_order_names() -> None:
    worker = MagicMock()

    async def scenario(stage: Stage) -> None:
        stage.start(2)
        await asyncio.sleep(0)
        stage.supervisor._workers.running[Rank(0)] = worker
        for round, rank in ((1, 0), (2, 1)):
            stage.end_process(round, rank)
        worker.end_process.assert_not_called()
        stage.end_process(2, 0)

    play(scenario)
    worker.end_process.assert_called_once_with()


def test_there_is_a_way_to_carry_out_every_order() -> None:
    assert set(supervisor._ORDERS) == set(get_args(NodeAction))


def test_finish_is_the_last_order() -> None:
    async def scenario(stage: Stage) -> None:
        stage.finish()
        stage.start(1)
        stage.stop(1)
        stage.finish()
        await asyncio.sleep(0)

    stage = play(scenario)
    assert [type(told) for told in stage.told] == [NodeLeft]
    assert stage.supervisor.finished.result().code == 0
    assert stage.starter.started == []


def test_an_order_to_stop_a_round_that_the_node_never_had_ends_what_it_has() -> None:
    """Otherwise a round that only another node knows of would be stopping for ever."""

    async def scenario(stage: Stage) -> None:
        stage.start(1)
        await asyncio.sleep(0)
        stage.stop(7)
        await asyncio.sleep(0.01)

    stage = play(scenario)
    assert ready(stage) == [(7, 2)]
    assert not stage.busy
