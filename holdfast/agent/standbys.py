"""Keeps processes that wait for a rank.

They are forked from one nursery (see `holdfast.worker.nursery`), which also provides the processes
of the first round. After ranks were assigned the pool is refilled, but only once those ranks have
finished a step, and at the lowest priority: standbys never take time from the ranks they are for.
Without a nursery (`--standby 0`), each rank gets a fresh process instead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast import proc
from holdfast.agent.orders import AgentOrders
from holdfast.agent.processes import (
    Exit,
    Process,
    ProcessTable,
    WorkerProcess,
    both_ends,
    spawn,
)
from holdfast.config.settings import RunSettings
from holdfast.jobhome import open_privately
from holdfast.messages.local import NOT_FORKABLE, PACKET_BYTES, Fork, FromNursery, Local, Warm

log = logging.getLogger("holdfast.agent")

_encoder = msgspec.msgpack.Encoder()
_from_nursery: msgspec.msgpack.Decoder[FromNursery] = msgspec.msgpack.Decoder(FromNursery)

NURSERY_TRIES = 3
STANDBY_FLOOR_BYTES = 64 << 20
MEMORY_SHARE = 0.25
CAP_SYS_NICE = 23


@dataclass
class _PendingFork:
    """A requested fork, and the socket and page that the process will have."""

    standby: WorkerProcess
    forked: asyncio.Future[WorkerProcess]


@dataclass
class Pool:
    """All processes of this node that have no rank yet."""

    orders: AgentOrders
    table: ProcessTable
    env: Mapping[str, str]
    on_warm: Callable[[], None] = lambda: None
    waiting: list[WorkerProcess] = field(default_factory=list)
    _forks: deque[_PendingFork] = field(default_factory=deque)
    _adding: set[asyncio.Future[None]] = field(default_factory=set)
    _nursery: Process | None = None
    _socket: socket.socket | None = None
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

    @property
    def warm(self) -> bool:
        """Whether a rank would start at once: everything is imported, or nothing is to be."""
        return self._warm is not None or self.want == 0

    def open(self) -> None:
        """Start the nursery."""
        if self.want > 0:
            self._start_nursery()

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
        """Return a rehearsed standby if there is one, else the process that is quickest to get."""
        self.waiting.sort(key=lambda standby: not standby.rehearsed)
        while self.waiting:
            standby = self.waiting.pop(0)
            if standby.process is not None and standby.process.exit is None:
                _set_priority(standby.pid, low=False)
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
        for _ in range(self._affordable() - len(self.waiting) - len(self._adding)):
            adding = asyncio.ensure_future(self._add_standby())
            self._adding.add(adding)
            adding.add_done_callback(self._adding.discard)

    async def _add_standby(self) -> None:
        standby = await self._fork(rehearse=True)
        self._keep(standby)
        _set_priority(standby.pid, low=True)

    def _keep(self, standby: WorkerProcess) -> None:
        assert standby.process is not None
        standby.process.on_exit = lambda _: self._lose(standby)
        self.waiting.append(standby)

    def _lose(self, standby: WorkerProcess) -> None:
        if standby in self.waiting:
            self.waiting.remove(standby)
            standby.close()
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
        if self._nursery is not None:
            self._nursery.send(signal.SIGKILL)
        self._close_socket()

    # ---- the nursery ----

    def _start_nursery(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mode = "eager" if self._eager else "later"
        env = {
            **self.env,
            "HOLDFAST_WORKER": f"nursery,{theirs.fileno()},{mode}",
            "HOLDFAST_NURSERY_PRELOAD": " ".join(self.orders.settings.preload),
            "HOLDFAST_FIRST_PATH": _first_path(self.orders.settings),
        }
        output = open_privately(self._log_path, os.O_WRONLY | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        pid = spawn(self._command(), env, [theirs.fileno()], [null, output, output])
        theirs.close()
        os.close(output)
        os.close(null)
        self._nursery = self.table.watch_nursery(pid)
        self._nursery.on_exit = self._nursery_exited
        self._socket = ours
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._hear_nursery)

    def _close_socket(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _nursery_exited(self, end: Exit) -> None:
        self._close_socket()
        self._nursery = None
        if self._closed:
            return
        self._failures += 1
        if end.code == NOT_FORKABLE:
            self._failures = NURSERY_TRIES
            log.warning("no standbys: a module of --preload has initialized the GPUs")
        else:
            log.warning("the nursery died (%s); see %s", end, self._log_path)
        forks, self._forks = list(self._forks), deque()
        if self._failures < NURSERY_TRIES:
            self._start_nursery()
        for fork in forks:
            fork.standby.close()
            if not fork.forked.cancelled():
                fork.forked.set_exception(_NurseryDied())

    async def _fork(self, rehearse: bool) -> WorkerProcess:
        """Fork a process, from the next nursery if this one dies meanwhile."""
        while self._failures < NURSERY_TRIES and self._socket is not None:
            with both_ends(warm=self._warm is not None or self._eager) as (standby, fds):
                fork = _PendingFork(standby, asyncio.get_running_loop().create_future())
                self._forks.append(fork)
                self._send(Fork(rehearse=rehearse), fds)
            try:
                return await fork.forked
            except _NurseryDied:
                continue
        return self._spawn_fresh()

    def _send(self, message: Local, fds: Sequence[int]) -> None:
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [_encoder.encode(message)], list(fds))
        except OSError:
            log.debug("the nursery is gone; its pidfd will tell")
        if self._nursery is not None:
            self._nursery.send(signal.SIGCONT)  # In case it was stopped.

    def _hear_nursery(self) -> None:
        assert self._socket is not None
        try:
            packet = self._socket.recv(PACKET_BYTES)
        except OSError:
            packet = b""
        if not packet:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            return
        message = _from_nursery.decode(packet)
        if isinstance(message, Warm):
            self._warm = message
            self.on_warm()
            return
        fork = self._forks.popleft()
        fork.standby.process = self.table.watch(message.pid)
        if fork.forked.cancelled():
            self._keep(fork.standby)
        else:
            fork.forked.set_result(fork.standby)

    def _spawn_fresh(self) -> WorkerProcess:
        with both_ends(warm=False) as (worker, fds):
            control_fd, page_fd = fds
            env = {**self.env, "HOLDFAST_WORKER": f"fresh,{control_fd},{page_fd}"}
            worker.process = self.table.watch(spawn(self._command(), env, fds))
        return worker

    def _command(self) -> list[str]:
        settings, python = self.orders.settings, os.environ.get("PYTHON_EXEC", sys.executable)
        return [python, "-u", "-m", "holdfast.worker", settings.script, *settings.script_args]


class _NurseryDied(Exception):
    """The nursery died before it answered."""


def _set_priority(pid: int, low: bool) -> None:
    """Let a standby run only on idle CPUs, where its priority can be raised again."""
    if not proc.has_capability(CAP_SYS_NICE):
        return
    policy = os.SCHED_IDLE if low else os.SCHED_OTHER
    try:
        os.sched_setscheduler(pid, policy, os.sched_param(0))
    except (ProcessLookupError, PermissionError):
        pass


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
