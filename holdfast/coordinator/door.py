"""Accepts connections, and keeps few of those that have not said hello.

A connection costs a file descriptor before anything is known about its peer. So the number that may
wait for a hello is limited, for each address and in all, to a share of the descriptors that this
process may open. An agent says hello at once: its greeting is mostly there when its connection is
accepted. Whoever is still silent when others need the place is cut off, the oldest first, so that even
a flood from one address, which an agent shares, does not keep the agent out.

A few connections are accepted in each turn of the event loop. A burst waits in the kernel's backlog,
and streams that are established are served in between.

An address whose connections keep ending without a hello has its next ones closed as they come, until
it has been quiet for a while. An address from which a node has come is exempt: nodes may share it with
a stranger.

When descriptors run out, accepting pauses; asyncio's own server would try again at once, for ever.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.coordinator.complaints import Complaints
from holdfast.wire.gate import Gate, Guarded

HELLO_LIMIT_S = 5.0
AT_ONCE = 64
"""Connections accepted in one turn of the event loop."""
MOST_WAITING = 1024
SHARE_OF_FILES = 4
PAUSE_S = 0.2
FAILURES = 256
"""Connections of one address that may end without a hello, in a burst."""
FAILURES_PER_S = 32.0
"""How fast that is forgiven."""
MOST_ADDRESSES = 4096
"""Addresses whose failures are remembered."""


class Stranger(Protocol):
    """The protocol of a connection that has not said hello."""

    def cut_off(self, why: str) -> None: ...


@dataclass(eq=False)
class Caller:
    """One connection that has not said hello."""

    address: str
    connection: socket.socket
    stranger: Stranger | None = None
    """None until it has a transport."""
    opening: asyncio.Task[None] | None = None


@dataclass
class Door:
    listener: socket.socket
    tls: ssl.SSLContext | None
    make: Callable[[Caller], Guarded]
    """Makes the protocol of an accepted connection, behind a gate."""
    complaints: Complaints
    most_waiting: int = 0
    """Connections that may wait for a hello, all addresses together; 0: as many as files allow."""
    _waiting: dict[str, dict[Caller, None]] = field(default_factory=dict)
    _count: int = 0
    _failures: dict[str, tuple[float, float]] = field(default_factory=dict)
    """How many connections of an address ended without a hello, forgiven ones deducted, and as of
    when."""
    _trusted: set[str] = field(default_factory=set)
    """Addresses from which a node has come."""
    _pause: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        if not self.most_waiting:
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            self.most_waiting = max(16, min(MOST_WAITING, files // SHARE_OF_FILES))

    @property
    def waiting(self) -> int:
        """Connections that have not said hello."""
        return self._count

    def open(self) -> None:
        self.listener.setblocking(False)
        self.loop.add_reader(self.listener, self._accept)

    def close(self) -> None:
        """Accept no more, and cut off all that have not said hello."""
        if self._pause is not None:
            self._pause.cancel()
        self.loop.remove_reader(self.listener)
        self.listener.close()
        for callers in list(self._waiting.values()):
            for caller in list(callers):
                self._part_with(caller, "the job is over")

    def greeted(self, caller: Caller) -> None:
        """A connection said a hello that was believed."""
        self._trusted.add(caller.address)
        self._failures.pop(caller.address, None)
        self._forget(caller)

    def gone(self, caller: Caller) -> None:
        """A connection has ended. If it never said hello, that is counted."""
        if self._forget(caller):
            if len(self._failures) >= MOST_ADDRESSES:
                self._failures.clear()
            self._failures[caller.address] = (self._failed(caller.address) + 1, self.loop.time())

    # ---- accepting ----

    def _accept(self) -> None:
        for _ in range(min(AT_ONCE, self._most_of_one // 2)):
            try:
                connection, peer = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # Out of descriptors or memory.
                self._rest(error)
                return
            address = str(peer[0]) if isinstance(peer, tuple) else "a local process"
            self._let_in(Caller(address, connection))

    def _let_in(self, caller: Caller) -> None:
        address = caller.address
        if address not in self._trusted and self._failed(address) >= FAILURES:
            self.complaints.say(address, "connection closed: too many of its others said no hello")
            caller.connection.close()
            return
        if len(self._waiting.get(address, ())) >= self._most_of_one:
            self._make_room(address)
        elif self._count >= self.most_waiting:
            self._make_room(max(self._waiting, key=lambda each: len(self._waiting[each])))
        caller.connection.setblocking(False)
        self._waiting.setdefault(address, {})[caller] = None
        self._count += 1
        caller.opening = self.loop.create_task(self._open(caller))

    async def _open(self, caller: Caller) -> None:
        def made() -> asyncio.Protocol:
            return Gate(self.make(caller), self.tls)

        try:
            await self.loop.connect_accepted_socket(made, caller.connection)
        except (OSError, asyncio.CancelledError):  # It is gone already.
            caller.connection.close()
            self.gone(caller)

    # ---- room ----

    @property
    def _most_of_one(self) -> int:
        """Connections of one address that may wait for a hello."""
        return self.most_waiting // 2

    def _make_room(self, address: str) -> None:
        oldest = next(iter(self._waiting[address]))
        self._part_with(oldest, "it said no hello, and newer connections need its place")

    def _part_with(self, caller: Caller, why: str) -> None:
        if caller.stranger is not None:
            caller.stranger.cut_off(why)
        elif caller.opening is not None:
            caller.opening.cancel()
        self.gone(caller)

    def _forget(self, caller: Caller) -> bool:
        callers = self._waiting.get(caller.address)
        if callers is None or caller not in callers:
            return False
        del callers[caller]
        self._count -= 1
        if not callers:
            del self._waiting[caller.address]
        return True

    def _failed(self, address: str) -> float:
        failed, at = self._failures.get(address, (0.0, 0.0))
        return max(0.0, failed - FAILURES_PER_S * (self.loop.time() - at))

    def _rest(self, error: OSError) -> None:
        """Stop accepting for a moment; silent connections make room meanwhile."""
        self.complaints.say(
            "this coordinator",
            f"cannot accept connections ({error.strerror}); raise the limit of open files (ulimit -n)",
        )
        for callers in list(self._waiting.values()):
            for caller in list(callers)[: (len(callers) + 1) // 2]:
                self._part_with(caller, "it said no hello, and file descriptors ran out")
        self.loop.remove_reader(self.listener)
        self._pause = self.loop.call_later(PAUSE_S, self.open)
