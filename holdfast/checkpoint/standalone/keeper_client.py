"""Runs a keeper as this process's child: orders go in, and each is answered once.

When a keeper dies, another is started, told which checkpointers there are, and given the orders that
the first had not answered: to carry one out twice does no harm. An order that two keepers have died of
fails.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.checkpoint.memory.images import Images
from holdfast.clock import machine_time
from holdfast.messages.keeper import (
    BeginRound,
    FromKeeper,
    KeeperAction,
    KeeperOrder,
    KeeperReply,
    KeeperTerms,
    completed,
)
from holdfast.messages.local import PACKET_BYTES, OpenCheckpointer
from holdfast.messages.units import NodeId, Rank
from holdfast.wire.packets import Joiner, packets_of

DIED = "the keeper died, and the next one too; see above, or `dmesg` for an out-of-memory kill"
TRIES = 2
END_S = 10.0

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)

Answered = Callable[[KeeperReply], None]


@dataclass
class _GivenOrder:
    action: KeeperAction
    answered: Answered
    tries: int = 0
    """Keepers that were given it."""


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    control: socket.socket
    reader: threading.Thread | None = None
    unanswered: dict[int, _GivenOrder] = field(default_factory=dict)

    def send(self, order: KeeperOrder) -> None:
        for packet in packets_of(order):
            self.control.send(packet)


class ScriptKeeper:
    def __init__(self, node: NodeId, rank: Rank, images: Path) -> None:
        self._node, self._rank, self._images = node, rank, images
        self._opened: dict[str, OpenCheckpointer] = {}
        self._lock = threading.Lock()
        self._next = 1
        self._closed = ""
        self._child: _Child | None = None
        # Now, and not with the first order: an interpreter that is about to exit starts nothing.
        with self._lock:
            self._child = self._start()

    @property
    def pid(self) -> int:
        """The process id; 0 when there is no keeper."""
        child = self._child
        return 0 if child is None else child.process.pid

    def give(self, action: KeeperAction, answered: Answered = lambda reply: None) -> None:
        """Give an order; `answered` is called with its reply, by any thread."""
        self._give_one(_GivenOrder(action, answered))

    def _give_one(self, one: _GivenOrder) -> None:
        error = self._try(one)
        if error:
            one.answered(_failed(one.action, error))

    def ask(self, action: KeeperAction) -> KeeperReply:
        """Give an order and wait for its reply."""
        reply: Future[KeeperReply] = Future()
        self.give(action, reply.set_result)
        return reply.result()

    def close(self, why: str) -> None:
        """End the keeper; orders without a reply, and all after them, fail for this reason."""
        with self._lock:
            self._closed, child = self._closed or why, self._child
        if child is not None and child.reader is not None:
            child.process.kill()
            # A thread that is in a call to torch when the interpreter ends would abort the process.
            child.reader.join(END_S)
            child.process.wait()

    def _try(self, one: _GivenOrder) -> str:
        """Hand an order to the keeper, and start one if there is none; return why that failed."""
        with self._lock:
            action = one.action
            if isinstance(action, OpenCheckpointer):
                self._opened[action.checkpointer] = action
            if self._closed or one.tries >= TRIES:
                return self._closed or DIED
            try:
                if self._child is None:
                    self._child = self._start()
            except (OSError, RuntimeError) as error:
                return f"no keeper could be started: {error}"
            number, self._next, one.tries = self._next, self._next + 1, one.tries + 1
            self._child.unanswered[number] = one
            with suppress(
                OSError
            ):  # It has died; whoever reads its replies gives this to the next.
                self._child.send(KeeperOrder(number, action))
        return ""

    def _start(self) -> _Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "holdfast.checkpoint.keeper", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdout=2)
        theirs.close()
        child = _Child(process, ours)
        child.reader = threading.Thread(
            target=self._read, args=(child,), name="keeper", daemon=True
        )
        child.reader.start()
        terms = KeeperTerms(
            node=self._node,
            images=str(self._images),
            token="",
            job="",
            listener_fd=None,
            own=True,
        )
        ours.send(_encoder.encode(terms))
        child.send(KeeperOrder(0, BeginRound(ranks=(self._rank,))))
        for opened in self._opened.values():
            child.send(KeeperOrder(0, opened))
        return child

    def _read(self, child: _Child) -> None:
        joiner = Joiner()
        while packet := _received(child.control):
            reply = joiner.message(packet, _decoder.decode)
            if isinstance(reply, KeeperReply):
                with self._lock:
                    one = child.unanswered.pop(reply.number, None)
                if one is not None:
                    one.answered(completed(one.action, reply, machine_time()))
        if not self._closed:
            # A keeper that died could not unpin the images that it read.
            Images(self._images).unpin_all()
        with self._lock:
            if self._child is child:
                self._child = None
            unanswered, child.unanswered = child.unanswered, {}
        child.process.wait()
        child.control.close()
        for one in unanswered.values():
            self._give_one(one)


def _failed(action: KeeperAction, error: str) -> KeeperReply:
    return completed(action, KeeperReply(0, error=error), machine_time())


def _received(control: socket.socket) -> bytes:
    try:
        return control.recv(PACKET_BYTES)
    except OSError:
        return b""
