"""The socket of a round's store.

Rank 0's worker will serve the store, but its address is promised before that worker exists. So the
agent makes the socket, and it listens from the start: nobody else can have the port, and ranks that
connect before rank 0 is there wait in the socket's queue. With the rank, the worker gets the socket.
"""

from __future__ import annotations

import os
import socket

from holdfast.errors import JobError

BACKLOG = 4096


class StorePort:
    def __init__(self, address: str, port: int = 0) -> None:
        local = address in ("127.0.0.1", "localhost", "::1")
        dual = not local and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual or address == "::1" else socket.AF_INET
        host = address if local else ""
        try:
            self._socket = socket.create_server(
                (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual
            )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise JobError(
                f"port {port} for the ranks' store cannot be had ({reason});"
                " choose another --master-port or none"
            ) from None
        self.number: int = self._socket.getsockname()[1]

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Ours is not needed any more: the worker has the socket, or nobody will."""
        self._socket.close()
