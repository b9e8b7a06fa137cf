"""Runs node tests in processes of this node, by the coordinator's orders.

One test at a time: a newer order ends an older test, and so does anything else that the node has to
do. A repeated order changes nothing, except that a size of one says that the peer will not come:
then the answer is what the process has found out alone. The answer is given when the process is
gone, so that the next activity finds the node as it was.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from holdfast.agent.processes import Exit, WorkerProcess
from holdfast.agent.standbys import Pool
from holdfast.agent.starting import StorePort
from holdfast.clock import JobClock
from holdfast.messages.actions import TestNode
from holdfast.messages.events import NodeTested
from holdfast.messages.local import FromWorker, Test, Tested
from holdfast.messages.nodecheck import TestResult
from holdfast.messages.units import NodeId

SLACK_S = 1.0
"""Time beyond the test's own limit in which its process may report."""
END_LIMIT_S = 1.0
"""How long to wait for a killed process: one that hangs in a driver does not end."""


class NodeTester:
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
        """Where the peer of a test connects; not related to the store of a round."""
        self._latest = (0, 0)
        self._test: _Test | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return self._door.number

    def act(self, order: TestNode) -> None:
        """Start the ordered test, unless it is an old or repeated order."""
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
        """Abandon the current test."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._test = None

    async def _run(self, test: _Test, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        limit_s = test.order.limit_s
        try:
            tested = await asyncio.wait_for(self._in_process(test), limit_s + SLACK_S)
        except asyncio.TimeoutError:
            tested = test.failed(f"no result within {limit_s:.0f} s")
        order = test.order
        self._report(
            NodeTested(
                at=self._clock.now(),
                cause=order.id,
                node=self._node,
                check=order.check,
                result=_result(order, tested),
            )
        )
        self._pool.refill()

    async def _in_process(self, test: _Test) -> Tested:
        process = await self._pool.extra()
        try:
            test.give_to(process, self._door.fileno())
            return await test.heard
        finally:
            await _end(process)


class _Test:
    """One order, and what is known so far."""

    def __init__(self, order: TestNode) -> None:
        self.order = order
        self.heard: asyncio.Future[Tested] = asyncio.get_running_loop().create_future()
        self._known = Tested()
        self._alone = order.size == 1

    def go_alone(self) -> None:
        """Do without the peer."""
        self._alone = True
        if self._known.solo_passed is not None:
            self._settle(self._known)

    def give_to(self, worker: WorkerProcess, door: int) -> None:
        assert worker.process is not None
        worker.hear = self._hear
        worker.process.on_exit = lambda end: self._exited(worker, end)
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
        worker.order(test, [door] if together and order.rank == 0 else [])
        if worker.process.exit is not None:
            self._exited(worker, worker.process.exit)

    def failed(self, why: str) -> Tested:
        """Return the result of a test that did not finish."""
        return Tested(solo_passed=self._known.solo_passed, solo_s=self._known.solo_s, detail=why)

    def _hear(self, message: FromWorker) -> None:
        if isinstance(message, Tested):
            self._known = message
            if message.over or self._alone:
                self._settle(message)

    def _exited(self, worker: WorkerProcess, end: Exit) -> None:
        worker.read_all()
        how = f"ended with exit code {end.code}"
        if end.signal is not None:
            how = f"was killed by {signal.Signals(end.signal).name}"
        self._settle(self.failed(f"the test's process {how}"))

    def _settle(self, tested: Tested) -> None:
        if not self.heard.done():
            self.heard.set_result(tested)


async def _end(worker: WorkerProcess) -> None:
    """Kill a process and wait until it is gone, within a limit."""
    process = worker.process
    assert process is not None
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def exited(end: Exit) -> None:
        worker.close()
        if not gone.done():
            gone.set_result(None)

    if process.exit is not None:
        worker.close()
        return
    process.on_exit = exited
    process.send(signal.SIGKILL)
    await asyncio.wait([gone], timeout=END_LIMIT_S)


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
