"""Has one of the node's standbys test it, when the coordinator wants to know."""

from __future__ import annotations

import asyncio
import signal

from holdfast.agent.processes import Exit
from holdfast.agent.standbys import Pool
from holdfast.messages.actions import TestNode
from holdfast.messages.local import FromWorker, Test, Tested
from holdfast.messages.nodecheck import TestResult


async def run_test(pool: Pool, order: TestNode, store_fd: int | None) -> TestResult:
    """How the test went; a process that dies of it, or says nothing in time, has failed it."""
    standby = await pool.take()
    process = standby.process
    assert process is not None
    heard: asyncio.Future[Tested] = asyncio.get_running_loop().create_future()

    def hear(message: FromWorker) -> None:
        if isinstance(message, Tested) and not heard.done():
            heard.set_result(message)

    def exited(end: Exit) -> None:
        standby.read_all()
        if not heard.done():
            heard.set_result(Tested(detail=f"the test's process died: {end}"))

    standby.hear = hear
    process.on_exit = exited
    test = Test(
        rank=order.rank,
        size=order.size,
        address=order.address,
        port=order.port,
        limit_s=order.limit_s,
    )
    standby.test(test, [store_fd] if store_fd is not None else [])
    try:
        tested = await asyncio.wait_for(heard, order.limit_s)
    except asyncio.TimeoutError:
        tested = Tested(detail=f"no result within {order.limit_s:.0f} s")
    process.on_exit = lambda end: standby.close()
    process.send(signal.SIGKILL)
    if process.exit is not None:
        standby.close()
    pool.refill()
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
