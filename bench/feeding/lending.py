"""How many leases a second the real coordinator lends, and how long a worker waits for one.

Throughput: a real `holdfast coordinator` process and nodes of which each is a real connection with the
agent's real stock of shards (`holdfast.agent.shards`). Each node takes shards as fast as it gets them
and reports each as used. All nodes live in this process, so the figure is what both sides together
reach on the machine; the coordinator's own CPU time is read from /proc.

Waiting: a real job whose ranks take one shard per step of ten milliseconds and note how long each took
to get.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import scale
from harness.lines import Line
from msgspec import Struct

from holdfast.agent.shards import NodeShards
from holdfast.clock import JobClock
from holdfast.messages.actions import Answered, LendShards, StartWorkers
from holdfast.messages.data import DataSpec, Used
from holdfast.messages.events import AnyEvent, Asked, WorkerStarted
from holdfast.messages.local import Ask, DataUsed, ScriptReply
from holdfast.messages.requests import OpenData, ShardsTaken, TakeShards
from holdfast.messages.units import Rank, StepNumber, Time

SPEC = DataSpec(name="bench", sharing="leases", size=1 << 40, shard=100, epochs=1, exact=False)
AT_ONCE = 64
"""Shards that a worker takes at a time."""
SCRIPT = Path(__file__).parent.parent / "scripts" / "shard_each_step.py"


class LeasingNode(scale.Node):
    """A node that uses shards as fast as it gets them."""

    taken = 0

    def start(self) -> None:
        """Begin the script of the node's one rank: it opens the data set."""
        self.shards = NodeShards(
            self.node, JobClock(), self._report, self._reply, asyncio.get_running_loop().time
        )
        at, node, round, rank = self._at(), self.node, self.round, self.rank
        started = WorkerStarted(at=at, node=node, round=round, rank=rank, pid=1, warm=True)
        self._send(started)
        request = OpenData(spec=SPEC, resumed="fresh")
        asked = Asked(
            at=at, node=node, round=round, rank=rank, channel=0, number=1, request=request
        )
        self._send(asked)

    def handle(self, message: Struct) -> None:
        if isinstance(message, StartWorkers):
            self._part = message.part
        elif isinstance(message, Answered):
            self.shards.begin_round(self._part)
            self.shards.opened(SPEC)
            self._take()
        elif isinstance(message, LendShards):
            self.shards.lent(message)

    def _take(self) -> None:
        request = TakeShards(dataset=SPEC.name, count=AT_ONCE)
        self.shards.ask(self.rank, Ask(channel=1, number=1, request=request))

    def _reply(self, rank: Rank, reply: ScriptReply) -> None:
        assert isinstance(reply.answer, ShardsTaken)
        self.taken += len(reply.answer.spans)
        step = StepNumber(0)
        used = tuple(Used(s, step, step, s.stop - s.start) for s in reply.answer.spans)
        self.shards.heard(rank, DataUsed(dataset=SPEC.name, used=used))
        asyncio.get_running_loop().call_soon(self._take)

    def _report(self, event: AnyEvent) -> None:
        self._send(event)

    def _at(self) -> Time:
        return Time(time.time())


async def throughput(nodes: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hf-lending-") as home:
        coordinator = scale.start_coordinator(home)
        fleet = scale.Fleet(coordinator, nodes, make=LeasingNode)
        try:
            fleet.expect_all()
            await fleet.connect()
            await fleet.all_placed()
            leasing = [node for node in fleet.nodes if isinstance(node, LeasingNode)]
            for node in leasing:
                node.start()
            await asyncio.sleep(1.0)  # Until each has found how many it needs.
            before, cpu, began = (
                sum(n.taken for n in leasing),
                coordinator.cpu_s(),
                time.monotonic(),
            )
            await asyncio.sleep(seconds)
            took = time.monotonic() - began
            leases = sum(node.taken for node in leasing) - before
            return {
                "leases_per_s": leases / took,
                "cpu_share": (coordinator.cpu_s() - cpu) / took,
                "least_of_a_node": min(node.taken for node in leasing),
            }
        finally:
            await fleet.close()
            coordinator.process.kill()
            coordinator.process.wait()


def waiting(folder: Path, ranks: int = 2, steps: int = 1000) -> dict[str, Any]:
    """Run a job that takes a shard each step; return how long its ranks waited for shards."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", str(ranks)]
    command += ["--job", "leasing", str(SCRIPT), str(steps), str(folder)]
    env = {**os.environ, "HOLDFAST_HOME": str(folder / "home")}
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=300)
    found = [json.loads(path.read_text()) for path in folder.glob("waits_*.json")]
    return {
        "share": sum(one["waited_s"] for one in found) / sum(one["took_s"] for one in found),
        "longest_ms": max(one["longest_s"] for one in found) * 1000,
        "shards": sum(one["shards"] for one in found),
    }


def measure(folder: Path, nodes: int = 8, seconds: float = 4.0) -> list[Line]:
    lent = asyncio.run(throughput(nodes, seconds))
    waited = waiting(folder / "waiting")
    seen = f"{nodes} nodes; coordinator {lent['cpu_share']:.0%} of a core"
    return [
        Line("leases a second", lent["leases_per_s"], at_least=50_000, seen=seen, samples=[lent]),
        Line(
            "wait for shards, 10 ms steps",
            100 * waited["share"],
            "%",
            at_most=0.1,
            seen=f"{waited['shards']} shards, the longest wait {waited['longest_ms']:.2f} ms",
            samples=[waited],
        ),
    ]
