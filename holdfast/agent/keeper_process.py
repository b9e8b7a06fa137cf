"""A node's keeper, as its agent sees it: orders go in, and every one is answered once.

The process is started when there is something to do. If it dies, the next one is given every order
that was not answered, up to a few times for one and the same order: one that kills keepers is answered
with an error. Keepers that die one after the other are not started again before there is something
new to do.
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
from typing import Any

import msgspec

from holdfast.agent.outbox import Outbox
from holdfast.agent.processes import Exit, Process, ProcessTable, spawn
from holdfast.messages.keeper import (
    AnyOrder,
    AnyReply,
    Begin,
    BeginRound,
    Done,
    FromKeeper,
    Open,
    Received,
    Wrote,
)
from holdfast.messages.local import PACKET_BYTES, Piece
from holdfast.wire.packets import Joiner, packets_of

log = logging.getLogger("holdfast.agent")

TRIES = 3
"""So many keepers may die with one order."""
FEW_S, MANY = 60.0, 5
"""So many deaths in so short a time are too many."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)

Answering = Callable[[Any], None]


@dataclass
class _Order:
    order: AnyOrder
    answered: Answering
    tries: int = 0


@dataclass
class KeeperProcess:
    begin: Begin
    listener: socket.socket
    """Where other nodes get images from; the keeper serves it."""
    table: ProcessTable
    env: dict[str, str]
    started: Callable[[], None]
    """Called with each new keeper, before any order that is given to it again."""
    hear: Callable[[Received | Wrote], None]
    """What it says unasked."""
    tell: Callable[[str], None]
    """Say something to the person at the terminal."""
    _orders: dict[int, _Order] = field(default_factory=dict)
    _next: int = 1
    _process: Process | None = None
    _control: socket.socket | None = None
    _outbox: Outbox | None = None
    _joiner: Joiner = field(default_factory=Joiner)
    _deaths: list[float] = field(default_factory=list)
    _closing: bool = False

    @property
    def pid(self) -> int:
        """0 when there is none."""
        return self._process.pid if self._process is not None else 0

    def give(self, order: AnyOrder, answered: Answering) -> None:
        if self._process is None:
            self.start()
        numbered = msgspec.structs.replace(order, number=self._next)
        self._orders[self._next] = _Order(numbered, answered)
        self._next += 1
        self._send(numbered)
        if self._process is not None:
            self._process.send(signal.SIGCONT)  # Should somebody have stopped it.

    def open_orders(self) -> list[AnyOrder]:
        """What is not answered yet."""
        return [held.order for held in self._orders.values()]

    def kill(self) -> bool:
        """Somebody wants to see what happens then; False when there is none."""
        if self._process is not None:
            self._process.send(signal.SIGKILL)
        return self._process is not None

    def close(self) -> None:
        """The node is done."""
        self._closing = True
        self._stop_reading()
        self.kill()

    # ---- its life ----

    def start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.set_inheritable(True)
        command = [sys.executable, "-m", "holdfast.checkpoint.keeper", str(theirs.fileno())]
        fds = (theirs.fileno(), self.listener.fileno())
        pid = spawn(command, self.env, fds, (None, 2, None))
        theirs.close()
        ours.send(_encoder.encode(self.begin))
        ours.setblocking(False)
        # It reads all that it is told, at once; an order may list every rank of a large world.
        self._control, self._outbox, self._joiner = ours, Outbox(ours, None), Joiner()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        self._process = self.table.watch(pid)
        self._process.on_exit = self._exited
        self.started()

    def _exited(self, end: Exit) -> None:
        self._read()  # What it had done, it has done.
        self._process = None
        self._stop_reading()
        if self._closing:
            return
        held, self._orders = self._orders, {}
        tries = 1 if self._too_often() else TRIES
        if tries > 1:
            log.warning("the keeper died (%s); another takes its place", end)
            self.start()
        for number, one in held.items():
            one.tries += 1
            if isinstance(one.order, Open | BeginRound):
                continue  # Whoever starts is told these first.
            if one.tries >= tries:
                one.answered(_lost(one.order, one.tries))
            else:
                self._orders[number] = one
                self._send(one.order)

    def _too_often(self) -> bool:
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < FEW_S] + [now]
        if len(self._deaths) <= MANY:
            return False
        many = f"{len(self._deaths)} keepers died within a minute"
        self.tell(f"{many}; nothing is kept until the next save")
        return True

    # ---- what is said ----

    def _send(self, order: AnyOrder) -> None:
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
            if message is not None:
                self._take(message)

    def _take(self, message: FromKeeper) -> None:
        if isinstance(message, Received | Wrote):
            self.hear(message)
        elif not isinstance(message, Piece):
            held = self._orders.pop(message.number, None)
            if held is not None:
                held.answered(message)

    def _stop_reading(self) -> None:
        if self._control is not None:
            assert self._outbox is not None
            self._outbox.close()
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = self._outbox = None


def _lost(order: AnyOrder, deaths: int) -> AnyReply:
    many = f"{deaths} keepers" if deaths > 1 else "the keeper"
    return Done(number=order.number, error=f"{many} died of it")
