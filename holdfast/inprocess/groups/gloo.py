"""Ends the waits of gloo's process groups by shutting down their connections.

gloo has no working abort: an operation that waits for a peer ends only when the connection does. So
each connection must be found, and nothing else may be touched: the process also holds connections to
databases, its agent, torch's stores. The kernel knows which are gloo's. Each of its devices has a
thread named `gloo_tcp_loop` that waits in `epoll_wait`; /proc tells on which epoll descriptor, and
which sockets are registered there, by number and inode.

Where the kernel does not tell (gVisor, Linux before 4.13) nothing is touched, and nobody freed.

A socket is shut down only if its inode is the one that was registered; the epoll descriptor is believed
if the thread still waits on it afterwards.

A pair of ranks that is not connected yet waits at the device's listener for its peer. Shutting down a
listener would crash gloo. Instead this module connects in place of the missing peer, says which pair it
comes for, as a peer does, and hangs up.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from holdfast import proc
from holdfast.inprocess.groups.sockets import tcp_socket

_LOOP_THREAD = "gloo_tcp_loop"
_EPOLL_CALLS = ("epoll_wait", "epoll_pwait")
_REGISTERED = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+) ", re.MULTILINE)
_PAIR_NUMBER = struct.Struct("=q")
"""What a peer sends first: the number that the listener gave to the pair."""
_PATIENCE_S = 0.05
"""How long a busy loop may take to come back to its wait; an idle one is back every 10 ms."""
_LOOK_EVERY_S = 0.0005


class _Registered(NamedTuple):
    """A descriptor that an epoll descriptor watches."""

    fd: int
    inode: int


def threads() -> list[int]:
    """Return the threads of gloo's devices: each ends with the groups that use the device."""
    pid = os.getpid()
    return [one for one in proc.threads(pid) if proc.thread_name(pid, one) == _LOOP_THREAD]


def abort(pairs: int) -> None:
    """End all waits of gloo in this process, also those of up to `pairs` unconnected pairs a group."""
    deadline = time.monotonic() + _PATIENCE_S
    waiting = threads()
    while waiting:
        waiting = [thread for thread in waiting if not _abort_device(thread, pairs)]
        if waiting and time.monotonic() >= deadline:
            return  # Data flows: nobody waits for a peer yet.
        if waiting:
            time.sleep(_LOOK_EVERY_S)


def _abort_device(thread: int, pairs: int) -> bool:
    """Shut down a device's connections; return False if it was too busy to say which these are."""
    epoll = _waits_on(thread)
    if epoll is None:
        return proc.thread_name(os.getpid(), thread) != _LOOP_THREAD
    registered = list(_registered(epoll))
    if _waits_on(thread) != epoll:
        return False
    listeners, connected = [], 0
    for one in registered:
        with tcp_socket(one.fd, one.inode) as found:
            if found is None:
                continue
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listeners.append((found.family, found.getsockname()))
            else:
                connected += 1
                _shut_down(found)
    if connected < pairs:
        for family, address in listeners:
            _stand_in(family, address, pairs)
    return True


def _waits_on(thread: int) -> int | None:
    """Return the epoll descriptor that a thread waits on; None if it does not wait."""
    call = proc.call(os.getpid(), thread)
    return call.arguments[0] if call.name in _EPOLL_CALLS and call.arguments else None


def _registered(epoll: int) -> Iterator[_Registered]:
    try:
        with open(f"/proc/self/fdinfo/{epoll}") as file:
            text = file.read()
    except OSError:
        return
    for fd, inode in _REGISTERED.findall(text):
        yield _Registered(int(fd), int(inode, 16))


def _shut_down(connection: socket.socket) -> None:
    """End a connection as if its peer had closed it.

    Only the receiving half: gloo then ends all operations of the pair. If it answers a message that
    has come before, and cannot send, it forgets the operation that the message is about, and whoever
    waits for that waits on. The same can happen when a peer is gone, and nothing can be done then.
    """
    try:
        connection.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # Its peer is gone.


def _stand_in(family: int, address: tuple[str | int, ...], pairs: int) -> None:
    """Come in place of every peer that a device may wait for, and hang up."""
    for number in range(pairs + 1):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as peer:
                peer.settimeout(_PATIENCE_S)
                peer.connect(address)
                peer.sendall(_PAIR_NUMBER.pack(number))
        except OSError:
            return  # The device is gone.
