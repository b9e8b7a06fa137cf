"""Runs `holdfast sim`: a simulated cluster over the real core and the real supervisor, with faults."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, Any, TypeVar

from holdfast import jobhome
from holdfast.cli.view import Parser, print_json
from holdfast.collecting import seldom_collecting
from holdfast.config.values import amount, whole_number
from holdfast.coordinator.journal import Journal
from holdfast.core.replay import JobSnapshot
from holdfast.errors import UsageError
from holdfast.jobhome import JobFile
from holdfast.messages.supply import SupplyTerms
from holdfast.sim import look, report
from holdfast.sim.clock import START
from holdfast.sim.cluster import Cluster, SimSettings
from holdfast.sim.invariants import Check, Violated
from holdfast.sim.rates import SCHEDULES
from holdfast.sim.shapes import chaos, partitions, restarting, sharing, supplied

ABOUT = """\
Drive the real core, and up to 64 nodes the real supervisor of each agent, with simulated processes,
storage, network, faults and time. One seed gives one event log, byte for byte; a seed that breaks an
invariant is reported, and the command exits with 1.
With --seeds and without --nodes, each seed is a small job of its own shape in chaos; with --faults
partitions, in an hour of cut links, flaps, restarts and copied ids; with --faults data, four nodes that
share a million records while workers, agents and coordinators die; with --faults inprocess, ranks train
in restartable functions, and more goes wrong while they leave them.
With --supply a simulated platform provides the nodes: the job asks it for them, gets them after a
while, and asks for others when they are preempted, evicted, deleted, run out of memory or break. It
refuses, lies, and loses, doubles and delays its news; its supplier dies. No node may be leaked, no
request made twice, and what is wanted must come back:
  holdfast sim --seeds 0..199 --supply --liveness                  small jobs in chaos
  holdfast sim --nodes 1000 --supply --hours 24 --faults heavy     a large one for a day"""

CHECK_EVERY_UP_TO = 64
SPARES_PER = 200
TOLD_EVERY_S = 0.5
STEP_S = 5.0
CHAOS_STEP_S = 0.1
"""Short enough that a round takes a few steps before the next fault."""


V = TypeVar("V")


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    seeds = _seeds(arguments.seeds) if arguments.seeds else [arguments.seed]
    if len(seeds) > 1 and (arguments.log or arguments.job):
        raise UsageError(f"{'--log' if arguments.log else '--job'} wants a single seed")
    found: list[dict[str, Any]] = []
    violated: list[str] = []
    with _log(arguments.log) as file, _journal(arguments.job) as journal, seldom_collecting():
        for seed in seeds:
            try:
                found.append(
                    _run(_settings(arguments, seed), file, journal, len(found), len(seeds))
                )
            except Violated as violation:
                violated.append(str(violation))
                print(f"holdfast sim: {violation}", file=sys.stderr)
    _tell(found, violated, arguments)
    return 1 if violated else 0


def _parser() -> Parser:
    parser = Parser("holdfast sim", ABOUT, raw=True)
    add = parser.add_argument

    def number(
        flag: str, read: Callable[[str, str], V], default: V | None, metavar: str, about: str
    ) -> None:
        add(flag, type=lambda text: read(text, flag), default=default, metavar=metavar, help=about)

    number("--nodes", _at_least_one, None, "N", "largest number of nodes in a round (1000)")
    number("--slots", _at_least_one, 8, "N", "ranks on each node (8)")
    number("--spares", whole_number, None, "N", "nodes that wait for a place (one per 200 nodes)")
    number("--min-nodes", _at_least_one, None, "N", "fewest nodes in a round (nine tenths)")
    number("--hours", _hours, 24.0, "HOURS", "simulated time (24)")
    add("--faults", choices=sorted(SCHEDULES), default="default", help="fault rates")
    number("--fault-rate", amount, 1.0, "FACTOR", "multiplies those of nodes and platform (1)")
    number("--seed", _seed, 0, "N", "source of all randomness (0)")
    add("--seeds", metavar="A..B", help="run every seed from A to B")
    add(
        "--check",
        choices=("every", "round", "never"),
        help="when to check the whole state of the job",
    )
    add("--liveness", action="store_true", help="heal everything at the end and require progress")
    add("--inprocess", action="store_true", help="ranks train in a restartable function")
    add(
        "--supply",
        action="store_true",
        help="a simulated platform provides the nodes (some seeds of a sweep do so anyway)",
    )
    add("--log", metavar="FILE", help="write the event log")
    add("--job", metavar="NAME", help="keep it as a job, for `holdfast web NAME` and other viewers")
    add("--json", action="store_true", help="print JSON for programs")
    return parser


def _hours(text: str, flag: str) -> float:
    hours = amount(text, flag)
    if hours == 0:
        raise UsageError(f"{flag} {text}: more than 0 hours are needed")
    return hours


def _at_least_one(text: str, flag: str) -> int:
    number = whole_number(text, flag)
    if number == 0:
        raise UsageError(f"{flag} {text}: at least 1 is needed")
    return number


def _seed(text: str, flag: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{flag} {text}: a whole number is needed") from None


def _seeds(text: str) -> list[int]:
    first, dots, last = text.partition("..")
    try:
        found = list(range(int(first), int(last if dots else first) + 1))
    except ValueError:
        found = []
    if not found:
        raise UsageError(f"--seeds {text}: a range A..B is needed, as in 0..199")
    return found


def _log(path: str | None) -> AbstractContextManager[IO[bytes] | None]:
    if path is None:
        return nullcontext()
    try:
        return open(path, "wb")
    except OSError as error:
        raise UsageError(f"--log {path}: cannot be written: {error.strerror}") from None


def _settings(arguments: argparse.Namespace, seed: int) -> SimSettings:
    if arguments.seeds and arguments.nodes is None:
        if arguments.faults == "partitions":
            return partitions(seed)
        if arguments.faults == "data":
            return sharing(seed)
        if arguments.faults == "inprocess":
            return restarting(seed)
        shape = supplied if arguments.supply else chaos
        return shape(seed, arguments.liveness)
    nodes = arguments.nodes or 1000
    least = arguments.min_nodes or max(1, 9 * nodes // 10)
    if least > nodes:
        raise UsageError(f"--min-nodes {least} is more than --nodes {nodes}")
    usual: Check = "every" if nodes <= CHECK_EVERY_UP_TO else "round"
    return SimSettings(
        seed=seed,
        nodes=nodes,
        spares=-(-nodes // SPARES_PER) if arguments.spares is None else arguments.spares,
        min_nodes=least,
        hours=arguments.hours,
        slots=arguments.slots,
        faults=arguments.faults,
        fault_rate=arguments.fault_rate,
        check=arguments.check or usual,
        liveness=arguments.liveness,
        step_s=CHAOS_STEP_S if arguments.faults in ("chaos", "inprocess") else STEP_S,
        checkpoints=arguments.faults == "chaos" and nodes <= CHECK_EVERY_UP_TO,
        inprocess=arguments.inprocess or arguments.faults == "inprocess",
        supply=SupplyTerms() if arguments.supply else None,
    )


def _run(
    settings: SimSettings, file: IO[bytes] | None, journal: Journal | None, done: int, of: int
) -> dict[str, Any]:
    begun = time.monotonic()
    cluster = Cluster(settings, file, None if journal is None else journal.append)
    cluster.on_progress = _teller(begun, done, of)
    cluster.run()
    if journal is not None:
        _keep_state(cluster, journal)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return report.numbers(cluster)


@contextmanager
def _journal(job: str | None) -> Iterator[Journal | None]:
    """Open the journal of a simulated job, in a home like that of any other."""
    if job is None:
        yield None
        return
    home = jobhome.create(job, job)
    home.write_job_file(JobFile(job=job, host="127.0.0.1", port=1, token="simulated", pid=0))
    journal = Journal(home.journal)
    try:
        yield journal
    finally:
        journal.close()


def _keep_state(cluster: Cluster, journal: Journal) -> None:
    """Give the journal a recent snapshot, as the journal of a real job has one."""
    coordinator = cluster.coordinator
    if coordinator.job.events == journal.numbered:  # It has not died at the very end.
        journal.write_snapshot(
            JobSnapshot(coordinator.job, cluster.clock.now, dict(coordinator.acked))
        )


def _teller(begun: float, done: int, of: int) -> Callable[[Cluster], None] | None:
    """Make a function that shows the progress of the simulation on a terminal."""
    if not sys.stderr.isatty():
        return None
    told_at = begun

    def tell(cluster: Cluster) -> None:
        nonlocal told_at
        now = time.monotonic()
        if now - told_at < TOLD_EVERY_S:
            return
        told_at = now
        job, hours = cluster.coordinator.job, (cluster.clock.now - START) / 3600
        which = f"seed {cluster.settings.seed} ({done + 1} of {of}): " if of > 1 else ""
        sys.stderr.write(
            f"\r\x1b[K{which}{hours:.2f} of {cluster.settings.hours:.2f} h, round"
            f" {look.round_number(job)}, step {look.highest_step(job)},"
            f" {cluster.coordinator.events} events,"
            f" {now - begun:.0f} s"
        )
        sys.stderr.flush()

    return tell


def _tell(found: list[dict[str, Any]], violated: list[str], arguments: argparse.Namespace) -> None:
    if arguments.json:
        one = len(found) == 1 and not violated and not arguments.seeds
        print_json(found[0] if one else {"runs": found, "violated": violated})
        return
    if len(found) == 1 and not arguments.seeds:
        print("\n".join(report.lines(found[0])))
    elif arguments.seeds:
        print("\n".join(report.sweep_lines(found, violated)))
