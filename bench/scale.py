"""What a coordinator costs when there are thousands of nodes.

A real `holdfast coordinator` process, and as many real connections as asked for, all made by this
process: each says hello, joins, gets its part of the round, beats, and takes part in a new round after
one of them reports a dead worker. The coordinator's CPU time and memory are read from /proc, so what
the clients cost does not count.

    scale.py                     4,000 joins, 10,000 idle, cost per node from 10 to 10,000
    scale.py --nodes 10,1000     only the cost of a round, at these sizes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from msgspec import Struct

from holdfast import __version__
from holdfast.messages.actions import StartWorkers, StopWorkers
from holdfast.messages.events import AnyEvent, NodeJoined, NodeReady, WorkerExited
from holdfast.messages.records import NodeSpec, RankProgress, Terms
from holdfast.messages.units import NodeId, Rank, RoundNumber, Time
from holdfast.messages.wire import PROTOCOL, Beat, FromCoordinator, Hello, Lease, Sent, Welcome
from holdfast.wire import framing

CONNECTING_AT_ONCE = 256
IDLE_S = 10.0
LIMIT_S = 120.0


@dataclass
class Coordinator:
    """The process under test."""

    process: subprocess.Popen[str]
    host: str
    port: int
    token: str

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def start_coordinator(home: str) -> Coordinator:
    command = [sys.executable, "-m", "holdfast", "coordinator", "--job", "scale", "--json"]
    env = {**os.environ, "HOLDFAST_HOME": home}
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    where = json.loads(process.stdout.readline())
    token = json.loads((Path(home) / "jobs/scale/job.json").read_text())["token"]
    return Coordinator(process, where["host"], where["port"], token)


class Node(asyncio.Protocol):
    """One simulated agent on one real connection."""

    transport: asyncio.Transport

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet = fleet
        self.node = NodeId(f"node-{number}")
        self.round = RoundNumber(0)
        self.rank = Rank(0)
        self.beat_s = 1.0
        self._sent = 0
        self._decoder = framing.FrameDecoder[FromCoordinator](FromCoordinator)  # type: ignore[arg-type]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        hello = Hello(
            protocol=PROTOCOL,
            token=self.fleet.coordinator.token,
            node=self.node,
            round=RoundNumber(0),
            busy=False,
            terms=Terms(min_nodes=self.fleet.size, max_nodes=self.fleet.size),
            version=__version__,
        )
        self.write(hello)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            if isinstance(message, Welcome):
                self._join()
                self.beat_s = message.beat_s
                self._beat()
            elif isinstance(message, Lease):
                self.beat_s = message.beat_s
            elif isinstance(message, StartWorkers):
                self.round, self.rank = message.part.round, message.part.first_rank
                self.fleet.placed(self)
            elif isinstance(message, StopWorkers):
                self._ready()
            self.handle(message)

    def handle(self, message: Struct) -> None:
        """Do what a node of another bench does with it."""

    def connection_lost(self, error: Exception | None) -> None:
        self.fleet.lost += 1

    def write(self, message: Struct) -> None:
        self.transport.write(framing.encode(message))

    def _send(self, event: AnyEvent) -> None:
        self._sent += 1
        self.write(Sent(number=self._sent, event=event))

    def _join(self) -> None:
        spec = NodeSpec(host=self.node, address="127.0.0.1", slots=1, pid=1)
        self._send(NodeJoined(at=_now(), node=self.node, spec=spec, store_port=1))

    def _beat(self) -> None:
        if not self.transport.is_closing():
            self.write(Beat())
            asyncio.get_running_loop().call_later(self.beat_s, self._beat)

    def _ready(self) -> None:
        ready = NodeReady(
            at=_now(), node=self.node, round=self.round, store_port=1, slowest_stop_s=None
        )
        self._send(ready)

    def lose_worker(self) -> None:
        progress = RankProgress(rank=self.rank)
        self._send(
            WorkerExited(
                at=_now(),
                node=self.node,
                round=self.round,
                rank=self.rank,
                signal=9,
                progress=progress,
            )
        )


def _now() -> Time:
    return Time(time.time())


@dataclass
class Fleet:
    """All nodes of one measurement."""

    coordinator: Coordinator
    size: int
    make: type[Node] = Node
    nodes: list[Node] = field(default_factory=list)
    lost: int = 0
    _waiting_for: int = 0
    _all_placed: asyncio.Event = field(default_factory=asyncio.Event)

    def placed(self, node: Node) -> None:
        self._waiting_for -= 1
        if self._waiting_for == 0:
            self._all_placed.set()

    def expect_all(self) -> None:
        self._waiting_for = self.size
        self._all_placed.clear()

    async def all_placed(self) -> None:
        await asyncio.wait_for(self._all_placed.wait(), LIMIT_S)

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        gate = asyncio.Semaphore(CONNECTING_AT_ONCE)

        async def one(number: int) -> None:
            async with gate:
                where = self.coordinator.host, self.coordinator.port
                _, node = await loop.create_connection(lambda: self.make(self, number), *where)
                self.nodes.append(node)

        await asyncio.gather(*(one(number) for number in range(self.size)))

    async def close(self) -> None:
        for node in self.nodes:
            node.transport.abort()
        await asyncio.sleep(0)


async def measure(size: int, idle_s: float) -> dict[str, Any]:
    """Join that many nodes, leave them alone for a while, then break a round."""
    with tempfile.TemporaryDirectory(prefix="hf-scale-") as home:
        coordinator = start_coordinator(home)
        fleet = Fleet(coordinator, size)
        try:
            return await _measure(coordinator, fleet, idle_s)
        finally:
            await fleet.close()
            coordinator.process.kill()
            coordinator.process.wait()


async def _measure(coordinator: Coordinator, fleet: Fleet, idle_s: float) -> dict[str, Any]:
    began, cpu = time.monotonic(), coordinator.cpu_s()
    fleet.expect_all()
    await fleet.connect()
    await fleet.all_placed()
    found: dict[str, Any] = {
        "nodes": fleet.size,
        "join_s": time.monotonic() - began,
        "join_cpu_s": coordinator.cpu_s() - cpu,
    }
    if idle_s:
        began, cpu = time.monotonic(), coordinator.cpu_s()
        await asyncio.sleep(idle_s)
        found["idle_cpu_share"] = (coordinator.cpu_s() - cpu) / (time.monotonic() - began)
    rounds = max(1, min(20, 2000 // fleet.size))
    began, cpu = time.monotonic(), coordinator.cpu_s()
    for _ in range(rounds):
        fleet.expect_all()
        fleet.nodes[0].lose_worker()
        await fleet.all_placed()
    found["round_s"] = (time.monotonic() - began) / rounds
    found["round_cpu_us_per_node"] = (coordinator.cpu_s() - cpu) / rounds / fleet.size * 1e6
    found["resident_mb"] = coordinator.resident_mb()
    found["lost_streams"] = fleet.lost
    return found


def show(rows: list[dict[str, Any]]) -> None:
    columns = {
        "nodes": "{:d}",
        "join_s": "{:.2f}",
        "join_cpu_s": "{:.2f}",
        "idle_cpu_share": "{:.1%}",
        "round_s": "{:.3f}",
        "round_cpu_us_per_node": "{:.0f}",
        "resident_mb": "{:.0f}",
        "lost_streams": "{:d}",
    }
    table = [list(columns)]
    for row in rows:
        table.append([f.format(row[c]) if c in row else "" for c, f in columns.items()])
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="10,100,1000,4000,10000", help="sizes, with commas")
    parser.add_argument("--idle", type=float, default=IDLE_S, metavar="S", help="seconds of rest")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    given = parser.parse_args()
    sizes = [int(word) for word in given.nodes.split(",")]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max(sizes) + 64 > most:
        print(f"{max(sizes)} connections need more open files than the limit of {most}")
        return 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows = []
    for size in sizes:
        rows.append(asyncio.run(measure(size, given.idle)))
        print(f"{size} nodes done", file=sys.stderr)
    show(rows)
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
