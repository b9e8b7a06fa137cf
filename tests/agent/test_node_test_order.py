"""Orders to test the node, and the one answer that each gets."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, cast

from holdfast.agent import nodecheck as testing
from holdfast.agent.processes import Exit
from holdfast.agent.standbys import Pool
from holdfast.clock import JobClock
from holdfast.messages import actions, local
from holdfast.messages.events import NodeTested
from holdfast.messages.local import FromWorker
from holdfast.messages.units import NodeId, Time

NODE = NodeId("a")
SOLO = local.Tested(solo_passed=True, solo_s=0.01, over=False)
PASSED = local.Tested(solo_passed=True, solo_s=0.01, passed=True, seconds=0.02)


class FakeProcess:
    """Dies when it is killed, a moment later."""

    def __init__(self) -> None:
        self.exit: Exit | None = None
        self.on_exit: Callable[[Exit], None] = lambda end: None

    def send(self, number: signal.Signals) -> None:
        asyncio.get_running_loop().call_soon(self.die, Exit(signal=number))

    def die(self, end: Exit) -> None:
        if self.exit is None:
            self.exit = end
            self.on_exit(end)


class FakeStandby:
    def __init__(self) -> None:
        self.process = FakeProcess()
        self.hear: Callable[[FromWorker], None] = lambda message: None
        self.given: local.Test | None = None
        self.fds: list[int] = []

    def order(self, message: local.Test, fds: list[int]) -> None:
        self.given, self.fds = message, fds

    def read_all(self) -> None:
        pass

    def close(self) -> None:
        pass


class Stage:
    """A tester, the processes it was given, and what it reported."""

    def __init__(self) -> None:
        self.standbys: list[FakeStandby] = []
        self.told: list[NodeTested] = []
        self.give = asyncio.Event()
        self.give.set()
        clock = JobClock()
        clock.adopt(Time(1000.0), 0.0)
        self.tester = testing.NodeTester(
            NODE, "127.0.0.1", cast(Pool, self), clock, self.told.append
        )

    async def extra(self) -> FakeStandby:
        await self.give.wait()
        self.standbys.append(FakeStandby())
        return self.standbys[-1]

    def refill(self) -> None:
        pass

    def order(self, check: int = 1, round: int = 1, rank: int = 0, size: int = 2) -> None:
        self.tester.act(
            actions.TestNode(
                id=f"{check}.{round}",
                node=NODE,
                check=check,
                round=round,
                group=3,
                rank=rank,
                size=size,
                address="127.0.0.1",
                port=7000,
                limit_s=0.05,
            )
        )

    async def given(self, count: int = 1) -> FakeStandby:
        """The process of that many tests, once it knows what to do."""
        while len(self.standbys) < count or self.standbys[count - 1].given is None:
            await asyncio.sleep(0)
        return self.standbys[count - 1]

    async def answers(self, count: int = 1) -> list[NodeTested]:
        while len(self.told) < count:
            await asyncio.sleep(0.001)
        return self.told


def staged(act: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(act(Stage()), 60)

    asyncio.run(run())


def test_the_answer_is_given_when_the_process_is_gone() -> None:
    async def act(stage: Stage) -> None:
        stage.order()
        standby = await stage.given()
        standby.hear(SOLO)
        standby.hear(PASSED)
        (told,) = await stage.answers()
        assert standby.process.exit is not None
        assert (told.cause, told.check, told.result.round, told.result.group) == ("1.1", 1, 1, 3)
        assert (told.result.passed, told.result.seconds) == (True, 0.02)

    staged(act)


def test_only_the_first_of_a_group_gets_the_door_where_they_meet() -> None:
    async def act(stage: Stage) -> None:
        stage.order(rank=0)
        assert len((await stage.given(1)).fds) == 1
        stage.order(round=2, rank=1)
        assert (await stage.given(2)).fds == []
        stage.order(round=3, size=1)
        assert (await stage.given(3)).fds == []

    staged(act)


def test_an_order_that_comes_again_changes_nothing() -> None:
    async def act(stage: Stage) -> None:
        stage.order()
        standby = await stage.given()
        stage.order()
        standby.hear(PASSED)
        await stage.answers()
        stage.order()
        stage.order(check=0)
        await asyncio.sleep(0.01)
        assert len(stage.standbys) == 1
        assert len(stage.told) == 1

    staged(act)


def test_who_is_told_that_the_other_will_not_come_says_what_it_knows() -> None:
    async def act(stage: Stage) -> None:
        stage.order()
        standby = await stage.given()
        standby.hear(SOLO)
        stage.order(size=1)
        (told,) = await stage.answers()
        assert (told.result.solo_passed, told.result.passed) == (True, None)

    staged(act)


def test_it_finishes_its_solo_test_first() -> None:
    async def act(stage: Stage) -> None:
        stage.order()
        standby = await stage.given()
        stage.order(size=1)
        await asyncio.sleep(0.01)
        assert stage.told == []
        standby.hear(SOLO)
        (told,) = await stage.answers()
        assert told.result.solo_passed is True

    staged(act)


def test_who_has_no_process_yet_when_the_other_is_gone_tests_itself_alone() -> None:
    async def act(stage: Stage) -> None:
        stage.give.clear()
        stage.order(rank=1)
        await asyncio.sleep(0)
        stage.order(size=1)
        stage.give.set()
        standby = await stage.given()
        assert standby.given is not None
        assert (standby.given.rank, standby.given.size) == (0, 1)

    staged(act)


def test_a_newer_order_ends_the_older_test_which_gets_no_answer() -> None:
    async def act(stage: Stage) -> None:
        stage.order()
        first = await stage.given()
        stage.order(round=2)
        second = await stage.given(2)
        assert first.process.exit == Exit(signal=signal.SIGKILL), "two tests at a time"
        second.hear(PASSED)
        (told,) = await stage.answers()
        assert told.result.round == 2

    staged(act)


def test_a_process_that_dies_is_told_with_what_it_had_shown() -> None:
    async def act(stage: Stage) -> None:
        stage.order()
        standby = await stage.given()
        standby.hear(SOLO)
        standby.process.die(Exit(signal=9))
        (told,) = await stage.answers()
        assert (told.result.solo_passed, told.result.passed) == (True, None)
        assert told.result.detail == "the test's process was killed by SIGKILL"

    staged(act)


def test_a_process_that_says_nothing_in_time_is_killed_and_that_is_told() -> None:
    async def act(stage: Stage) -> None:
        stage.order()
        standby = await stage.given()
        (told,) = await stage.answers()
        assert standby.process.exit is not None
        assert told.result.solo_passed is None
        assert "no result within" in told.result.detail

    staged(act)


def test_when_the_node_has_something_else_to_do_the_test_ends_without_a_word() -> None:
    async def act(stage: Stage) -> None:
        stage.order()
        standby = await stage.given()
        stage.tester.end()
        while standby.process.exit is None:
            await asyncio.sleep(0)
        assert stage.told == []

    staged(act)
