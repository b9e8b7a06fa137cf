"""A machine for tests of the local platform: its nodes are tiny real processes."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from holdfast.cli.flags import parse_run
from holdfast.messages.supply import Cordon, NodeWish, Sighting
from holdfast.platforms.local import LocalPlatform
from holdfast.platforms.local_node import lives, read_record
from holdfast.platforms.opening import NodeOrders

AnyLocal = TypeVar("AnyLocal", bound=LocalPlatform)
SETTINGS = parse_run([__file__])
PATIENCE_S = 30.0
POLL_S = 0.01
STARTED = 'echo "$HOLDFAST_REQUEST $HOLDFAST_NODE_NAME $$" >> "$STARTED"; '
WAITS = "exec sleep 1000"
DEAF = "trap '' TERM; "
SPINS = "while :; do sleep 0.01; done"


def wish(request: str) -> NodeWish:
    position, _, attempt = request.partition("-")
    return NodeWish(id=request, position=int(position), attempt=int(attempt))


def avoid(*hosts: str) -> list[Cordon]:
    return [Cordon(host=host, why="a test") for host in hosts]


class Machine:
    """Nodes that are shell scripts, and platforms that start and see them."""

    def __init__(self, folder: Path) -> None:
        self.records = folder / "nodes"
        self.records.mkdir()
        self._started = folder / "started"
        self._lifeline, self._held = os.pipe()

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut_lifeline()
        guards = [record for path in self.records.glob("*.json") if (record := read_record(path))]
        deadline = time.monotonic() + PATIENCE_S
        while any(map(lives, guards)):
            assert time.monotonic() < deadline, "a node outlived its lifeline"
            time.sleep(POLL_S)
        os.close(self._lifeline)

    def cut_lifeline(self) -> None:
        """As if all for whom the nodes run were gone."""
        if self._held >= 0:
            os.close(self._held)
        self._held = -1

    def platform(
        self, script: str = WAITS, before: str = "", limit_s: float = 60.0, **environ: str
    ) -> LocalPlatform:
        """A platform whose nodes run a shell script; each is written down when it starts."""
        return self.platform_of(["/bin/sh", "-c", before + STARTED + script], limit_s, **environ)

    def platform_of(
        self,
        command: list[str],
        limit_s: float = 60.0,
        kind: type[AnyLocal] = LocalPlatform,  # type: ignore[assignment]
        **environ: str,
    ) -> AnyLocal:
        env = {**os.environ, "STARTED": str(self._started), **environ}
        orders = NodeOrders(
            job="test",
            settings=SETTINGS,
            command=command,
            environ=env,
            records=self.records,
            lifeline=self._lifeline,
            limit_s=limit_s,
        )
        return kind(orders)

    def started(self) -> list[tuple[str, str, int]]:
        """What was started so far, in order: request, host and pid."""
        lines = self._started.read_text().splitlines() if self._started.exists() else []
        return [(words[0], words[1], int(words[2])) for words in map(str.split, lines)]

    def guard(self, request: str) -> int:
        record = read_record(self.records / f"{request}.json")
        assert record is not None
        return record.pid


async def until(found: Callable[[], object], what: str) -> None:
    """Wait for something that has no event of its own."""
    deadline = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(POLL_S)


async def all_started(machine: Machine, count: int) -> None:
    await until(lambda: len(machine.started()) >= count, f"{count} nodes")


async def sightings(platform: LocalPlatform) -> dict[str, Sighting]:
    return {one.request: one for one in await platform.list()}


async def ended(platform: LocalPlatform, requests: Collection[str]) -> dict[str, Sighting]:
    """Wait, woken by the platform alone, until these are over; what it says of them."""
    while True:
        seen = await sightings(platform)
        if all(name in seen and seen[name].status != "running" for name in requests):
            return seen
        await asyncio.wait_for(platform.changed(), PATIENCE_S)


def quoted(path: Path) -> str:
    return shlex.quote(str(path))
