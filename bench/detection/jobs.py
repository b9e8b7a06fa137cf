"""Jobs for the measures, on nodes of this machine, and what their journals say."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median

from harness.job import GLANCE_EVERY_S, Job, JobError
from harness.launchers import Launcher
from harness.marks import Seconds

from holdfast.coordinator.journal import replay
from holdfast.core.job import Job as JobState
from holdfast.errors import JournalError
from holdfast.jobhome import JobHome
from holdfast.messages.records import Incident

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "moody.py"
LIMIT_S: Seconds = 90.0
RANKS, NODES = 4, 2
WARM_STEPS = 12
"""After so many steps of its own a process's deadlines are learnt."""

UNBROKEN = ("straggler", "overload", "unfit", "storage", "ending")
"""Incidents of which training knows nothing."""

_numbers = count(1)


@dataclass(frozen=True)
class Setting:
    tries: int
    quick: bool
    folder: Path
    jobs: int = 1
    """Tries that may run side by side."""
    patterns: tuple[str, ...] = ()
    """Only these rows; all of them if empty."""
    kinds: tuple[str, ...] = ()
    steps_ms: tuple[int, ...] = ()
    """Only these; as a measure finds best if empty."""
    unwatched: bool = False
    """Whether hangs are not looked for: a healthy row that fails then is not healthy."""
    keep: bool = False
    """Whether jobs' folders stay for a person to look at."""


@contextmanager
def running(
    setting: Setting, using: Launcher, ranks: int, script: Sequence[str], program: Path = SCRIPT
) -> Iterator[Job]:
    """A started job; ended and cleaned up on the way out."""
    # Tries side by side have a process each.
    name = f"job-{os.getpid()}-{next(_numbers)}"
    job = Job(name, using, ranks, setting.folder / name, list(script), program)
    (job.folder / "orders").mkdir()
    try:
        with job:
            yield job
    finally:
        if not setting.keep:
            job.discard()


def state(job: Job) -> JobState | None:
    """The job as its journal has it now."""
    try:
        snapshot = replay(home(job).journal)
    except JournalError:
        return None
    return snapshot.job if snapshot is not None else None


def home(job: Job) -> JobHome:
    return JobHome(job.folder / "home" / "jobs" / job.name)


def wait_until_warm(job: Job) -> None:
    """Until every rank has taken enough steps in its newest life."""

    def warm() -> bool:
        lives = [job.marks.newest(rank) for rank in range(job.ranks)]
        return all(life is not None and len(life.times) >= WARM_STEPS for life in lives)

    job.wait_for(f"{WARM_STEPS} steps of all ranks", warm, LIMIT_S)


def step_s(job: Job) -> Seconds:
    """The median step of rank 0's newest life."""
    life = job.marks.newest(0)
    if life is None or len(life.times) < 2:
        raise JobError("no steps to tell the median of")
    return median(later - earlier for earlier, later in pairwise(life.times))


def first_incident(job: Job, within_s: Seconds = LIMIT_S) -> Incident:
    """The first incident, once it is over and its verdict known."""
    found: list[Incident] = []

    def over() -> bool:
        now = state(job)
        found[:] = now.incidents[:1] if now is not None else []
        return bool(found) and found[0].closed_at is not None

    job.wait_for("end of an incident", over, within_s, GLANCE_EVERY_S)
    return found[0]


def monotonic(wall: float) -> Seconds:
    """A moment of the job's clock, which is the wall's, as all others here are told."""
    return wall - time.time() + time.monotonic()
