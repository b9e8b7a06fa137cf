"""Measures what leasing costs the coordinator, in CPU time of one core.

Both figures drive the real core. `core_rate` lends shards in batches and takes them back as used, and
nothing else: what the rules themselves cost. `cluster_share` does all that a coordinator does with a
report but for the sockets: decode it, check that it fits its sender, journal it in SQLite, decide,
encode the answer, and now and then write the whole state.

    leasing.py                        both
    leasing.py --nodes 1000           another number of nodes
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent)
]  # Also where holdfast is not installed.

from holdfast.coordinator import admission  # noqa: E402
from holdfast.coordinator.journal import Journal  # noqa: E402
from holdfast.core import job as jobs  # noqa: E402
from holdfast.core.job import Job  # noqa: E402
from holdfast.core.replay import Entry, Intake, JobSnapshot  # noqa: E402
from holdfast.core.shards.state import Shards  # noqa: E402
from holdfast.messages.actions import AnyAction, LendShards  # noqa: E402
from holdfast.messages.data import DataSpec, Span, Used, UsedBy  # noqa: E402
from holdfast.messages.events import (  # noqa: E402
    AnyEvent,
    Asked,
    JobOpened,
    NodeJoined,
    ShardsReported,
    Tick,
    WorkerStarted,
)
from holdfast.messages.records import NodeSpec, Terms  # noqa: E402
from holdfast.messages.requests import OpenData  # noqa: E402
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time  # noqa: E402
from holdfast.messages.wire import FromAgent, Sent  # noqa: E402
from holdfast.wire import framing  # noqa: E402

RECORDS = 10_000_000_000
SHARD = 1000
ARRIVING = 64
"""Reports that the coordinator takes in together."""


class Leasing:
    """A job whose nodes lease shards, without anything around its core."""

    def __init__(self, nodes: int, workers: int) -> None:
        self.now = 1000.0
        self.workers = workers
        terms = Terms(min_nodes=nodes, max_nodes=nodes)
        self.opened = JobOpened(at=Time(self.now), job="leasing", terms=terms)
        self.job = jobs.opened(self.opened)
        self.nodes = [NodeId(f"n{number}") for number in range(nodes)]
        self.lent: dict[NodeId, tuple[Span, ...]] = dict.fromkeys(self.nodes, ())
        self.first: dict[NodeId, int] = {}
        for node in self.nodes:
            spec = NodeSpec(host=node, address="10.0.0.1", slots=workers, pid=1)
            self.take(NodeJoined(at=self.at, node=node, spec=spec, store_port=1))
        self.now += 60.0
        self.take(Tick(at=self.at))
        assert self.job.world is not None
        for place in self.job.world.places:
            self.first[place.node] = place.first_rank
        spec = DataSpec(name="d", sharing="leases", size=RECORDS, shard=SHARD, epochs=0)
        for rank, state in list(self.job.ranks.items()):
            self._begin(state.node, rank, spec)

    def _begin(self, node: NodeId, rank: Rank, spec: DataSpec) -> None:
        of = {"at": self.at, "node": node, "round": self.round, "rank": rank}
        self.take(WorkerStarted(pid=1, warm=True, **of))  # type: ignore[arg-type]
        asked = OpenData(spec=spec, resumed="fresh")
        self.take(Asked(channel=0, number=1, request=asked, **of))  # type: ignore[arg-type]

    @property
    def at(self) -> Time:
        return Time(self.now)

    @property
    def round(self) -> RoundNumber:
        return self.job.membership.round

    def take(self, event: AnyEvent) -> list[AnyAction]:
        actions = jobs.decide(self.job, event, self.at)
        self.hear(actions)
        return actions

    def hear(self, actions: list[AnyAction]) -> None:
        for one in actions:
            if isinstance(one, LendShards):
                self.lent[one.node] = one.spans

    def report(self, node: NodeId, want: int, step: int, ranks: int) -> ShardsReported:
        """Make the report of a node whose ranks have each used a part of what it was lent."""
        used = []
        for span in self.lent[node]:
            shards = -(-(span.stop - span.start) // SHARD)
            each = -(-shards // ranks) * SHARD
            for number, start in enumerate(range(span.start, span.stop, each)):
                part = Span(span.line, start, min(start + each, span.stop))
                rank = Rank(self.first[node] + number % ranks)
                of = StepNumber(step)
                used.append(UsedBy(rank, Used(part, of, of, part.stop - part.start)))
        return ShardsReported(
            at=self.at,
            node=node,
            round=self.round,
            dataset="d",
            want=want,
            used=tuple(used),
            number=step + 1,
        )


def core_rate(nodes: int = 8, batch: int = 512, seconds: float = 2.0) -> float:
    """Return how many leases a second of CPU time lends and takes back as used, in batches."""
    leasing = Leasing(nodes, 8)
    leases, step = 0, 0
    begun = time.process_time()
    while (took := time.process_time() - begun) < seconds:
        for node in leasing.nodes:
            leasing.take(leasing.report(node, batch, step, 8))
        leases += batch * nodes
        step += 1
    assert leasing.job.of(Shards).sets["d"].used.below >= 0
    return leases / took


def cluster_share(
    nodes: int = 10_000, workers: int = 8, minutes: int = 2, together: bool = True
) -> float:
    """Return the share of a core that all reports of a cluster take in which each worker takes one
    lease a minute, and its node reports them `together`, or one by one."""
    times, each = (1, workers) if together else (workers, 1)
    leasing = Leasing(nodes, workers)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.db")
        journal.append([Entry(leasing.at, leasing.opened)])
        _all_nodes(leasing, journal, 0, each)  # Everything is lent for the first time.
        spent = 0.0
        for number in range(1, minutes * times + 1):
            spent += _all_nodes(leasing, journal, number, each)
        journal.close()
    return spent / (60.0 * minutes)


def _all_nodes(leasing: Leasing, journal: Journal, number: int, want: int) -> float:
    """Take in one report of each node; return the CPU time that the coordinator spent on it."""
    decoder = msgspec.msgpack.Decoder(FromAgent)
    spent = 0.0
    for begin in range(0, len(leasing.nodes), ARRIVING):
        nodes = leasing.nodes[begin : begin + ARRIVING]
        leasing.now += 1e-3
        reports = [leasing.report(node, want, number, leasing.workers) for node in nodes]
        arrived = [msgspec.msgpack.encode(Sent(number=number + 1, event=one)) for one in reports]
        begun = time.process_time()
        actions = _take_in(leasing.job, journal, [decoder.decode(one) for one in arrived], leasing)
        spent += time.process_time() - begun
        leasing.hear(actions)
    return spent


def _take_in(job: Job, journal: Journal, sent: list[Sent], leasing: Leasing) -> list[AnyAction]:
    entries = []
    for one in sent:
        node = one.event.node  # type: ignore[union-attr]
        assert admission.forgery(node, one.event) is None
        assert admission.misfit(job, node, leasing.round, one.event, leasing.at) is None
        entries.append(Entry(leasing.at, one.event, node, one.number))
    found: list[AnyAction] = []
    for _, actions in Intake(job, journal).take(entries):
        for action in actions:
            framing.encode(action)
        found += actions
    if journal.snapshot_due():
        journal.write_snapshot(JobSnapshot(job, leasing.at, {}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=8)
    given = parser.parse_args()
    print(f"core: {core_rate():,.0f} leases a second of CPU time")
    for together in (True, False):
        share = cluster_share(given.nodes, given.workers, together=together)
        how = "a report a node" if together else "a report a lease"
        print(f"{given.nodes} nodes x {given.workers} workers, {how}: {share:.1%} of a core")


if __name__ == "__main__":
    main()
