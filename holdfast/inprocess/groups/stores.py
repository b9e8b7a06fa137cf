"""Watches the stores through which torch's process groups are made, so that these waits can be ended.

`init_process_group` makes a TCPStore: rank 0 serves it at MASTER_PORT, every rank connects to it. A
rank whose peer never comes waits there in C++, where no exception of Python reaches it: it is freed by
shutting down its connection to the store, which belongs to the round that is over. A connection to the
same port that existed before (several clients share the store of torchrun) is not touched, nor is any
store that the script made itself.

Two of torch's own waits are replaced because a restart cannot afford them. A rank that comes before
rank 0 serves would retry after a second or more, without listening to anybody: here it tries again
within milliseconds, in Python, where it can be made to leave. And rank 0 would look every 10 ms whether
all have connected, although every group waits for the ranks that it needs when it is made.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from holdfast.inprocess.groups.sockets import tcp_socket

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.001, 0.02
_CONNECT_S = 3.0
"""Longer than the first retransmission of a SYN."""
_FIRST_PATIENCE_S = 0.02
_LAST_TRY_S = 1.0


class Stores:
    """The stores that torch's rendezvous has made since the last `forget`."""

    def __init__(self) -> None:
        self._made: list[_StoreSockets] = []

    def watch(self, rendezvous: Any) -> None:
        """Have the module make its stores through here."""
        if not isinstance(rendezvous.TCPStore, _StoreMaker):
            rendezvous.TCPStore = _StoreMaker(rendezvous.TCPStore, self)

    def unwatch(self) -> None:
        """Have the module make its stores as before."""
        rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
        maker = getattr(rendezvous, "TCPStore", None)
        if isinstance(maker, _StoreMaker):
            rendezvous.TCPStore = maker.make

    def abort(self) -> None:
        """End all waits for these stores."""
        for made in list(self._made):
            made.shut_down()

    def forget(self) -> None:
        self._made.clear()

    @contextmanager
    def connecting(self, port: int, timeout_s: float = 0.0) -> Iterator[None]:
        """Take the connections to this port that appear within the context for a store's, which
        connects with this timeout."""
        made = _StoreSockets(port, timeout_s)
        self._made.append(made)
        yield
        made.complete()


class _StoreMaker:
    """Stands for the class TCPStore in torch's rendezvous, which only calls it."""

    def __init__(self, make: Callable[..., object], stores: Stores) -> None:
        self.make = make
        self._stores = stores

    def __call__(
        self, host_name: str, port: int, *args: Any, is_master: bool = False, **settings: Any
    ) -> object:
        settings.setdefault("wait_for_workers", False)
        timeout = settings.get("timeout")

        def make(timeout_s: float | None) -> Any:
            limit = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
            with self._stores.connecting(port, timeout_s or 0.0):
                return self.make(host_name, port, *args, is_master=is_master, **settings | limit)

        if is_master or not isinstance(timeout, timedelta):
            return make(None)
        store = _connected(host_name, port, timeout.total_seconds(), make)
        store.set_timeout(timeout)
        return store


def _connected(host: str, port: int, timeout_s: float, make: Callable[[float], Any]) -> Any:
    """Make a client once a server accepts connections.

    Its timeout while it connects is a few milliseconds. It waits all the same for the answer of a
    server that listens and does not serve yet; but if that wait is ended later than that, the client
    raises at once instead of sleeping a second, connecting again and waiting where nobody ends it.
    """
    deadline = time.monotonic() + timeout_s
    patience_s = _FIRST_PATIENCE_S
    while True:
        took_s = _await_server(host, port, deadline)
        last = time.monotonic() >= deadline
        try:
            return make(_LAST_TRY_S if last else max(patience_s, 10 * took_s))
        except RuntimeError:  # Torch's for every error of a store.
            if last:
                raise
        patience_s = min(2 * patience_s, _LAST_TRY_S)


def _await_server(host: str, port: int, deadline: float) -> float:
    """Wait until a server accepts connections, or for the deadline; return how long connecting took."""
    pause_s = _FIRST_RETRY_S
    while True:
        began = time.monotonic()
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
            return time.monotonic() - began
        except OSError:
            if time.monotonic() + pause_s >= deadline:
                return _LAST_TRY_S  # Torch's own attempt says what is wrong.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)


class _StoreSockets:
    """The sockets of one store's clients, by inode: numbers are reused."""

    def __init__(self, port: int, timeout_s: float) -> None:
        self._port = port
        self._raises_from = time.monotonic() + timeout_s
        """When a store that is being made no longer tries again, if its connection is shut down."""
        self._others = set(_connected_to(port))
        self._own: set[int] | None = None
        """None while the store is being made."""

    def complete(self) -> None:
        self._own = set(_connected_to(self._port)) - self._others

    def shut_down(self) -> None:
        while self._own is None and time.monotonic() < self._raises_from:
            time.sleep(_FIRST_RETRY_S)
        for inode, fd in _connected_to(self._port).items():
            if inode in self._others or (self._own is not None and inode not in self._own):
                continue
            with tcp_socket(fd, inode) as one, suppress(OSError):  # Closed by its peer meanwhile.
                if one is not None:
                    one.shutdown(socket.SHUT_RDWR)


def _connected_to(port: int) -> dict[int, int]:
    """Return this process's TCP connections to servers at a port: inodes, with the descriptors."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with tcp_socket(int(name), status.st_ino) as one:
                if one is not None and one.getpeername()[1] == port:
                    found[status.st_ino] = int(name)
        except OSError:
            pass  # Closed meanwhile, or not connected.
    return found
