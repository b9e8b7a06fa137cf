"""Keeps processes that wait for a rank.

They are forked from a nursery (see `holdfast.worker.nursery`), which also provides the processes of
the first round. After ranks were assigned the pool is refilled, but only once those ranks have
finished a step, and at the lowest priority: standbys never take time from the ranks they are for.
Without a nursery (`--standby 0`), each rank gets a fresh process instead.

When the script is seen to import more than the nursery has (see `holdfast.worker.preloading`), another
nursery is started with that, its *successor*. Only when that is ready does it take the first one's
place. Standbys of the first one are outdated then, but each stays until a new one has rehearsed, so a
node is never without.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import proc
from holdfast.agent.known_imports import KnownImports
from holdfast.agent.nursery_process import Nursery, NurseryDied, NurseryTerms, set_priority
from holdfast.agent.orders import AgentOrders
from holdfast.agent.processes import Exit, ProcessTable, WorkerProcess, both_ends, spawn
from holdfast.config.settings import RunSettings
from holdfast.messages.local import NOT_FORKABLE, ImportPlan, Loaded, Warm

log = logging.getLogger("holdfast.agent")

NURSERY_TRIES = 3
STANDBY_FLOOR_BYTES = 64 << 20
MEMORY_SHARE = 0.25


@dataclass
class Pool:
    """All processes of this node that have no rank yet."""

    orders: AgentOrders
    table: ProcessTable
    env: Mapping[str, str]
    on_warm: Callable[[], None] = lambda: None
    waiting: list[WorkerProcess] = field(default_factory=list)
    _adding: set[asyncio.Future[None]] = field(default_factory=set)
    _nursery: Nursery | None = None
    _successor: Nursery | None = None
    _warm: Warm | None = None
    _failures: int = 0
    _closed: bool = False

    def __post_init__(self) -> None:
        settings = self.orders.settings
        self.want = settings.nproc if settings.standby is None else settings.standby
        """Number of standbys to keep; 0 for no nursery at all."""
        self._eager = self.orders.terms.node_check or _seems_to_use_torch(settings)
        """Whether the first ranks wait for the nursery's imports, because they need them anyway."""
        self._log_path = self.orders.logs / f"nursery-{os.getpid()}.log"
        self._known = KnownImports(self.orders.home.imports, settings, _python())

    @property
    def warm(self) -> bool:
        """Whether a rank would start at once: everything is imported, or nothing is to be."""
        return self._warm is not None or self.want == 0

    def open(self) -> None:
        """Start the nursery."""
        if self.want > 0:
            self._nursery = self._start_nursery(self._plan())

    async def take(self, count: int) -> list[WorkerProcess]:
        """Return a process for each of `count` ranks. If the round ends before all are there, those
        that are become standbys again."""
        taking = [asyncio.ensure_future(self._take()) for _ in range(count)]
        try:
            return await asyncio.gather(*taking)
        except BaseException:
            for one in taking:
                one.add_done_callback(self._put_back)
            raise

    def _put_back(self, taking: asyncio.Future[WorkerProcess]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self._keep(taking.result())

    async def _take(self) -> WorkerProcess:
        """Return the best standby if there is one, else the process that is quickest to get."""
        self.waiting.sort(key=lambda standby: (standby.outdated, not standby.rehearsed))
        while self.waiting:
            standby = self.waiting.pop(0)
            if standby.process is not None and standby.process.exit is None:
                set_priority(standby.pid, low=False)
                return standby
        if self.want == 0 or self._failures >= NURSERY_TRIES:
            return self._spawn_fresh()
        return await self._fork(rehearse=False)

    async def extra(self) -> WorkerProcess:
        """Return a process for another use than a rank; standbys are left to the ranks."""
        return await self._fork(rehearse=False)

    def refill(self) -> None:
        """Fork as many standbys as are wanted and memory allows."""
        if self.want == 0 or self._closed or self._failures >= NURSERY_TRIES:
            return
        self._improve()
        current = [standby for standby in self.waiting if not standby.outdated]
        for _ in range(self._affordable() - len(current) - len(self._adding)):
            adding = asyncio.ensure_future(self._add_standby())
            self._adding.add(adding)
            adding.add_done_callback(self._adding.discard)

    async def _add_standby(self) -> None:
        standby = await self._fork(rehearse=True)
        self._keep(standby)
        set_priority(standby.pid, low=True)

    def _keep(self, standby: WorkerProcess) -> None:
        assert standby.process is not None
        standby.process.on_exit = lambda _: self._lose(standby)
        self.waiting.append(standby)
        standby.on_rehearsed = self._end_outdated
        if standby.rehearsed:
            self._end_outdated()

    def _end_outdated(self) -> None:
        """End as many outdated standbys as there are new ones that can do better."""
        better = sum(standby.rehearsed and not standby.outdated for standby in self.waiting)
        outdated = [standby for standby in self.waiting if standby.outdated]
        for standby in outdated[max(0, self.want - better) :]:
            assert standby.process is not None
            standby.process.send(signal.SIGKILL)

    def _lose(self, standby: WorkerProcess) -> None:
        if standby in self.waiting:
            self.waiting.remove(standby)
            standby.close()
            if not standby.outdated:
                self.refill()

    def _affordable(self) -> int:
        each = STANDBY_FLOOR_BYTES
        if self._warm is not None:
            each = max(each, self._warm.resident_bytes // 2)
        return min(self.want, int(proc.available_memory_bytes() * MEMORY_SHARE) // each)

    def close(self) -> None:
        """End the nursery and every standby."""
        self._closed = True
        for standby in self.waiting:
            if standby.process is not None:
                standby.process.on_exit = lambda _: None
                standby.process.send(signal.SIGKILL)
            standby.close()
        self.waiting.clear()
        for nursery in (self._nursery, self._successor):
            if nursery is not None:
                nursery.close()

    # ---- the nursery ----

    def learn(self, loaded: Loaded) -> None:
        """Note what the script imports; the next refill makes use of it."""
        self._known.learn(loaded)

    def _plan(self) -> ImportPlan:
        return self._known.plan(int(proc.available_memory_bytes() * MEMORY_SHARE))

    def _improve(self) -> None:
        """Start a nursery that imports what this one has not, if there is memory for another."""
        if self._nursery is None or self._nursery.warm is None or self._successor is not None:
            return
        plan = self._plan()
        small = plan.most_bytes < 2 * self._nursery.warm.resident_bytes
        if small or not set(plan.modules) - set(self._nursery.plan.modules):
            return
        self._successor = self._start_nursery(plan)
        set_priority(self._successor.process.pid, low=True)

    def _start_nursery(self, plan: ImportPlan) -> Nursery:
        env = {
            **self.env,
            "HOLDFAST_NURSERY_PRELOAD": " ".join(self.orders.settings.preload),
            "HOLDFAST_FIRST_PATH": _first_path(self.orders.settings),
        }
        terms = NurseryTerms(self.table, self._command(), env, self._log_path)
        eager = self._eager or bool(plan.modules)
        return Nursery(terms, plan, eager, self._warmed, self._nursery_exited, self._keep)

    def _warmed(self, nursery: Nursery) -> None:
        if nursery is self._successor:
            self._succeed(nursery)
        if nursery.plan.modules:
            self._known.remember()
        self._warm = nursery.warm
        self.on_warm()

    def _succeed(self, nursery: Nursery) -> None:
        """Fork from the successor from now on."""
        set_priority(nursery.process.pid, low=False)
        before, self._nursery, self._successor = self._nursery, nursery, None
        for standby in self.waiting:
            standby.outdated = True
        if before is not None:
            before.retire()

    def _nursery_exited(self, nursery: Nursery, end: Exit) -> None:
        if self._closed or nursery not in (self._nursery, self._successor):
            return
        if nursery.unfit:
            self._known.refuse(nursery.unfit)
        if nursery is self._successor:
            self._successor = None  # The next refill starts another.
            return
        self._nursery = None
        if end.code == NOT_FORKABLE:
            self._failures = NURSERY_TRIES
            log.warning("no standbys: a module of --preload has initialized the GPUs")
        elif not nursery.unfit:
            self._failures += 1
            log.warning("the nursery died (%s); see %s", end, self._log_path)
        if self._failures < NURSERY_TRIES:
            self._nursery = self._start_nursery(self._plan())

    async def _fork(self, rehearse: bool) -> WorkerProcess:
        """Fork a process, from the next nursery if this one dies meanwhile."""
        while self._failures < NURSERY_TRIES and self._nursery is not None:
            try:
                return await self._nursery.fork(rehearse, self._warm is not None or self._eager)
            except NurseryDied:
                continue
        return self._spawn_fresh()

    def _spawn_fresh(self) -> WorkerProcess:
        with both_ends(warm=False) as (worker, fds):
            control_fd, page_fd = fds
            env = {**self.env, "HOLDFAST_WORKER": f"fresh,{control_fd},{page_fd}"}
            worker.process = self.table.watch(spawn(self._command(), env, fds))
        return worker

    def _command(self) -> list[str]:
        settings = self.orders.settings
        return [_python(), "-u", "-m", "holdfast.worker", settings.script, *settings.script_args]


def _python() -> str:
    return os.environ.get("PYTHON_EXEC", sys.executable)


def _first_path(settings: RunSettings) -> str:
    """Return the first directory in which Python looks for the script's imports."""
    if settings.entry == "module":
        return os.getcwd()
    return os.path.dirname(os.path.realpath(settings.script))


def _seems_to_use_torch(settings: RunSettings) -> bool:
    """Return whether the first ranks will import torch anyway, judged by the script's text."""
    if settings.entry == "script":
        try:
            return b"torch" in Path(settings.script).read_bytes()
        except OSError:
            return True
    return settings.entry != "command"
