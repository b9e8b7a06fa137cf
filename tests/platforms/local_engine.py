"""The local platform as an engine for chaos: its guards and nodes are real processes.

Guards are forked from the test's own process instead of started anew: that is all that differs from
`holdfast up`, and makes a node cost milliseconds. Time is simulated for the supplier and real for
processes, so `settle` waits, for real, until all of them have done what they are about to do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random

from machine import PATIENCE_S, Machine

from holdfast import kernel, proc
from holdfast.messages.supply import RequestId
from holdfast.platforms import local_node
from holdfast.platforms.guards import NodeStart
from holdfast.platforms.local import LocalPlatform
from holdfast.platforms.local_node import lives, read_record, started_at

NODE = (
    "trap 'exit 75' TERM; trap 'exit 3' USR1; trap 'exit 201' USR2;"
    ' echo "$HOLDFAST_REQUEST $HOLDFAST_NODE_NAME $$" >> "$STARTED";'
    ' exec 3<>"$STILL"; while :; do read _ <&3; done'
)
"""A node that ends as it is told, and has no child that its guard would wait for."""
DEAF = "trap '' TERM; " + NODE.partition(";")[2]
LEAVE_LIMIT_S = 0.1


class ForkedGuard:
    """A guard that was forked: what `subprocess.Popen` is to the platform."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], keep: Sequence[int]
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._become_guard(argv, environ, keep)

    def _become_guard(
        self, argv: Sequence[str], environ: Mapping[str, str], keep: Sequence[int]
    ) -> None:
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            os.environ.clear()
            os.environ.update(environ)
            bounds = [2, *sorted(keep), 4096]
            for low, high in pairwise(bounds):
                os.closerange(low + 1, high)
            os._exit(local_node.main(argv))
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.001)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkingPlatform(LocalPlatform):
    """The local platform, whose guards are forked."""

    engine: LocalEngine

    def _start(self, start: NodeStart, claimed: int) -> None:
        orders, request, host = self._orders, start.wish.id, start.host
        path, kept = str(self._path(request)), (orders.lifeline, claimed)
        argv = [path, *map(str, kept), str(orders.limit_s), host, *start.command]
        names = {"HOLDFAST_REQUEST": request, "HOLDFAST_NODE_NAME": host}
        guard = ForkedGuard(argv, {**start.environ, **names}, kept)
        self._guards[request] = guard, host  # type: ignore[assignment]
        self.engine.forked(request, guard)

    async def release(self, requests: Sequence[RequestId]) -> None:
        await super().release(requests)
        self.engine.ending.update(requests)


class LocalEngine:
    """This machine, with nodes that are shell scripts."""

    def __init__(self, machine: Machine) -> None:
        self.faults: Mapping[str, Callable[[Random], None]] = {
            "guard killed": self._kill_guard,
            "node killed": lambda rng: self._signal_node(rng, signal.SIGKILL),
            "node fails": lambda rng: self._signal_node(rng, signal.SIGUSR1),
            "hardware": lambda rng: self._signal_node(rng, signal.SIGUSR2),
            "all killed": self._kill_all,
            "deaf": self._start_deaf,
            "slow start": self._start_slowly,
        }
        self._machine, self._still = machine, machine.records.parent / "still"
        os.mkfifo(self._still)
        self._guards: list[tuple[RequestId, ForkedGuard]] = []
        self._slow = self._deaf = False
        self.ending: set[RequestId] = set()
        """Nodes that were told to leave, or hit by a fault that ends them."""

    def open(self) -> ForkingPlatform:
        node = DEAF if self._deaf else NODE
        shell = ["/bin/sh", "-c", node]
        still = str(self._still)
        platform = self._machine.platform_of(shell, LEAVE_LIMIT_S, ForkingPlatform, STILL=still)
        platform.engine = self
        return platform

    def nodes(self) -> Sequence[RequestId]:
        """Return the nodes by their processes, and those whose guard has claimed their record."""
        running = [name for name, _, pid in self._machine.started() if started_at(pid)]
        records = {path.stem: read_record(path) for path in self._records()}
        claimed = [name for name, record in records.items() if record and lives(record)]
        return [*running, *(name for name in claimed if name not in running)]

    def settle(self) -> None:
        self._slow = self._deaf = False
        deadline = time.monotonic() + PATIENCE_S
        for name, guard in self._guards:
            with suppress(ProcessLookupError):
                os.kill(guard.pid, signal.SIGCONT)
            while not self._has_settled(name, guard):
                assert time.monotonic() < deadline, f"the guard of {name} does not settle"
                time.sleep(0.001)
        self._guards = [one for one in self._guards if one[1].poll() is None]

    def forked(self, request: RequestId, guard: ForkedGuard) -> None:
        """Wait for a guard that has its node running, if this machine is not slow now."""
        self._guards.append((request, guard))
        if self._slow:
            with suppress(ProcessLookupError):
                os.kill(guard.pid, signal.SIGSTOP)
            return
        deadline = time.monotonic() + PATIENCE_S
        while not self._has_settled(request, guard):
            assert time.monotonic() < deadline, f"the guard of {request} does not start"
            time.sleep(0.001)

    def _has_settled(self, name: RequestId, guard: ForkedGuard) -> bool:
        """Whether a guard has ended, or has its node running and was not told to end it."""
        if not started_at(guard.pid):
            return True
        record = read_record(self._machine.records / f"{name}.json")
        if record is None or record.pid != guard.pid:
            return False  # It is about to claim its record, or to give way.
        begun = any(one == name for one, _, _ in self._machine.started())
        return begun and name not in self.ending

    def _records(self) -> list[Path]:
        return list(self._machine.records.glob("*.json"))

    # ---- faults ----

    def _alive(self) -> list[tuple[RequestId, int]]:
        return [(name, pid) for name, _, pid in self._machine.started() if started_at(pid)]

    def _signal_node(self, rng: Random, number: int) -> None:
        alive = self._alive()
        if alive:
            name, pid = rng.choice(alive)
            self.ending.add(name)
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill_guard(self, rng: Random) -> None:
        alive = [guard for _, guard in self._guards if started_at(guard.pid)]
        if alive:
            _kill_tree(rng.choice(alive).pid)

    def _kill_all(self, rng: Random) -> None:
        for _, guard in self._guards:
            _kill_tree(guard.pid)

    def _start_deaf(self, rng: Random) -> None:
        self._deaf = True

    def _start_slowly(self, rng: Random) -> None:
        self._slow = True


def _kill_tree(pid: int) -> None:
    for one in [pid, *proc.descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
