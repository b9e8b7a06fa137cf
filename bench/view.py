"""What the page costs: the job that it shows, and the page itself when the job is very large.

    view.py                          all of the below
    view.py --only cost              the step of a job, and its coordinator, with and without a page
    view.py --only latency           from a fault's row in the journal to the event on the stream
    view.py --only week              timelines of 10,000 ranks, 1,000 faults and 7 days
    view.py --only giant --hours 2   a simulated job of 10,000 ranks: replay, and each answer of the API

`cost` runs one real job, a rank whose step is 5 ms of work, and compares windows of it by turns: alone,
and looked at by a client of the stream and one that scrapes `/metrics` once a second. `week` feeds the
bookings of the ledger to the timeline as a job of that size would make them, without the events around
them.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.coordinator.journal import Journal
from holdfast.core.ledger.books import Account
from holdfast.core.replay import Entry
from holdfast.jobhome import find
from holdfast.messages.events import LeaseEnded
from holdfast.messages.records import Cause
from holdfast.messages.reports import Booking
from holdfast.messages.units import Rank, RoundNumber, StepNumber, Time
from holdfast.view.follower import Follower, JournalFile
from holdfast.view.history.timeline import RankBlock, Timeline
from holdfast.view.metrics.text import metrics_text
from holdfast.view.report.facts import gather
from holdfast.view.report.html import html
from holdfast.view.trace.drawing import write_trace
from holdfast.view.web import answers
from holdfast.view.web.app import encoded

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e.web import Web

SCRIPT = """
import sys, time
import holdfast
def work(turns):
    for _ in range(turns):
        pass
turns = 1_000_000
began = time.perf_counter()
work(turns)
turns = int(turns * 0.005 / (time.perf_counter() - began))
step, steps = 0, open(sys.argv[1], "w", buffering=1 << 16)
while True:
    step += 1
    began, used = time.monotonic(), time.thread_time()
    work(turns)
    holdfast.progress(step)
    ended, used = time.monotonic(), time.thread_time() - used
    steps.write(f"{ended} {ended - began} {ended - began - used}\\n")
"""
RANKS, WEEK_S = 10_000, 7 * 86_400.0


def rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


# ---- cost ----


def environment(home: str) -> dict[str, str]:
    return {**os.environ, "HOLDFAST_HOME": home}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def coordinator_pid(launcher: int) -> int | None:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        parent = int(text.rpartition(")")[2].split()[1])
        if "(holdfast-coord)" in text and parent == launcher:
            return int(path.parent.name)
    return None


@contextmanager
def job(home: str, name: str, steps: Path) -> Iterator[int]:
    """A real job of one rank that steps every 5 ms until it is stopped; its coordinator's pid."""
    script = Path(home) / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "holdfast", "run", "--job", name, "--nproc-per-node", "1"]
    run = subprocess.Popen(
        [*command, str(script), str(steps)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(home),
    )
    try:
        while (coordinator := coordinator_pid(run.pid)) is None or not steps.exists():
            assert run.poll() is None, f"the job failed with {run.returncode}"
            time.sleep(0.1)
        yield coordinator
    finally:
        run.terminate()
        run.wait()


@contextmanager
def looking(web: Web, name: str) -> Iterator[None]:
    """A client of the stream, and one that scrapes once a second, until they are ended."""
    code = f"""
import time, urllib.request
def get(path):
    request = urllib.request.Request(
        {web.base!r} + path, headers={{"authorization": "Bearer {web.token}"}}
    )
    return urllib.request.urlopen(request, timeout=60)
while True:
    try:
        PLACE
    except OSError:
        time.sleep(0.2)
"""
    places = (
        f'[None for line in get("/api/jobs/{name}/stream")]',
        'get("/metrics").read(); time.sleep(1)',
    )
    lookers = [
        subprocess.Popen([sys.executable, "-c", code.replace("PLACE", place)]) for place in places
    ]
    try:
        yield
    finally:
        for looker in lookers:
            looker.kill()
            looker.wait()


def cost(turns: int) -> None:
    """Compare windows of one job by turns, without the first seconds of each.

    Time that a rank is kept from running shows what a step's length cannot on a shared machine, where
    the same work takes some percent more or less from one second to the next."""
    settle_s, window_s = 4.0, 10.0
    windows: list[tuple[bool, float, float]] = []
    with tempfile.TemporaryDirectory() as home:
        steps = Path(home) / "steps"
        with job(home, "seen", steps) as coordinator:

            def window(looked_at: bool) -> None:
                time.sleep(settle_s)
                used, began = cpu_s(coordinator), time.monotonic()
                time.sleep(window_s)
                windows.append((looked_at, began, (cpu_s(coordinator) - used) / window_s))

            for _ in range(turns):
                window(looked_at=False)
                with Web(Path(home), environment(home)) as web, looking(web, "seen"):
                    window(looked_at=True)
        lines = [line.split() for line in steps.read_text().splitlines()[:-1]]
    took = [tuple(map(float, line)) for line in lines]
    for looked_at, name in ((False, "alone"), (True, "with a page and a scrape each second")):
        lengths, kept = [], []
        for began in [at for kind, at, _ in windows if kind == looked_at]:
            inside = [step for step in took if began <= step[0] < began + window_s]
            lengths.append(statistics.fmean(step[1] for step in inside) * 1e3)
            kept.append(statistics.fmean(step[2] for step in inside) * 1e6)
        shares = [share for kind, _, share in windows if kind == looked_at]
        print(
            f"{name}: step {statistics.median(lengths):.3f} ms ({min(lengths):.3f} to"
            f" {max(lengths):.3f}), of which kept from running {statistics.median(kept):.1f} us"
            f" ({min(kept):.1f} to {max(kept):.1f});"
            f" coordinator {statistics.median(shares):.2%} of a core"
        )


# ---- latency ----


def latency(tries: int) -> None:
    """From the journal's commit to the bytes of the event at a client."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOLDFAST_HOME"] = home
        found = [one_fault(home, number) for number in range(tries)]
    found.sort()
    print(
        f"a fault is on the stream {statistics.median(found) * 1e3:.0f} ms after its row was written"
        f" (median of {tries}), {found[-1] * 1e3:.0f} ms at most"
    )


def one_fault(home: str, number: int) -> float:
    name = f"j{number}"
    command = [sys.executable, "-m", "holdfast", "sim", "--nodes", "4", "--hours", "0.05"]
    command += ["--seed", str(number), "--faults", "default", "--job", name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment(home))
    with (
        Web(Path(home), environment(home)) as web,
        web.open(f"/api/jobs/{name}/stream") as stream,
    ):
        while not stream.readline().startswith(b"event: now"):
            pass
        home_of_job = find(name)
        follower = Follower.open(home_of_job)
        node, at = next(iter(follower.job.membership.placed)), Time(follower.now + 1.0)
        follower.close()
        journal = Journal(home_of_job.journal)
        began = time.monotonic()
        journal.append([Entry(at, LeaseEnded(at=at, node=node, why="its agent died"))])
        while not stream.readline().startswith(b"event: incident"):
            pass
        took = time.monotonic() - began
        journal.close()
        return took


# ---- very large jobs ----


def bookings(incidents: int) -> Iterator[list[Booking]]:
    """What the ledger books for 10,000 ranks: faults at equal intervals, and all ranks start again."""
    period = WEEK_S / incidents
    for number in range(incidents):
        at = number * period
        ends: list[tuple[Cause, float]] = [
            ("start", 1.0),
            ("init", 9.0),
            ("restore", 13.0),
            ("productive", period - 7.0),
            ("redo", period - 6.0),
            ("detect", period - 5.9),
            ("stop", period - 0.1),
            ("rendezvous", period),
        ]
        batch: list[Booking] = []
        for rank in range(RANKS):
            begin, shift = at, rank * 1e-4
            for cause, end in ends:
                until = at + end + (shift if cause in ("init", "productive") else 0.0)
                batch.append(
                    Booking(
                        Rank(rank),
                        cause,
                        Time(begin),
                        Time(until),
                        RoundNumber(number + 1),
                        StepNumber(number),
                    )
                )
                begin = until
        yield batch


def week(incidents: int) -> None:
    before, began = rss_mb(), time.monotonic()
    accounts: dict[Rank, Account] = {}
    timeline, count, taking = Timeline.begun(0.0, accounts), 0, 0.0
    for batch in bookings(incidents):
        since = time.process_time()
        timeline.take(batch)
        taking += time.process_time() - since
        count += len(batch)
    print(
        f"{RANKS} ranks, {incidents} faults, 7 days: {count / 1e6:.0f} M bookings,"
        f" {taking / count * 1e6:.1f} us each, {rss_mb() - before:.0f} MB,"
        f" {time.monotonic() - began:.0f} s with making them"
    )
    ranks = [RankBlock(f"rank {rank}", rank, 1) for rank in range(RANKS)]
    for name, blocks, since, until in (
        ("all ranks, all time", ranks, 0.0, WEEK_S),
        ("256 ranks, all time", ranks[:256], 0.0, WEEK_S),
        ("64 ranks, the last minute", ranks[:64], WEEK_S - 60.0, WEEK_S),
        ("all ranks, one hour in the middle", ranks, WEEK_S / 2, WEEK_S / 2 + 3600.0),
    ):
        measure(name, lambda: timeline.lanes(since, until, 1000, blocks, WEEK_S))  # noqa: B023
    measure("goodput", lambda: timeline.seconds(0.0, WEEK_S, 200, WEEK_S))


def measure(name: str, make: Callable[[], Any]) -> None:
    took = []
    for _ in range(3):
        began = time.process_time()  # The machine may be busy with other things.
        body = encoded(make())
        took.append(time.process_time() - began)
    sent = len(gzip.compress(body, 5))
    print(
        f"  {name}: {min(took) * 1e3:.1f} ms of CPU, {len(body) / 1e3:.0f} kB, {sent / 1e3:.0f} kB sent"
    )


def giant(hours: float) -> None:
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOLDFAST_HOME"] = home
        command = [sys.executable, "-m", "holdfast", "sim", "--nodes", "1250", "--slots", "8"]
        command += ["--hours", str(hours), "--faults", "heavy", "--seed", "7", "--job", "giant"]
        command += ["--check", "never", "--json"]
        began = time.monotonic()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        numbers = json.loads(done.stdout)
        print(
            f"simulated {hours} h in {time.monotonic() - began:.0f} s: {numbers['events']} events"
        )
        before, began = rss_mb(), time.process_time()
        follower = Follower(JournalFile(find("giant")))
        follower.catch_up()
        took = time.process_time() - began
        events = follower.job.events
        print(
            f"replayed {events} events in {took:.1f} s of CPU ({events / took:.0f} a second),"
            f" {rss_mb() - before:.0f} MB"
        )
        asyncio.run(answered(follower))
        files(follower)


async def answered(follower: Follower) -> None:
    measure("now", lambda: answers.now(follower, 0.0))
    measure("timeline", lambda: answers.timeline(follower, None, None, 1000, 0, None, "rank"))
    measure("by node", lambda: answers.timeline(follower, None, None, 1000, 0, None, "node"))
    measure("64 ranks", lambda: answers.timeline(follower, None, None, 1000, 0, 64, "rank"))
    measure("goodput", lambda: answers.goodput(follower, 200))
    measure("incidents", lambda: answers.incidents(follower, None, 50))
    measure("checkpoints", lambda: answers.checkpoints(follower))
    measure("nodes", lambda: answers.nodes(follower))
    measure("speed", lambda: answers.speed(follower))


def files(follower: Follower) -> None:
    """What `holdfast report`, `metrics` and `trace` make of the job."""
    with tempfile.TemporaryFile() as trace:
        for name, write in (
            ("report", lambda: html(gather(follower)).encode()),
            ("metrics", lambda: metrics_text(follower).encode()),
            ("trace", lambda: write_trace(follower, trace)),
        ):
            began = time.process_time()
            made = write()
            size = len(made) if isinstance(made, bytes) else trace.tell()
            print(f"  {name}: {time.process_time() - began:.1f} s of CPU, {size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("cost", "latency", "week", "giant"))
    parser.add_argument("--hours", type=float, default=2.0, help="of the giant (2)")
    parser.add_argument("--incidents", type=int, default=1000, help="of the week (1000)")
    parser.add_argument("--turns", type=int, default=8, help="pairs of windows of the cost (8)")
    given = parser.parse_args()
    chosen = {
        "cost": lambda: cost(given.turns),
        "latency": lambda: latency(5),
        "week": lambda: week(given.incidents),
        "giant": lambda: giant(given.hours),
    }
    for name, act in chosen.items():
        if given.only in (None, name):
            act()


if __name__ == "__main__":
    main()
