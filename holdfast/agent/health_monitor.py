"""Runs the node's own health checks and reports what fails.

The checks run in processes of their own (see `holdfast.health`), so that one that hangs does not
hang the agent. Before the node gets a place all of them run, if the user wants nodes to be checked;
while it trains, the free ones run once a minute. Failures are reported to the coordinator, which
decides whether the node stays; warnings go to the log.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.health.checker import Checker
from holdfast.health.settings import FAKE_NODE, settings_here
from holdfast.messages.health import HealthResult
from holdfast.tasks import BackgroundTasks

log = logging.getLogger("holdfast.agent")

EVERY_S = 60.0
EVERY_FAKE_S = 0.2
"""The interval for a simulated node, which tests make fail."""
LIMIT_S = 20.0
_DECISIVE = ("cpu-compute", "gpu", "nvlink", "nic", "storage", "own", "service")
"""Prefixes of the checks that judge the machine and not what runs on it."""


class HealthMonitor:
    def __init__(
        self, home: Path, thorough: bool, report: Callable[[tuple[HealthResult, ...]], None]
    ) -> None:
        self._thorough = thorough
        self._report = report
        self._checker = Checker(settings_here(os.environ, home=str(home)))
        self._every_s = EVERY_FAKE_S if FAKE_NODE in os.environ else EVERY_S
        self._logged: set[tuple[str, str]] = set()
        self._checking = False

    @staticmethod
    def is_useful(requested: bool) -> bool:
        """Return whether to monitor: a node without accelerators has little that fails by itself."""
        return requested or FAKE_NODE in os.environ or bool(glob.glob("/dev/nvidia[0-9]*"))

    @property
    def pids(self) -> Collection[int]:
        """The processes of the checks, which are no strays of a script."""
        return self._checker.pids

    async def run(self) -> None:
        """Check until cancelled."""
        if self._thorough:
            await self._check(None)
        while True:
            await asyncio.sleep(self._every_s)
            await self._check(self._checker.names(costly=False))

    async def _check(self, names: list[str] | None) -> None:
        results = [r for r in await self._results(names) if r.verdict in ("warn", "fail")]
        fresh = {(r.check, r.verdict) for r in results} - self._logged
        for result in results:
            if (result.check, result.verdict) in fresh:
                fails = " fails" if result.verdict == "fail" else ""
                log.warning("this node: %s%s: %s", result.check, fails, result.reason)
        self._logged |= fresh
        failed = [r for r in results if r.verdict == "fail" and r.check.startswith(_DECISIVE)]
        if any((r.check, r.verdict) in fresh for r in failed):
            self._report(tuple(failed))

    async def _results(self, names: list[str] | None) -> list[HealthResult]:
        """Check in a separate thread: the loop would wait for one of its own when the agent ends,
        and a check may hang."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[HealthResult]] = loop.create_future()

        def settle(results: list[HealthResult]) -> None:
            self._checking = False
            if not done.done():
                done.set_result(results)

        def check() -> None:
            results: list[HealthResult] = []
            try:
                results = self._checker.run(names, deadline_s=LIMIT_S)
            except Exception:  # The edge of the thread: a bug of ours is not the node's.
                log.exception("the health checks of this node crashed")
            with suppress(RuntimeError):  # The agent may have ended.
                loop.call_soon_threadsafe(settle, results)

        self._checking = True
        threading.Thread(target=check, name="holdfast-health", daemon=True).start()
        return await done

    def close(self) -> None:
        if not self._checking:
            self._checker.close()
            return
        # The thread uses the checker; it ends when its processes are gone, or with the agent.
        for pid in self._checker.pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


@contextmanager
def monitoring(monitor: HealthMonitor | None, tasks: BackgroundTasks) -> Iterator[None]:
    """Run a monitor in the background within this context."""
    if monitor is None:
        yield
        return
    running = tasks.keep("health checks", monitor.run)
    try:
        yield
    finally:
        running.cancel()
        monitor.close()
