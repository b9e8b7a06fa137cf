"""Runs a keeper as this process's child: orders go in, and each is answered once.

A keeper that dies fails the orders that it had not answered. The next order starts another one, which
is first told which checkpointers there are.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
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

DIED = "the keeper died while it wrote, or before; see above, or `dmesg` for an out-of-memory kill"
END_S = 10.0

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)

Answered = Callable[[KeeperReply], None]


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    control: socket.socket
    reader: threading.Thread | None = None
    unanswered: dict[int, tuple[KeeperAction, Answered]] = field(default_factory=dict)

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
        error = self._give(action, answered)
        if error:
            answered(_failed(action, error))

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

    def _give(self, action: KeeperAction, answered: Answered) -> str:
        with self._lock:
            if isinstance(action, OpenCheckpointer):
                self._opened[action.checkpointer] = action
            if self._closed:
                return self._closed
            try:
                if self._child is None:
                    self._child = self._start()
            except (OSError, RuntimeError) as error:
                return f"no keeper could be started: {error}"
            number, self._next = self._next, self._next + 1
            self._child.unanswered[number] = (action, answered)
            try:
                self._child.send(KeeperOrder(number, action))
            except OSError:
                del self._child.unanswered[number]
                return DIED
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
                    action, answered = child.unanswered.pop(reply.number, (None, None))
                if action is not None and answered is not None:
                    answered(completed(action, reply, machine_time()))
        if not self._closed:
            # A keeper that died could not unpin the images that it read.
            Images(self._images).unpin_all()
        with self._lock:
            if self._child is child:
                self._child = None
            unanswered, child.unanswered = child.unanswered, {}
            error = self._closed or DIED
        for action, answered in unanswered.values():
            answered(_failed(action, error))
        child.process.wait()
        child.control.close()


def _failed(action: KeeperAction, error: str) -> KeeperReply:
    return completed(action, KeeperReply(0, error=error), machine_time())


def _received(control: socket.socket) -> bytes:
    try:
        return control.recv(PACKET_BYTES)
    except OSError:
        return b""
