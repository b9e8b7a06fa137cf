"""The agent's end of a worker's restartable function: see `docs/inprocess.md`.

    inside ──▶ returned ──▶ released          its script goes on, and ends as any other
       │           │
       └───────────┴──▶ leaving ──▶ left      its process is parked until it enters again
                           └──▶ (killed)      it took too long

A worker that raised leaves by itself; all others are told to.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol

import msgspec
from msgspec.structs import replace

from holdfast.messages.local import Assign, Dismiss, Leave, Release, ToFunction
from holdfast.messages.units import RoundNumber, Seconds

log = logging.getLogger("holdfast.agent")

ATOMIC_FLOOR_S: Final = 60.0
"""How long the end of an atomic section is waited for, or three times the longest that one took."""
ATOMIC_FACTOR: Final = 3.0

_encoder = msgspec.msgpack.Encoder()


class FunctionOrders(Protocol):
    """The way of orders to a restartable function."""

    def send(self, message: ToFunction, fds: Sequence[int] = ()) -> None: ...
    def close(self) -> None: ...


class FunctionSocket:
    """The agent's end of the socket on which a restartable function hears orders."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)

    def send(self, message: ToFunction, fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._socket, [_encoder.encode(message)], list(fds))
        except OSError as error:
            # Its pidfd tells if it died; what cannot hear is given up in time.
            log.debug("a restartable function cannot be told %s: %s", type(message).__name__, error)

    def close(self) -> None:
        self._socket.close()


class RestartableFunction:
    """One worker's function, over all its entries."""

    def __init__(self, orders: FunctionOrders) -> None:
        self.stage: Literal["inside", "returned", "leaving", "left", "released"] = "inside"
        self.took_s: Seconds | None = None
        """How long it took to leave when it was told to."""
        self._orders = orders
        self._why = ""
        """What broke the last round, also for a worker that had left by itself."""
        self._left_from = 0.0
        self._postponed_at: float | None = None
        self._longest_atomic_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._give_up: Callable[[], None] = lambda: None

    @property
    def stays(self) -> bool:
        """Whether its process can be kept when the round breaks."""
        return self.stage != "released"

    @property
    def is_atomic(self) -> bool:
        """Whether it will leave at the end of an atomic section, which has a limit of its own."""
        return self._postponed_at is not None

    def leave(
        self, round: RoundNumber, why: str, limit_s: Seconds, give_up: Callable[[], None]
    ) -> None:
        """Have the function left; call `give_up` if that takes longer than the limit."""
        self._why = why
        if self.stage in ("left", "released"):
            return
        loop = asyncio.get_running_loop()
        if self.stage != "leaving":
            self._left_from = loop.time()
            self._orders.send(Leave(round=round, why=why))
        self.stage = "leaving"
        self._give_up = give_up
        self._set_timer(limit_s)

    def raised(self) -> None:
        """Note that it raised, and leaves by itself."""
        if self.stage != "leaving":
            self.stage, self._left_from = "leaving", asyncio.get_running_loop().time()

    def postponed(self) -> None:
        """Note that an atomic section comes first: it has a limit of its own."""
        if self.stage == "leaving" and self._timer is not None:
            self._postponed_at = asyncio.get_running_loop().time()
            self._set_timer(max(ATOMIC_FLOOR_S, ATOMIC_FACTOR * self._longest_atomic_s))

    def left(self) -> None:
        """Note that it was left."""
        now = asyncio.get_running_loop().time()
        if self._postponed_at is not None:
            self._longest_atomic_s = max(self._longest_atomic_s, now - self._postponed_at)
        else:
            self.took_s = now - self._left_from
        self._postponed_at = None
        self._stop_timer()
        self.stage = "left"

    def release(self) -> None:
        """Let the script go on: the function has returned on all ranks."""
        if self.stage == "returned":
            self.stage = "released"
            self._orders.send(Release())

    def enter(self, assign: Assign, fds: Sequence[int]) -> None:
        """Have it entered again, as another rank perhaps."""
        self.stage, self.took_s = "inside", None
        self._orders.send(replace(assign, why=self._why), fds)

    def dismiss(self, why: str) -> None:
        """Tell a process that was parked that it is not needed any more."""
        self._orders.send(Dismiss(why=why))

    def close(self) -> None:
        self._stop_timer()
        self._orders.close()

    def _set_timer(self, limit_s: Seconds) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
