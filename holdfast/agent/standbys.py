"""Keeps processes that wait for a rank.

They are forked from a nursery (see `holdfast.worker.nursery`), which also provides the processes of
the first round. After ranks were assigned the pool is refilled, but only once those ranks have
finished a step, and at the lowest priority: standbys never take time from the ranks they are for.
Without a nursery (`--standby 0`), each rank gets a fresh process instead.

When the script is seen to import more than the nursery has (see `holdfast.worker.preloading`), another
nursery is started with that, its *successor*. Only when that is ready does it take the first one's
place. Standbys of the first one are outdated then, but each stays until a new one has rehearsed, so a
node is never without.

Standbys may also hold the GPUs of the ranks that they would replace: see `holdfast.agent.devices`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import proc
from holdfast.agent import devices
from holdfast.agent.devices import Device, Devices
from holdfast.agent.known_imports import KnownImports
from holdfast.agent.nursery_process import Nursery, NurseryDied, NurseryTerms, set_priority
from holdfast.agent.orders import AgentOrders
from holdfast.agent.processes import Exit, ProcessTable, WorkerProcess, both_ends, spawn
from holdfast.config.settings import RunSettings
from holdfast.messages.local import (
    GAVE_DEVICE_UP,
    NOT_FORKABLE,
    DeviceUsed,
    ImportPlan,
    Loaded,
    Warm,
)
from holdfast.messages.records import Raised

log = logging.getLogger("holdfast.agent")

NURSERY_TRIES = 3
STANDBY_FLOOR_BYTES = 64 << 20
MEMORY_SHARE = 0.25
LEAVING_LIMIT_S = 5.0
"""How long a rank waits for standbys to leave its GPU; a process that holds one exits in 0.1 s."""


@dataclass
class Pool:
    """All processes of this node that have no rank yet."""

    orders: AgentOrders
    table: ProcessTable
    env: Mapping[str, str]
    on_warm: Callable[[], None] = lambda: None
    tell: Callable[[str], None] = lambda text: None
    """Tells the user."""
    waiting: list[WorkerProcess] = field(default_factory=list)
    _adding: set[asyncio.Future[None]] = field(default_factory=set)
    _nursery: Nursery | None = None
    _successor: Nursery | None = None
    _warm: Warm | None = None
    _failures: int = 0
    _closed: bool = False
    _leaving: set[asyncio.Future[None]] = field(default_factory=set)
    """Done once standbys that were told to leave their GPUs are gone."""

    def __post_init__(self) -> None:
        settings = self.orders.settings
        self.want = settings.nproc if settings.standby is None else settings.standby
        """Number of standbys to keep; 0 for no nursery at all."""
        self._eager = self.orders.terms.node_check or _seems_to_use_torch(settings)
        """Whether the first ranks wait for the nursery's imports, because they need them anyway."""
        self._log_path = self.orders.logs / f"nursery-{os.getpid()}.log"
        self._known = KnownImports(self.orders.home.imports, settings, _python())
        self._devices = Devices(settings, self.env)

    @property
    def warm(self) -> bool:
        """Whether a rank would start at once: everything is imported, or nothing is to be."""
        return self._warm is not None or self.want == 0

    def open(self) -> None:
        """Start the nursery."""
        if self.want > 0:
            self._nursery = self._start_nursery(self._plan())

    async def take(self, local_ranks: Iterable[int]) -> list[WorkerProcess]:
        """Return a process for each of these ranks. If the round ends before all are there, those that
        are become standbys again."""
        local_ranks = list(local_ranks)
        self._devices.begin_round(local_ranks)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=LEAVING_LIMIT_S)
        taking = [asyncio.ensure_future(self._take(rank)) for rank in local_ranks]
        try:
            return await asyncio.gather(*taking)
        except BaseException:
            for one in taking:
                one.add_done_callback(self._put_back)
            raise

    def _put_back(self, taking: asyncio.Future[WorkerProcess]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self._keep(taking.result())

    async def _take(self, local_rank: int) -> WorkerProcess:
        """Return the best standby if there is one, else the process that is quickest to get."""
        taken = self._take_standby(self._devices.of(local_rank))
        if taken is None and (self.want == 0 or self._failures >= NURSERY_TRIES):
            taken = self._spawn_fresh()
        elif taken is None:
            taken = await self._fork(rehearse=False)
        taken.local_rank = local_rank
        return taken

    def _take_standby(self, device: Device | None) -> WorkerProcess | None:
        while (standby := devices.choice(self.waiting, device)) is not None:
            self.waiting.remove(standby)
            if standby.process is not None and standby.process.exit is None:
                set_priority(standby.pid, low=False)
                return standby
        return None

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
        self._take_devices()

    async def _add_standby(self) -> None:
        standby = await self._fork(rehearse=True)
        self._keep(standby)
        set_priority(standby.pid, low=True)

    def _keep(self, standby: WorkerProcess) -> None:
        assert standby.process is not None
        standby.process.on_exit = lambda _: self._lose(standby)
        self.waiting.append(standby)
        standby.on_rehearsed = lambda: self._rehearsed(standby)
        if standby.rehearsed:
            self._end_outdated()

    def _rehearsed(self, standby: WorkerProcess) -> None:
        self._end_outdated()
        if standby.device is not None:
            self._measured(standby.device_bytes)
        self._take_devices()

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
            end = standby.process.exit if standby.process is not None else None
            if end is not None and end.code == GAVE_DEVICE_UP:
                self._leave_devices(f"one had to leave its GPU; {self._log_path} says why")
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

    # ---- GPUs ----

    def note_device(self, process: WorkerProcess, report: DeviceUsed) -> None:
        """Note which GPU a rank uses, once it has finished its first step."""
        if process.local_rank is not None:
            if report.own_settings and not self._devices.own_settings:
                log.info("standbys take no GPU: the script sets %s", ", ".join(report.own_settings))
            self._devices.used(process.local_rank, report)
            self._take_devices()

    def note_failure(self, raised: Raised) -> None:
        """Give the GPUs back to a rank that ran out of their memory."""
        if devices.ran_out_of_memory(raised):
            self._leave_devices("a rank ran out of GPU memory")

    def _take_devices(self) -> None:
        """Have one more standby take a GPU, if one may."""
        found = None if self._closed else self._devices.next_order(self.waiting)
        if found is not None:
            standby, device, order = found
            standby.device, standby.taking_device = device, True
            standby.order(order)

    def _measured(self, held_bytes: int) -> None:
        if self._devices.bytes_each is None:
            self.tell(devices.held_text(held_bytes))
        self._devices.bytes_each = max(held_bytes, self._devices.bytes_each or 0)

    def _leave_devices(self, why: str) -> None:
        """End the standbys that hold GPUs, and let no other take one."""
        if not self._devices.allowed:
            return
        self._devices.allowed = False
        holders = [standby for standby in self.waiting if standby.device is not None]
        for standby in holders:
            assert standby.process is not None
            self._leaving.add(self._gone(standby))
            standby.process.send(signal.SIGKILL)
        if self._devices.bytes_each is not None:  # The user was told that they do.
            self.tell(f"standbys hold no GPU any more: {why}")

    def _gone(self, standby: WorkerProcess) -> asyncio.Future[None]:
        """Return a future that is done once a standby has ended."""
        assert standby.process is not None
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone.add_done_callback(self._leaving.discard)

        def ended(_: Exit) -> None:
            self._lose(standby)
            gone.set_result(None)

        standby.process.on_exit = ended
        return gone

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
