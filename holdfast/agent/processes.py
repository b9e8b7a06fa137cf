"""Starts, watches and ends the processes of a node.

A process is watched by its pidfd, which wakes the event loop the moment the process is gone;
nothing is polled. Each worker leads a process group of its own, and the agent adopts orphans, so
even a daemon that a script forked twice can be found and ended with the round it came from.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from holdfast import kernel, proc
from holdfast.agent.devices import Device
from holdfast.agent.function import FunctionSocket, RestartableFunction
from holdfast.agent.outbox import Outbox
from holdfast.messages.local import (
    PACKET_BYTES,
    Assign,
    FromWorker,
    Restartable,
    ScriptReply,
    Standing,
    TakeDevice,
    Test,
)
from holdfast.shm.rank_page import RankPage, create_page
from holdfast.wire.packets import Joiner, packets_of

log = logging.getLogger("holdfast.agent")

_encoder = msgspec.msgpack.Encoder()
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


@dataclass(frozen=True)
class Exit:
    """How a process ended: exactly one of the two is set."""

    code: int | None = None
    signal: int | None = None


class Process:
    """A child of this agent, watched until it is gone."""

    def __init__(self, table: ProcessTable, pid: int, leads_group: bool) -> None:
        self.pid = pid
        self.exit: Exit | None = None
        self.on_exit: Callable[[Exit], None] = lambda end: None
        self._table = table
        self._leads_group = leads_group
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process is gone."""
        if self.exit is not None:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass

    def send_to_group(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the group that it leads."""
        if self.exit is None:  # Until it is reaped, its pid is that of no other group.
            try:
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def _reap(self) -> None:
        info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return
        if self._leads_group:
            # While it is a zombie its pid cannot be reused: end the rest of its group.
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._table.forget(self)
        by_itself = info.si_code == os.CLD_EXITED
        self.exit = Exit(code=info.si_status) if by_itself else Exit(signal=info.si_status)
        self.on_exit(self.exit)

    def reaction_to(self, number: signal.Signals) -> proc.Reaction:
        """Return what a signal would do to it."""
        return proc.reaction_to(self.pid, number)


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    fds: Collection[int] = (),
    stdio: Sequence[int | None] = (None, None, None),
) -> int:
    """Start a command that leads its own group and dies with this agent; return its pid."""
    agent = os.getpid()

    def prepare() -> None:
        os.setsid()
        kernel.unblock_signals()
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:
            os._exit(1)

    child = subprocess.Popen(
        list(command),
        env=dict(env),
        pass_fds=tuple(fds),
        stdin=stdio[0],
        stdout=stdio[1],
        stderr=stdio[2],
        preexec_fn=prepare,
    )
    child.returncode = 0  # Its pidfd is waited for; Popen must not wait.
    return child.pid


class ProcessTable:
    """Every process that this agent knows; its other children are strays that a script left behind.

    A process that the nursery has just forked is a child before the agent has heard of it. Its
    process group tells it from a stray: it stays in its nursery's group until it gets a rank.
    """

    def __init__(self) -> None:
        self._known: dict[int, Process] = {}
        self._nursery_groups: set[int] = set()
        self.spared: Callable[[], Collection[int]] = tuple
        """Returns further processes that are no strays."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap_strays)

    def watch(self, pid: int, leads_group: bool = True) -> Process:
        process = self._known[pid] = Process(self, pid, leads_group)
        return process

    def watch_nursery(self, pid: int) -> Process:
        self._nursery_groups.add(pid)
        return self.watch(pid, leads_group=False)

    def forget(self, process: Process) -> None:
        del self._known[process.pid]
        self._nursery_groups.discard(process.pid)

    def end_strays(self) -> int:
        """Kill what scripts left behind; return how many there were.

        A manager of shared memory is left alone: it ends once it has removed what the others left.
        """
        ended = 0
        while strays := [pid for pid in self._strays() if not proc.removes_shared_memory(pid)]:
            for pid in strays:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    ended += 1
                except (ProcessLookupError, ChildProcessError):
                    pass
        return ended

    def _reap_strays(self) -> None:
        """Reap orphans that ended by themselves, so that none stays a zombie."""
        for pid in self._strays():
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass

    def _strays(self) -> list[int]:
        known = {*self._known, *self.spared()}
        unknown = [pid for pid in kernel.children(os.getpid()) if pid not in known]
        return [pid for pid in unknown if _group_of(pid) not in self._nursery_groups]


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


class WorkerProcess:
    """A process with its control socket and rank page: a standby, then the process of a rank."""

    def __init__(self, control: socket.socket, page_fd: int, warm: bool) -> None:
        self.control = control
        self.page = RankPage(page_fd)
        self.warm = warm
        self.rehearsed = False
        self.outdated = False
        """Whether newer standbys have imported more."""
        self.local_rank: int | None = None
        """The rank that it was given."""
        self.device: Device | None = None
        """The GPU that it holds, or takes now."""
        self.device_bytes = 0
        self.taking_device = False
        self.on_rehearsed: Callable[[], None] = lambda: None
        self.process: Process | None = None
        self.function: RestartableFunction | None = None
        self.hear: Callable[[FromWorker], None] = self._hear_standby
        self._outbox = Outbox(control)
        self._joiner = Joiner()
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control.fileno(), self._read)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    def order(self, message: Assign | Test | TakeDevice, fds: Sequence[int] = ()) -> None:
        """Make it a rank, or have it test the node: it is no standby after that. Or have it take a
        GPU."""
        try:
            socket.send_fds(self.control, [_encoder.encode(message)], list(fds))
        except OSError:  # Its pidfd tells that it died.
            log.debug("process %d died before it got its rank", self.pid)

    def reply(self, message: ScriptReply) -> None:
        """Answer its script; one that does not read its answers gets no more."""
        if self.control.fileno() >= 0 and not self._outbox.put(packets_of(message)):
            log.warning("process %d does not read its answers; it gets no more of them", self.pid)
            self._stop_reading()

    def read_all(self) -> None:
        """Take what it still said before it died."""
        while self.control.fileno() >= 0 and self._read():
            pass

    def close(self) -> None:
        self.read_all()
        self._stop_reading()
        self.page.close()
        if self.function is not None:
            self.function.close()

    def _read(self) -> bool:
        fds: list[int] = []
        try:
            packet, fds, _, _ = socket.recv_fds(self.control, PACKET_BYTES, 1)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        if not packet:
            self._stop_reading()
            return False
        try:
            message = self._joiner.message(packet, _from_worker.decode)
            if isinstance(message, Restartable) and fds and self.function is None:
                self.function = RestartableFunction(FunctionSocket(fds.pop()))
            if message is not None:
                self.hear(message)
        except msgspec.DecodeError as error:
            log.warning("process %d sent an invalid message: %s", self.pid, error)
        for fd in fds:
            os.close(fd)
        return True

    def _stop_reading(self) -> None:
        """Close the socket. A script may do so and live on: the process is watched, not the
        socket."""
        if self.control.fileno() >= 0:
            self._outbox.close()
            asyncio.get_running_loop().remove_reader(self.control.fileno())
            self.control.close()

    def _hear_standby(self, message: FromWorker) -> None:
        if isinstance(message, Standing):
            self.rehearsed, self.taking_device = True, False
            self.device_bytes = message.device_bytes or 0
            self.on_rehearsed()


@contextmanager
def both_ends(warm: bool) -> Iterator[tuple[WorkerProcess, list[int]]]:
    """Yield the agent's end of a new process and the descriptors for its own, closed on exit."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page_fd = create_page()
    try:
        yield WorkerProcess(ours, page_fd, warm), [theirs.fileno(), page_fd]
    finally:
        theirs.close()
        os.close(page_fd)
