"""What loading costs beyond torch's own, and what an order of ten billion records costs.

    python bench/data_loading.py [--quick]

`ElasticDataLoader` and torch's DataLoader with a DistributedSampler load the same records by turns, in
one process; a figure is the ratio of their times. Nothing is carried over from other runs or machines.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH), str(BENCH.parent)]  # Also where holdfast is not installed.

import torch  # noqa: E402
from harness.lines import Line  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

from holdfast.data import ElasticDataLoader, Order, link  # noqa: E402
from holdfast.messages.data import Span  # noqa: E402
from holdfast.messages.local import DataUsed  # noqa: E402
from holdfast.messages.requests import (  # noqa: E402
    AwaitTuning,
    DataOpened,
    OpenData,
    ScriptRequest,
    TuningNotice,
)
from holdfast.messages.tuning import LoaderConfig, MemoryRoom  # noqa: E402

MOST = 1.03
TEN_BILLION = 10_000_000_000
MB = 1 << 20
WORLD, RANK = 4, 1
MOST_IN_A_JOB_US = 5.0
"""Goal for what a batch costs more under `holdfast run`: reports, counts and settings."""


class Cheap:
    """Records that cost next to nothing: only the loader is left."""

    def __init__(self, size: int) -> None:
        self.rows = torch.arange(size * 16, dtype=torch.float32).view(size, 16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Moderate(Cheap):
    """Records that take some work, like a small image that is cropped and normalised."""

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index].repeat(64)
        return (row - row.mean()) / (row.std() + 1e-6)


@dataclass(frozen=True)
class Case:
    what: str
    dataset: type[Cheap]
    processes: int
    batch: int
    batches: int
    """Of a rank in an epoch."""
    seed_workers: bool = True

    @property
    def said(self) -> str:
        where = f"{self.processes} loader processes" if self.processes else "training process"
        seeds = "" if self.seed_workers else ", generators not seeded"
        return f"{self.what}, batch of {self.batch}, {where}{seeds}"


CASES = (
    Case("cheap records", Cheap, 0, 1, 2000),
    Case("cheap records", Cheap, 0, 8, 2000),
    Case("cheap records", Cheap, 0, 64, 800),
    Case("moderate records", Moderate, 0, 64, 80),
    # Torch does not seed generators for each batch; the same without shows what that costs.
    Case("cheap records", Cheap, 2, 1, 150),
    Case("cheap records", Cheap, 2, 1, 150, seed_workers=False),
    Case("cheap records", Cheap, 2, 8, 150),
    Case("cheap records", Cheap, 2, 64, 150),
    Case("moderate records", Moderate, 2, 64, 80),
)


def compare(case: Case, turns: int) -> Line:
    """Load epochs with both loaders by turns."""
    dataset = case.dataset(case.batch * case.batches * WORLD)
    persistent = {"num_workers": case.processes, "persistent_workers": case.processes > 0}
    sampler = DistributedSampler(dataset, num_replicas=WORLD, rank=RANK, seed=1)
    plain = DataLoader(dataset, case.batch, sampler=sampler, **persistent)
    elastic = ElasticDataLoader(
        dataset,
        case.batch,
        shuffle=True,
        seed=1,
        num_replicas=WORLD,
        rank=RANK,
        seed_workers=case.seed_workers,
        **persistent,
    )

    def plain_epoch(epoch: int) -> int:
        sampler.set_epoch(epoch)
        return sum(1 for _ in plain)

    def elastic_epoch(epoch: int) -> int:
        elastic.set_epoch(epoch)
        return sum(1 for _ in elastic)

    times: dict[str, list[float]] = {"torch": [], "elastic": []}
    contestants = {"torch": plain_epoch, "elastic": elastic_epoch}
    for turn in range(-1, turns):
        order = list(contestants) if turn % 2 else list(contestants)[::-1]
        for name in order:
            seconds = _took(contestants[name], turn + 1)
            if turn >= 0:  # Loader processes start in the first turn.
                times[name].append(seconds)
    pairs = zip(times["elastic"], times["torch"], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    share = case.batch * case.batches
    return Line(
        f"{case.said}: time of ElasticDataLoader / torch's",
        statistics.median(ratios),
        "x",
        at_most=MOST,
        seen=(
            f"{share / statistics.median(times['elastic']):,.0f} records a second against "
            f"{share / statistics.median(times['torch']):,.0f}, median of {turns} turns"
        ),
        samples=times,
    )


def _took(epoch: Callable[[int], int], number: int) -> float:
    gc.collect()
    began = time.perf_counter()
    epoch(number)
    return time.perf_counter() - began


class Counters:
    """What `worker.runtime.Runtime` does for a link, in as many calls."""

    def __init__(self) -> None:
        self.steps, self.samples, self.evaluating = 0, 0, False

    @property
    def step(self) -> int:
        return self.steps if self.steps > 0 else 0

    def used(self, records: int) -> None:
        if not self.evaluating:
            self.samples += records


class QuietJob:
    """A job that is told everything and has nothing to say."""

    rank, world_size, round = RANK, WORLD, 1

    def __init__(self) -> None:
        self.worker = Counters()

    @property
    def step(self) -> int:
        return self.worker.step

    def open(self, request: OpenData) -> DataOpened:
        return DataOpened(used=b"")

    def take(self, dataset: str, count: int) -> tuple[Span, ...]:
        return ()

    def delivered(self, records: int) -> None:
        self.worker.used(records)

    def tell(self, message: DataUsed) -> None:
        """It goes into a socket otherwise, once a second."""

    def ask(self, request: ScriptRequest, timeout_s: float | None) -> TuningNotice:
        if isinstance(request, AwaitTuning) and request.after:
            threading.Event().wait()  # Until there is something new: never.
        return TuningNotice(number=1, version=0, config=LoaderConfig())

    def count_opening(self, dataset: str) -> int:
        return 1

    def memory(self) -> MemoryRoom:
        raise NotImplementedError("nothing is measured")


def in_a_job() -> Line:
    """What a batch costs more in a job than without one."""
    alone, job = [], QuietJob()
    inside = []
    for turn in range(10):
        for times, there in ((alone, None), (inside, job)):
            link._Installed.link = there
            data = ElasticDataLoader(
                range(20_000), collate_fn=len, num_replicas=1, rank=0, name=f"{turn}"
            )
            times.append(_took(lambda _, data=data: _steps(data, job), 0) / len(data))
    link._Installed.link = None
    more = (min(inside) - min(alone)) * 1e6
    return Line(
        "a batch in a job takes longer by",
        more,
        "µs",
        at_most=MOST_IN_A_JOB_US,
        seen=f"{min(inside) * 1e6:.1f} against {min(alone) * 1e6:.1f} µs, shortest of 10 turns",
    )


def _steps(data: ElasticDataLoader, job: QuietJob) -> int:
    for _ in data:
        job.worker.steps += 1
    return job.step


def shuffle() -> list[Line]:
    """What an order of ten billion records takes, in bytes and time."""
    order = Order(TEN_BILLION, "records", 7, 3)
    state = len(pickle.dumps(order))
    near, far = (_per_position(order, start) for start in (0, TEN_BILLION - 10_000_000))
    one = _per_single_position(order)
    return [
        Line(
            "order of 10 billion records: state",
            state / MB,
            "MB",
            at_most=1.0,
            seen=f"{state} bytes",
        ),
        Line(
            "time to a position at the end / at the start",
            far / near,
            "x",
            at_most=1.5,
            seen=f"{near * 1e9:.0f} and {far * 1e9:.0f} ns a position, 8192 at once",
        ),
        Line("time to a single position", one * 1e6, "µs"),
    ]


def _per_position(order: Order, start: int) -> float:
    def once() -> float:
        began = time.perf_counter()
        order.records(range(start, start + 8192 * 8, 8))
        return (time.perf_counter() - began) / 8192

    return statistics.median(once() for _ in range(100))


def _per_single_position(order: Order) -> float:
    def once(start: int) -> float:
        began = time.perf_counter()
        for position in range(start, start + 1000):
            order.record(position)
        return (time.perf_counter() - began) / 1000

    return statistics.median(once(start * 100_000_000) for start in range(50))


def measure(quick: bool = False) -> list[Line]:
    """Measure all of it."""
    return [*(compare(case, 15 if quick else 61) for case in CASES), in_a_job(), *shuffle()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns: is anything far off?")
    parsed: Any = parser.parse_args(arguments)
    lines = measure(parsed.quick)
    for line in lines:
        print(" | ".join([*line.row(), line.told()]))
    return int(any(line.met is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
