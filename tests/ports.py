"""Ports that a test can name now and listen on later.

They lie below the range from which the kernel gives outgoing connections theirs: a port of that range
that was free a moment ago may be some connection's own by the time it is listened on.
"""

from __future__ import annotations

import random
import socket

_RANGE = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Find so many ports that nobody listens on, all different."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_RANGE, len(_RANGE)):
        if len(found) == count:
            break
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    assert len(found) == count, "no port is free"
    return found


def free_port() -> int:
    (port,) = free_ports(1)
    return port
