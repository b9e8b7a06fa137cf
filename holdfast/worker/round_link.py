"""Connects a restartable function with the agent.

The agent's orders come on a socket of their own, which one thread reads: the function's thread may be
anywhere when it is told to leave. What the worker says goes the way of all its messages.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta

import msgspec

from holdfast import kernel
from holdfast.inprocess.link import Leave, RoundEntry
from holdfast.messages import local
from holdfast.messages.local import ASSIGN_FDS, PACKET_BYTES, Assign, Dismiss, Release, ToFunction
from holdfast.messages.records import Raised
from holdfast.messages.requests import MAX_REASON, StopJob
from holdfast.shm.vital_signs import UNWATCHED
from holdfast.worker.channel import move_up
from holdfast.worker.runtime import Runtime
from holdfast.worker.torch_hooks.patches import StoreSocket

_decoder: msgspec.msgpack.Decoder[ToFunction] = msgspec.msgpack.Decoder(ToFunction)


class AgentRoundLink:
    replaces = True

    def __init__(
        self,
        worker: Runtime,
        store: StoreSocket,
        record: Callable[[str], None],
        renew: Callable[[Assign, list[int]], None],
    ) -> None:
        self._worker = worker
        self._store = store
        self._record = record
        """Writes the flight recorder's file, with the line that failed."""
        self._renew = renew
        self._leave: Leave = lambda why: None
        self._why = ""
        self._hearing = threading.Lock()
        self._inside = 0
        """Round of the entry that may be told to leave; 0 if there is none."""
        self._told: local.Leave | None = None
        """The newest order to leave: it may come before its round is entered, or after."""
        self._orders: queue.SimpleQueue[tuple[Assign, list[int]] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        """Set when the wait for the other ranks is over: they have all returned, or the round broke."""
        self._released = False

    # ---- the function's thread ----

    def open(self, leave: Leave) -> RoundEntry:
        self._leave = leave
        self._inside = self._worker.round
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        orders = socket.socket(fileno=move_up(ours.detach()))
        with theirs:
            self._worker.channel.send_with(local.Restartable(), theirs.fileno())
        threading.Thread(target=self._listen, args=[orders], daemon=True).start()
        return self._entry()

    def returned(self) -> bool:
        self._worker.channel.send(local.FunctionReturned())
        self._over.wait()
        return self._released

    def raised(self, error: Raised) -> None:
        at = time.monotonic()
        self._record(error.where)
        self._worker.channel.send(local.FunctionRaised(raised=error, at=at))

    def postponed(self) -> None:
        self._worker.channel.send(local.LeavingPostponed())

    def left(self) -> None:
        with self._hearing:  # Whoever tells it to leave has done so.
            self._inside = 0
        for copies in self._worker.copies.values():
            for copy in copies:
                copy.end()
        self._worker.parked = True
        self._worker.channel.send(local.FunctionLeft())

    def next(self) -> RoundEntry | None:
        found = self._orders.get()
        if found is None:
            return None
        self._over.clear()
        self._why = found[0].why
        self._renew(*found)
        with self._hearing:
            self._inside = self._worker.round
            self._heed()
        return self._entry()

    def gather(self, name: str, value: bytes) -> list[bytes]:
        from holdfast.worker.torch_store import LONGEST_S, CoordinatorStore  # It imports torch.

        store = CoordinatorStore(self._worker.requests)
        store.set_timeout(timedelta(seconds=LONGEST_S))
        keys = [f"inprocess/{name}/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
        store.set(keys[int(os.environ["RANK"])], value)
        return store.multi_get(keys)

    def serve_store(self) -> None:
        self._store.serve()
        self._worker.renumbered = True

    def resumed(self, step: int) -> None:
        self._worker.resumed(step)

    def ping(self) -> None:
        self._worker.heartbeat()

    def pause_watch(self) -> AbstractContextManager[None]:
        return self._worker.section(UNWATCHED)

    def stop(self, reason: str, code: int) -> None:
        self._worker.requests.ask(StopJob(reason=reason[:MAX_REASON], code=code))

    def close(self) -> None:
        self._worker.channel.send(local.FunctionClosed())

    def _entry(self) -> RoundEntry:
        env = os.environ
        return RoundEntry(
            round=self._worker.round,
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            node_rank=int(env["GROUP_RANK"]),
            why=self._why,
        )

    # ---- the thread that hears the agent ----

    def _listen(self, orders: socket.socket) -> None:
        kernel.name_process("holdfast-leave")  # Names this thread only.
        while True:
            packet, fds, _, _ = socket.recv_fds(
                orders, PACKET_BYTES, ASSIGN_FDS, socket.MSG_CMSG_CLOEXEC
            )
            if not packet:
                return  # The agent is gone, and this process with it.
            self._obey(_decoder.decode(packet), list(fds))

    def _obey(self, order: ToFunction, fds: list[int]) -> None:
        if isinstance(order, Assign):
            self._orders.put((order, fds))
        elif isinstance(order, Dismiss):
            self._why = order.why
            self._orders.put(None)
        elif isinstance(order, Release):
            self._released = True
            self._over.set()
        else:
            with self._hearing:
                self._told = order
                self._heed()

    def _heed(self) -> None:
        """Have the function left, if it runs in the round that is to be left."""
        if self._told is not None and self._told.round == self._inside:
            self._why = self._told.why
            self._over.set()
            self._leave(self._told.why)
