"""Has one of the node's standbys test it, when the coordinator wants to know.

One test at a time: a newer order ends an older test, and so does anything else that the node has to
do. An order that comes again changes nothing, except that with a size of one it says that the other
node will not come: then the answer is what the process has found out alone.

The answer is given when the process is gone, so that whatever comes next finds the node as it was.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from holdfast.agent.ports import StorePort
from holdfast.agent.processes import Exit
from holdfast.agent.standbys import Pool, Standby
from holdfast.clock import JobClock
from holdfast.messages.actions import TestNode
from holdfast.messages.events import NodeTested
from holdfast.messages.local import FromWorker, Test, Tested
from holdfast.messages.nodecheck import TestResult
from holdfast.messages.units import NodeId

SLACK_S = 1.0
"""How much longer than the test itself the process may take to tell of it."""
END_LIMIT_S = 1.0
"""How long a killed process is waited for: one that hangs in a driver does not end."""


class Tester:
    def __init__(
        self,
        node: NodeId,
        address: str,
        pool: Pool,
        clock: JobClock,
        report: Callable[[NodeTested], None],
    ) -> None:
        self._node = node
        self._pool = pool
        self._clock = clock
        self._report = report
        self._door = StorePort(address)
        """Where the other of a group meets us. It has nothing to do with the store of a round."""
        self._latest = (0, 0)
        self._test: _Test | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return self._door.number

    def act(self, order: TestNode) -> None:
        wanted = (order.check, order.round)
        if wanted == self._latest and order.size == 1 and self._test is not None:
            self._test.go_alone()
        if wanted <= self._latest:
            return
        self._latest = wanted
        before = self._task
        self.end()
        self._test = _Test(order)
        self._task = asyncio.ensure_future(self._run(self._test, before))

    def end(self) -> None:
        """Nobody wants to know any more."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._test = None

    async def _run(self, test: _Test, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        tested = await self._tested(test)
        self._report(
            NodeTested(
                at=self._clock.now(),
                node=self._node,
                check=test.order.check,
                result=_result(test.order, tested),
            )
        )
        self._pool.refill()

    async def _tested(self, test: _Test) -> Tested:
        """What the test has shown; a process that dies of it, or says nothing in time, has failed."""
        order = test.order
        try:
            return await asyncio.wait_for(self._in_standby(test), order.limit_s + SLACK_S)
        except asyncio.TimeoutError:
            known, late = test.known, f"no result within {order.limit_s:.0f} s"
            return Tested(solo_passed=known.solo_passed, solo_s=known.solo_s, detail=late)

    async def _in_standby(self, test: _Test) -> Tested:
        standby = await self._pool.extra()
        try:
            test.give_to(standby, self._door.fileno())
            return await test.heard
        finally:
            await _end(standby)


class _Test:
    """One order, and what is known so far."""

    def __init__(self, order: TestNode) -> None:
        self.order = order
        self.known = Tested()
        self.heard: asyncio.Future[Tested] = asyncio.get_running_loop().create_future()
        self._alone = order.size == 1

    def go_alone(self) -> None:
        """The other will not come."""
        self._alone = True
        if self.known.solo_passed is not None:
            self._settle(self.known)

    def give_to(self, standby: Standby, door: int) -> None:
        assert standby.process is not None
        standby.hear = self._hear
        standby.process.on_exit = lambda end: self._exited(standby, end)
        order = self.order
        together = order.size > 1 and not self._alone
        test = Test(
            rank=order.rank if together else 0,
            size=order.size if together else 1,
            address=order.address,
            port=order.port,
            name=f"check {order.check} round {order.round} group {order.group}",
            limit_s=order.limit_s,
        )
        standby.test(test, [door] if together and order.rank == 0 else [])
        if standby.process.exit is not None:
            self._exited(standby, standby.process.exit)

    def _hear(self, message: FromWorker) -> None:
        if isinstance(message, Tested):
            self.known = message
            if message.over or self._alone:
                self._settle(message)

    def _exited(self, standby: Standby, end: Exit) -> None:
        standby.read_all()
        known, died = self.known, f"the test's process {_how(end)}"
        self._settle(Tested(solo_passed=known.solo_passed, solo_s=known.solo_s, detail=died))

    def _settle(self, tested: Tested) -> None:
        if not self.heard.done():
            self.heard.set_result(tested)


async def _end(standby: Standby) -> None:
    """Kill it, and wait until it is gone, unless it will not go."""
    process = standby.process
    assert process is not None
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def exited(end: Exit) -> None:
        standby.close()
        if not gone.done():
            gone.set_result(None)

    if process.exit is not None:
        standby.close()
        return
    process.on_exit = exited
    process.send(signal.SIGKILL)
    await asyncio.wait([gone], timeout=END_LIMIT_S)


def _how(end: Exit) -> str:
    if end.signal is None:
        return f"ended with exit code {end.code}"
    return f"was killed by {signal.Signals(end.signal).name}"


def _result(order: TestNode, tested: Tested) -> TestResult:
    return TestResult(
        node=order.node,
        round=order.round,
        group=order.group,
        solo_passed=tested.solo_passed,
        solo_s=tested.solo_s,
        passed=tested.passed,
        seconds=tested.seconds,
        detail=tested.detail[:2000],
    )
