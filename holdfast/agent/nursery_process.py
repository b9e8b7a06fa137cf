"""One nursery, as its agent has it: its process, its socket, and the forks that it owes.

A nursery that imports what the script will may hang in somebody else's module. It tells the agent
which one it imports next, so the agent can end it and knows why. One that works is left alone, however
long it takes: at the lowest priority on a busy node that may be long.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from holdfast import proc
from holdfast.agent.processes import Exit, ProcessTable, WorkerProcess, both_ends, spawn
from holdfast.jobhome import open_privately
from holdfast.messages.local import (
    PACKET_BYTES,
    Fork,
    Forked,
    FromNursery,
    Importing,
    ImportPlan,
    UnfitImports,
    Warm,
)

log = logging.getLogger("holdfast.agent")

_encoder = msgspec.msgpack.Encoder()
_from_nursery: msgspec.msgpack.Decoder[FromNursery] = msgspec.msgpack.Decoder(FromNursery)

LOOK_EVERY_S: Final = 30.0
"""How long an import may show no sign of work."""
MOST_LOOKS: Final = 20
WORKS_S: Final = 0.05
CAP_SYS_NICE: Final = 23


class NurseryDied(Exception):
    """The nursery died before it answered."""


@dataclass(frozen=True)
class NurseryTerms:
    """What all nurseries of a node have in common."""

    table: ProcessTable
    command: Sequence[str]
    env: Mapping[str, str]
    log_path: Path


@dataclass
class _PendingFork:
    """A requested fork, and the socket and page that the process will have."""

    standby: WorkerProcess
    forked: asyncio.Future[WorkerProcess]


class Nursery:
    def __init__(
        self,
        terms: NurseryTerms,
        plan: ImportPlan,
        eager: bool,
        on_warm: Callable[[Nursery], None],
        on_exit: Callable[[Nursery, Exit], None],
        keep: Callable[[WorkerProcess], None],
    ) -> None:
        self.plan = plan
        self.warm: Warm | None = None
        self.unfit: dict[str, str] = {}
        """Modules that made it unfit, and why."""
        self._table = terms.table
        self._on_warm = on_warm
        self._on_exit = on_exit
        self._keep = keep
        """Takes a process that nobody waits for any more."""
        self._forks: deque[_PendingFork] = deque()
        self._retired = False
        self._importing = ""
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        self._worked_s = 0.0
        self._socket: socket.socket | None = None
        self.process = terms.table.watch_nursery(self._spawn(terms, eager))
        self.process.on_exit = self._exited

    def _spawn(self, terms: NurseryTerms, eager: bool) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plan_fd = os.memfd_create("holdfast-imports", os.MFD_CLOEXEC)
        os.pwrite(plan_fd, _encoder.encode(self.plan), 0)
        mode = "eager" if eager else "later"
        env = {**terms.env, "HOLDFAST_WORKER": f"nursery,{theirs.fileno()},{plan_fd},{mode}"}
        output = open_privately(terms.log_path, os.O_WRONLY | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        pid = spawn(terms.command, env, [theirs.fileno(), plan_fd], [null, output, output])
        theirs.close()
        for fd in (plan_fd, output, null):
            os.close(fd)
        ours.setblocking(False)
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._hear)
        return pid

    async def fork(self, rehearse: bool, warm: bool) -> WorkerProcess:
        """Fork a process; NurseryDied if the nursery does not live to do so."""
        with both_ends(warm) as (standby, fds):
            fork = _PendingFork(standby, asyncio.get_running_loop().create_future())
            self._forks.append(fork)
            self._send(Fork(rehearse=rehearse), fds)
        return await fork.forked

    def retire(self) -> None:
        """End once all processes that were requested are forked; they are outdated."""
        self._retired = True
        for fork in self._forks:
            fork.standby.outdated = True
        if not self._forks:
            self.kill()

    def kill(self) -> None:
        self.process.send(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._stop_listening()

    def _send(self, message: Fork, fds: Sequence[int]) -> None:
        if self._socket is not None:
            try:
                socket.send_fds(self._socket, [_encoder.encode(message)], list(fds))
            except OSError:
                log.debug("the nursery is gone; its pidfd will tell")
        self.process.send(signal.SIGCONT)  # In case it was stopped.

    # ---- what it says ----

    def _hear(self) -> None:
        assert self._socket is not None
        try:
            packet = self._socket.recv(PACKET_BYTES)
        except OSError:
            packet = b""
        if not packet:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            return
        message = _from_nursery.decode(packet)
        if isinstance(message, Forked):
            self._forked(message.pid)
        elif isinstance(message, Importing):
            self._importing, self._looks = message.module, 0
            self._look_later()
        elif isinstance(message, UnfitImports):
            self.unfit |= message.modules
        else:
            self._importing = ""
            self._stop_looking()
            self.warm = message
            self._on_warm(self)

    def _forked(self, pid: int) -> None:
        fork = self._forks.popleft()
        fork.standby.process = self._table.watch(pid)
        if fork.forked.cancelled():
            self._keep(fork.standby)
        else:
            fork.forked.set_result(fork.standby)
        if self._retired and not self._forks:
            self.kill()

    # ---- whether it hangs ----

    def _look_later(self) -> None:
        self._stop_looking()
        self._worked_s = self._work_s()
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._looks += 1
        if self._work_s() - self._worked_s < WORKS_S or self._looks >= MOST_LOOKS:
            self.unfit.setdefault(self._importing, "its import hangs")
            self.kill()
        else:
            self._look_later()

    def _work_s(self) -> float:
        return proc.cpu_time(self.process.pid, self.process.pid).ran_ns / 1e9

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- its end ----

    def _exited(self, end: Exit) -> None:
        self._stop_looking()
        self._hear_last_words()
        self._stop_listening()
        if self._importing and not self.unfit:
            self.unfit[self._importing] = "its import ended the process"
        forks, self._forks = list(self._forks), deque()
        self._on_exit(self, end)
        for fork in forks:
            fork.standby.close()
            if not fork.forked.cancelled():
                fork.forked.set_exception(NurseryDied())

    def _hear_last_words(self) -> None:
        """Read what it has said before it ended, except for forks, which may be gone too."""
        while self._socket is not None:
            try:
                packet = self._socket.recv(PACKET_BYTES)
            except OSError:
                return
            if not packet:
                return
            message = _from_nursery.decode(packet)
            if isinstance(message, UnfitImports):
                self.unfit |= message.modules
            elif isinstance(message, Importing):
                self._importing = message.module

    def _stop_listening(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None


def set_priority(pid: int, low: bool) -> None:
    """Let a process run only on idle CPUs, where its priority can be raised again."""
    if not proc.has_capability(CAP_SYS_NICE):
        return
    policy = os.SCHED_IDLE if low else os.SCHED_OTHER
    try:
        os.sched_setscheduler(pid, policy, os.sched_param(0))
    except (ProcessLookupError, PermissionError):
        pass
