"""Background tasks that raise are logged, counted and started again."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import tasks
from holdfast.messages.units import NodeId, Time
from holdfast.tasks import BackgroundTasks, TaskFailure


def test_a_task_that_raises_is_reported_and_runs_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    failures: list[TaskFailure] = []

    async def scenario() -> None:
        runs, enough = [0], asyncio.Event()

        async def look() -> None:
            runs[0] += 1
            if runs[0] <= 3:
                raise OSError("the network is down")
            enough.set()
            await asyncio.Event().wait()

        background = BackgroundTasks(failures.append)
        kept = background.keep("watch", look)
        await asyncio.wait_for(enough.wait(), 60)
        background.close()
        with pytest.raises(asyncio.CancelledError):
            await kept

    asyncio.run(scenario())
    assert [(one.task, one.error, one.count) for one in failures] == [
        ("watch", "OSError: the network is down", 1)
    ], "repeated failures are reported together, later"
    assert "in look" in failures[0].traceback
    assert caplog.text.count("the background task 'watch' raised") == 1
    event = failures[0].event(NodeId("n"), Time(3.0))
    assert (event.node, event.task, event.at) == ("n", "watch", 3.0)


def test_repeated_failures_are_reported_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tasks, "LONGEST_PAUSE_S", 0.001)
    monkeypatch.setattr(tasks, "REPORT_EVERY_S", 0.02)
    failures: list[TaskFailure] = []

    async def scenario() -> None:
        twice = asyncio.Event()

        async def look() -> None:
            raise ValueError("always")

        def report(failure: TaskFailure) -> None:
            failures.append(failure)
            if len(failures) == 2:
                twice.set()

        background = BackgroundTasks(report)
        background.keep("watch", look)
        await asyncio.wait_for(twice.wait(), 60)
        background.close()

    asyncio.run(scenario())
    assert failures[0].count == 1
    assert failures[1].count > 1


def test_a_task_that_returns_is_not_started_again() -> None:
    async def scenario() -> None:
        runs = [0]

        async def once() -> None:
            runs[0] += 1

        await BackgroundTasks(lambda failure: pytest.fail(failure.traceback)).keep("once", once)
        assert runs == [1]

    asyncio.run(scenario())


def test_a_callback_that_raises_is_reported_too() -> None:
    failures: list[TaskFailure] = []

    async def scenario() -> None:
        def broken() -> None:
            raise KeyError("gone")

        background = BackgroundTasks(failures.append)
        asyncio.get_running_loop().call_soon(broken)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        background.close()

    asyncio.run(scenario())
    assert [(one.task, one.error) for one in failures] == [
        ("event loop (KeyError)", "KeyError: 'gone'")
    ]
