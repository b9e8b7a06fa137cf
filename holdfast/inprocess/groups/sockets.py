"""Reaches sockets that torch's C++ made in this process, by their descriptors.

Numbers are reused: between a look at a descriptor and its use, another thread may close it and open
something else. So a socket is duplicated, and the duplicate used only if its inode is the one that was
seen.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def tcp_socket(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """Have a socket under a number of its own; None if it is gone or is none of TCP."""
    found = None
    try:
        own = os.dup(fd)
        if os.fstat(own).st_ino == inode:
            found = socket.socket(fileno=own)
        else:
            os.close(own)
    except OSError as error:
        if error.errno == errno.ENOTSOCK:  # A pipe: gloo wakes its thread with one.
            os.close(own)
    try:
        tcp = found is not None and found.family in (socket.AF_INET, socket.AF_INET6)
        yield found if tcp else None
    finally:
        if found is not None:
            found.close()
