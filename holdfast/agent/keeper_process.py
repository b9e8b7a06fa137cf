"""Runs the node's keeper for its agent: orders go in, and each is answered once.

The process is started when there is something to do. If it dies, the next one is given every order
that was not answered, up to a few times for the same order: one that kills keepers is answered with an
error. Keepers that die one after the other are not started again before there is a new order.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from holdfast.agent.outbox import Outbox
from holdfast.agent.processes import Exit, Process, ProcessTable, spawn
from holdfast.clock import machine_time
from holdfast.messages.keeper import (
    BeginRound,
    FromKeeper,
    KeeperAction,
    KeeperEvent,
    KeeperOrder,
    KeeperReply,
    KeeperTerms,
    completed,
)
from holdfast.messages.local import PACKET_BYTES, OpenCheckpointer
from holdfast.messages.requests import Denied, ImageAt
from holdfast.wire.packets import Joiner, packets_of

log = logging.getLogger("holdfast.agent")

TRIES = 3
"""Keepers that may die of one order before it is answered with an error."""
DEATHS_WITHIN_S, DEATHS_MOST = 60.0, 5
"""Rate of deaths above which no keeper is started without a new order."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)

Answered = Callable[[KeeperReply], None]


@dataclass
class _Unanswered:
    order: KeeperOrder
    answered: Answered
    tries: int = 0

    def answer(self, reply: KeeperReply) -> None:
        self.answered(completed(self.order.action, reply, machine_time()))


@dataclass
class KeeperProcess:
    terms: KeeperTerms
    listener: socket.socket
    """Where other nodes get images from; the keeper serves it."""
    table: ProcessTable
    env: dict[str, str]
    started: Callable[[], None]
    """Called with each new keeper, before it is given any unanswered order again."""
    hear: Callable[[KeeperEvent], None]
    """Takes unsolicited events."""
    tell: Callable[[str], None]
    """Prints a line for the user."""
    _unanswered: dict[int, _Unanswered] = field(default_factory=dict)
    _next: int = 1
    _process: Process | None = None
    _control: socket.socket | None = None
    _outbox: Outbox | None = None
    _joiner: Joiner = field(default_factory=Joiner)
    _deaths: list[float] = field(default_factory=list)
    _closing: bool = False

    @property
    def pid(self) -> int:
        """The process id; 0 when there is no keeper."""
        return self._process.pid if self._process is not None else 0

    def give(self, action: KeeperAction, answered: Answered = lambda reply: None) -> None:
        if self._process is None:
            self.start()
        order = KeeperOrder(self._next, action)
        self._next += 1
        self._unanswered[order.number] = _Unanswered(order, answered)
        self._send(order)
        if self._process is not None:
            self._process.send(signal.SIGCONT)  # In case it was stopped.

    def unanswered(self) -> list[KeeperAction]:
        """The actions that are not answered yet."""
        return [one.order.action for one in self._unanswered.values()]

    def kill(self) -> bool:
        """Kill the keeper, to inject a fault; False when there is none."""
        if self._process is not None:
            self._process.send(signal.SIGKILL)
        return self._process is not None

    def close(self) -> None:
        """End the keeper for good."""
        self._closing = True
        self._stop_reading()
        self.kill()

    # ---- the process ----

    def start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.set_inheritable(True)
        command = [sys.executable, "-m", "holdfast.checkpoint.keeper", str(theirs.fileno())]
        fds = (theirs.fileno(), self.listener.fileno())
        pid = spawn(command, self.env, fds, (None, 2, None))
        theirs.close()
        ours.send(_encoder.encode(self.terms))
        ours.setblocking(False)
        # A keeper reads its orders at once; one order may list every rank of a large world.
        self._control, self._outbox, self._joiner = ours, Outbox(ours, None), Joiner()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        self._process = self.table.watch(pid)
        self._process.on_exit = self._exited
        self.started()

    def _exited(self, end: Exit) -> None:
        self._read()  # It may have answered before it died.
        self._process = None
        self._stop_reading()
        if self._closing:
            return
        unanswered, self._unanswered = self._unanswered, {}
        tries = 1 if self._dies_too_often() else TRIES
        if tries > 1:
            log.warning("the keeper died (%s); another takes its place", end)
            self.start()
        for number, one in unanswered.items():
            one.tries += 1
            if isinstance(one.order.action, OpenCheckpointer | BeginRound):
                continue  # Each new keeper is given these first.
            if one.tries >= tries:
                keepers = f"{one.tries} keepers" if one.tries > 1 else "the keeper"
                one.answer(KeeperReply(number, error=f"{keepers} died of it"))
            else:
                self._unanswered[number] = one
                self._send(one.order)

    def _dies_too_often(self) -> bool:
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < DEATHS_WITHIN_S] + [now]
        if len(self._deaths) <= DEATHS_MOST:
            return False
        many = f"{len(self._deaths)} keepers died within a minute"
        self.tell(f"{many}; nothing is kept until the next save")
        return True

    # ---- messages ----

    def _send(self, order: KeeperOrder) -> None:
        if self._outbox is not None:
            self._outbox.put(packets_of(order))

    def _read(self) -> None:
        while self._control is not None:
            try:
                packet = self._control.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._stop_reading()
                return
            message = self._joiner.message(packet, _decoder.decode)
            if isinstance(message, KeeperReply):
                self._take(message)

    def _take(self, reply: KeeperReply) -> None:
        if reply.number:
            one = self._unanswered.pop(reply.number, None)
            if one is not None:
                one.answer(reply)
        elif reply.event is not None and not isinstance(reply.event, ImageAt | Denied):
            self.hear(reply.event)

    def _stop_reading(self) -> None:
        if self._control is not None:
            assert self._outbox is not None
            self._outbox.close()
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = self._outbox = None
