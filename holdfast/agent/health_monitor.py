"""Looks after the node's health: its own checks, now and then, and what they found.

The checks run in processes of their own (see `holdfast.health`), so one that hangs does not hang the
agent. Before the node gets a place all are run, where the user wants nodes to be checked; while it
trains, those that cost nothing, once a minute. What fails is told to the coordinator, which decides
whether the node stays; what is only doubtful goes to the log.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.health.checker import Checker
from holdfast.health.settings import FAKE_NODE, settings_here
from holdfast.messages.health import HealthResult

log = logging.getLogger("holdfast.agent")

EVERY_S = 60.0
EVERY_FAKE_S = 0.2
"""A node that is made up falls ill to see what happens then."""
LIMIT_S = 20.0
_DECISIVE = ("cpu-compute", "gpu", "nvlink", "nic", "storage", "own", "service")
"""Checks, by how their names begin, that are about the machine and not about what runs on it."""


class FitnessWatch:
    def __init__(
        self, home: Path, thorough: bool, report: Callable[[tuple[HealthResult, ...]], None]
    ) -> None:
        self._thorough = thorough
        self._report = report
        self._checker = Checker(settings_here(os.environ, home=str(home)))
        self._every_s = EVERY_FAKE_S if FAKE_NODE in os.environ else EVERY_S
        self._told: set[str] = set()
        self._looking = False

    @staticmethod
    def worth_while(asked_for: bool) -> bool:
        """A node without accelerators has little that fails by itself."""
        return asked_for or FAKE_NODE in os.environ or bool(glob.glob("/dev/nvidia[0-9]*"))

    @property
    def pids(self) -> Collection[int]:
        """Processes that are its own, not left behind by a script."""
        return self._checker.pids

    async def run(self) -> None:
        if self._thorough:
            await self._look(None)
        while True:
            await asyncio.sleep(self._every_s)
            await self._look(self._checker.names(costly=False))

    async def _look(self, names: list[str] | None) -> None:
        results = await self._results(names)
        for result in results:
            if result.verdict == "warn" and result.check not in self._told:
                self._told.add(result.check)
                log.warning("this node: %s: %s", result.check, result.reason)
        failed = tuple(r for r in results if r.verdict == "fail")
        decisive = tuple(r for r in failed if r.check.startswith(_DECISIVE))
        fresh = {r.check for r in failed} - self._told
        for result in failed:
            if result.check in fresh:
                log.warning("this node: %s fails: %s", result.check, result.reason)
        self._told |= fresh
        if any(r.check in fresh for r in decisive):
            self._report(decisive)

    async def _results(self, names: list[str] | None) -> list[HealthResult]:
        """Look in a thread of its own: one of the loop's would be waited for when the agent ends, and
        a check may hang."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[HealthResult]] = loop.create_future()

        def settle(results: list[HealthResult]) -> None:
            self._looking = False
            if not done.done():
                done.set_result(results)

        def look() -> None:
            results: list[HealthResult] = []
            try:
                results = self._checker.run(names, deadline_s=LIMIT_S)
            except Exception:  # The edge of the thread: the node is not sick because we are.
                log.exception("this node cannot be checked")
            try:
                loop.call_soon_threadsafe(settle, results)
            except RuntimeError:
                pass  # The agent has ended meanwhile.

        self._looking = True
        threading.Thread(target=look, name="holdfast-fitness", daemon=True).start()
        return await done

    def close(self) -> None:
        if not self._looking:
            self._checker.close()
            return
        # Its thread has the checker; without their processes it comes to an end, or with the agent.
        for pid in self._checker.pids:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


@contextmanager
def watching(watch: FitnessWatch | None) -> Iterator[None]:
    """Watch in the background for as long as this lasts."""
    if watch is None:
        yield
        return
    task = asyncio.ensure_future(watch.run())
    try:
        yield
    finally:
        task.cancel()
        watch.close()
