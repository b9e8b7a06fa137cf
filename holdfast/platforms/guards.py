"""Guarded nodes are processes of this machine that outlive the supplier that started them.

Each request has a guard (see `local_node`), which starts the node's command, waits for it and writes
down what became of it, in a file for each request:

    JOB HOME/nodes/3-2.json

So nothing that matters is remembered here. The records are read, pidfds tell when a guard ends, and a
supplier that is killed and started again finds all that the one before it started. Which command a
node is, and on which host, is for the platform to say: a launcher on this machine, or an `srun`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import PlatformError
from holdfast.messages.supply import NodeWish, RequestId, Sighting
from holdfast.platforms.local_node import NodeRecord, claim, lives, read_record, record_of
from holdfast.platforms.opening import NodeOrders

KILLED = 128 + signal.SIGKILL
"""Exit code of a guard that could not write down another."""
CLAIM_LIMIT_S = 10.0


@dataclass(frozen=True)
class NodeStart:
    """A node that is to be started."""

    wish: NodeWish
    host: str
    """Name of the host that the node takes itself to be."""
    command: Sequence[str]
    """The first word is a path."""
    environ: Mapping[str, str]


class GuardedNodes:
    """Nodes by their records in a directory."""

    def __init__(self, orders: NodeOrders) -> None:
        self._records, self._orders = orders.records, orders
        self._guards: dict[RequestId, tuple[subprocess.Popen[bytes], str]] = {}
        """Guards that this process started, and their hosts' names."""
        self._pidfds: dict[RequestId, int] = {}
        self._ended: dict[RequestId, NodeRecord] = {}
        self._news = asyncio.Event()

    def seen(self) -> list[Sighting]:
        """List all nodes: a record says that it is there, its guard whether it runs."""
        found = {path.stem: path for path in self._records.glob("*.json")}
        for request in [name for name in self._ended if name not in found]:
            del self._ended[request]
        unrecorded = [name for name in self._guards if name not in found]
        seen = [self._unrecorded(request) for request in unrecorded]
        seen += [self._recorded(request, path) for request, path in found.items()]
        return [sighting for sighting in seen if sighting is not None]

    async def start(self, starts: Sequence[NodeStart]) -> None:
        """Start a guard for each node, and wait until all have claimed theirs or given way."""
        claimed, held = os.pipe()
        waiting = deque(starts)
        try:
            while waiting:
                self._forget_attempts_before(waiting[0].wish)
                self._start(waiting[0], held)
                waiting.popleft()
        except OSError as error:
            rest = tuple(start.wish.id for start in waiting)
            raise PlatformError(f"no process can be started: {error.strerror}", rest) from error
        finally:
            os.close(held)
            await _closed(claimed)

    def end(self, requests: Sequence[RequestId]) -> None:
        """Tell nodes to leave. Their guards see to it that this is done once, and within a limit."""
        for request in requests:
            record = read_record(self._path(request))
            if record is not None:
                _signal(record)
            elif request in self._guards:
                self._guards[request][0].terminate()

    async def changed(self) -> None:
        """Wait for the end of a guard."""
        await self._news.wait()
        self._news.clear()

    def hosts_in_use(self) -> set[str]:
        """Return the hosts of all nodes that run."""
        return set(self._hosts_in_use())

    # ---- what is there ----

    def _recorded(self, request: RequestId, path: Path) -> Sighting | None:
        record = self._ended.get(request) or read_record(path)
        if record is None:  # It was removed meanwhile.
            return None
        if record.code is None and self._watch(request, record):
            return Sighting(request=request, status="running", host=record.host)
        if record.code is None:  # Its guard may have written the code after it was looked for.
            record = read_record(path) or record
        self._ended[request] = record
        code = self._code_of_guard(request) if record.code is None else record.code
        return _over(request, record.host, KILLED if code is None else code)

    def _unrecorded(self, request: RequestId) -> Sighting | None:
        """Write down for a guard that could not even claim its record how it ended.

        One that still runs is not seen yet: if this process were killed now, the next one would not
        see it either.
        """
        guard, host = self._guards[request]
        if guard.poll() is None and self._watch(request, record_of(guard.pid, host)):
            return None
        code = guard.wait()
        code = code if code >= 0 else 128 - code
        path = self._path(request)
        claim(path, NodeRecord(pid=guard.pid, started=0, host=host, code=code))
        return self._recorded(request, path)

    def _code_of_guard(self, request: RequestId) -> int | None:
        if request not in self._guards:
            return None
        code = self._guards[request][0].poll()
        return code if code is None or code >= 0 else 128 - code

    def _watch(self, request: RequestId, record: NodeRecord) -> bool:
        """Have the end of a guard wake the loop; False if it has ended."""
        if request in self._pidfds:
            return lives(record)
        try:
            pidfd = os.pidfd_open(record.pid)
        except (ProcessLookupError, OSError):
            return False
        if not lives(record):  # Now that it is open, it cannot become another process's.
            os.close(pidfd)
            return False
        self._pidfds[request] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._guard_ended, request)
        return True

    def _guard_ended(self, request: RequestId) -> None:
        pidfd = self._pidfds.pop(request)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        if request in self._guards:
            self._guards[request][0].poll()  # Reaps it.
        self._news.set()

    def _hosts_in_use(self) -> Iterator[str]:
        for request, (guard, host) in self._guards.items():
            record = read_record(self._path(request))
            over = record is not None and record.code is not None  # Its guard is about to end.
            if not over and guard.poll() is None:
                yield host
        for path in self._records.glob("*.json"):
            record = read_record(path)
            if record is not None and record.code is None and lives(record):
                yield record.host

    # ---- starting ----

    def _start(self, start: NodeStart, claimed: int) -> None:
        orders, request = self._orders, start.wish.id
        guard = [sys.executable, "-m", "holdfast.platforms.local_node", str(self._path(request))]
        told = [str(orders.lifeline), str(claimed), str(orders.limit_s), start.host]
        names = {"HOLDFAST_REQUEST": request, "HOLDFAST_NODE_NAME": start.host}
        process = subprocess.Popen(
            [*guard, *told, *start.command],
            env={**start.environ, **names},
            pass_fds=(orders.lifeline, claimed),
            start_new_session=True,
        )
        self._guards[request] = process, start.host

    def _forget_attempts_before(self, wish: NodeWish) -> None:
        """Remove the records of a position's attempts that are over, once there is another."""
        for path in self._records.glob(f"{wish.position}-*.json"):
            if path.stem in self._ended and path.stem != wish.id:
                path.unlink(missing_ok=True)
                del self._ended[path.stem]
                self._guards.pop(path.stem, None)

    def _path(self, request: RequestId) -> Path:
        return self._records / f"{request}.json"


def _over(request: RequestId, host: str, code: int) -> Sighting:
    if code == 0:
        return Sighting(request=request, status="succeeded", code=0, host=host)
    how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
    detail = f"its launcher ended with {how} on {host}"
    return Sighting(request=request, status="failed", code=code, host=host, detail=detail)


async def _closed(fd: int) -> None:
    """Wait until nobody holds the other end of a pipe, within a limit, and close this one."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, over.set)
    try:
        await asyncio.wait_for(over.wait(), CLAIM_LIMIT_S)
    except asyncio.TimeoutError:  # A guard is stopped, or starved: it is seen when it goes on.
        pass
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _signal(record: NodeRecord) -> None:
    with suppress(ProcessLookupError, OSError):
        pidfd = os.pidfd_open(record.pid)
        try:
            if lives(record):
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        finally:
            os.close(pidfd)
