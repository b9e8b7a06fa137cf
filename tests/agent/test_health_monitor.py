"""The node's own checks, as the agent runs them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.agent.health_monitor import LIMIT_S, HealthMonitor, monitoring
from holdfast.health.checker import Checker
from holdfast.messages.health import HealthResult, Verdict
from holdfast.tasks import BackgroundTasks

HEALTHY = {"index": 0, "uuid": "GPU-0", "recovery": 0, "ecc_uncorrected": 0}
Told = list[tuple[HealthResult, ...]]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up machine with one GPU that is well."""
    root = tmp_path / "node"
    root.mkdir()
    monkeypatch.setenv("HOLDFAST_FAKE_NODE", str(root))
    set_gpu(root)
    return root


def set_gpu(root: Path, **what: object) -> None:
    described = {"driver": "570.86.15", "gpus": [{**HEALTHY, **what}]}
    (root / "new.json").write_text(json.dumps(described))
    os.replace(root / "new.json", root / "nvml.json")


def unfailing() -> BackgroundTasks:
    """Background tasks of which none may raise."""
    return BackgroundTasks(lambda failure: pytest.fail(failure.traceback))


def watched(root: Path, enough: Callable[[Told], bool], thorough: bool = False) -> Told:
    """What is reported until that is enough."""
    told: Told = []

    async def watch() -> None:
        with monitoring(HealthMonitor(root, thorough, told.append), unfailing()):
            deadline = time.monotonic() + 60
            while not enough(told):
                assert time.monotonic() < deadline, f"waited in vain; told {told}"
                await asyncio.sleep(0.01)

    asyncio.run(watch())
    return told


def test_what_fails_is_reported_with_its_reason(node: Path) -> None:
    set_gpu(node, recovery=1)
    ((result,),) = watched(node, bool)
    assert (result.check, result.verdict) == ("gpu-recovery", "fail")
    assert "GPU 0" in result.reason


def test_a_node_that_falls_ill_later_is_reported_then_and_once(node: Path) -> None:
    looks = 0

    def enough(told: Told) -> bool:
        nonlocal looks
        looks += 1
        if looks == 50:
            assert told == []
            set_gpu(node, recovery=1)
        return bool(told) and looks > 150

    assert len(watched(node, enough)) == 1


def test_a_check_that_only_warned_is_reported_once_it_fails(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: list[Verdict] = []

    def run(*args: object, **more: object) -> list[HealthResult]:
        verdicts.append("warn" if len(verdicts) < 2 else "fail")
        return [HealthResult(check="gpu-memory", verdict=verdicts[-1], reason="", seconds=0.0)]

    monkeypatch.setattr(Checker, "run", run)
    told = watched(node, lambda told: bool(told) and len(verdicts) > 4)
    assert [result.verdict for results in told for result in results] == ["fail"]


def test_an_agent_that_ends_does_not_wait_for_a_check_that_hangs(node: Path) -> None:
    (node / "proc").mkdir()
    os.mkfifo(node / "proc" / "meminfo")

    async def end_in_the_middle() -> float:
        watch = HealthMonitor(node, True, lambda results: None)
        with monitoring(watch, unfailing()):
            while not watch.pids:
                await asyncio.sleep(0.01)
            return time.monotonic()

    ended = asyncio.run(end_in_the_middle())
    assert time.monotonic() - ended < LIMIT_S / 2
