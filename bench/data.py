"""Whether data is exact, what leases cost, and what the loader costs against torch's own.

data.py                          everything, about a quarter of an hour
data.py --only exact,leases      some of it:

exact      real jobs whose workers, agents and coordinator are killed while nodes leave and come;
           the model's own state says how often it was trained on each record
batches    a fixed global batch with 4, 2 and 3 ranks, against one process
leases     leases a second through the real coordinator; how long workers wait for them
scale      10,000 nodes with 8 workers each: the coordinator's CPU time
loader     throughput against torch's DataLoader with its DistributedSampler, by turns
state      size of a data set's state, and the time to encode it
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import data_loading
import leasing
from feeding import batches, exact, lending
from harness import lines, processes
from harness.lines import Line
from harness.report import publish
from harness.setting import say

from holdfast.messages.data import Span
from holdfast.messages.spans import SpanSet

SHARDS = 50_000


def state() -> list[Line]:
    """Measure a state with as many gaps as shards that were done in no order can leave."""
    dice = random.Random(1)
    done = (at for at in range(SHARDS) if dice.random() < 0.5)
    used = SpanSet.of(Span(0, at * 1000, at * 1000 + 1000) for at in done)
    took = []
    for _ in range(21):
        began = time.perf_counter()
        packed = used.pack()
        took.append(time.perf_counter() - began)
    return [
        Line("state of 50,000 shards, KB", len(packed) / 1000, at_most=100),
        Line("time to encode it", median(took) * 1000, "ms", at_most=10),
    ]


def scale(nodes: int = 10_000) -> list[Line]:
    share = leasing.cluster_share(nodes, 8, 1, together=False)
    what = f"coordinator, {nodes:,} nodes with 8 workers, a lease a minute each"
    return [Line(what, 100 * share, "%", at_most=20)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="measures, with commas")
    parser.add_argument("--seeds", type=int, default=3, help="jobs of `exact` for each sharing")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--keep", metavar="FOLDER", help="keep what the jobs left there")
    parser.add_argument("--json", metavar="FILE", help="also write all figures there")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="hfb-", ignore_cleanup_errors=True) as scratch:
        folder = Path(args.keep or scratch)
        measures: dict[str, Callable[[], list[Line]]] = {
            "exact": lambda: exact.measure(folder / "exact", args.seeds, args.records, args.epochs),
            "batches": lambda: batches.measure(folder / "batches"),
            "leases": lambda: lending.measure(folder / "leases"),
            "scale": scale,
            "loader": data_loading.measure,
            "state": state,
        }
        wanted = [name for name in args.only.split(",") if name] or list(measures)
        unknown = sorted(set(wanted) - set(measures))
        if unknown:
            say(f"data.py: no measure {', '.join(unknown)}; there are {', '.join(measures)}")
            return 2
        load = os.getloadavg()[0]
        try:
            found = {name: measures[name]() for name in wanted}
        finally:
            processes.end_descendants([])
    report = lines.report("data", found, load)
    publish(report, {key: value for key, value in vars(args).items() if key != "json"}, args.json)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
