"""Journals for the tests of viewers: what a simulated job wrote, in the home of a job."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import msgspec

from holdfast.coordinator.journal import Journal, replay
from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.core.replay import Entry
from holdfast.jobhome import JobFile, JobHome, create
from holdfast.messages.events import JobOpened
from holdfast.sim.cluster import Cluster, SimSettings

V = TypeVar("V")


@cache
def simulated(seed: int = 1, hours: float = 0.2, nodes: int = 4) -> tuple[Entry, ...]:
    """All events of a small job in chaos."""
    return events_of(
        SimSettings(
            seed=seed,
            nodes=nodes,
            spares=1,
            min_nodes=max(1, nodes - 1),
            hours=hours,
            slots=2,
            faults="chaos",
            check="never",
            step_s=1.0,
            save_every=10,
            checkpoints=True,
            light=True,
        )
    )


def events_of(settings: SimSettings) -> tuple[Entry, ...]:
    """All events of a simulated job."""
    log = io.BytesIO()
    Cluster(settings, log).run()
    lines = (line for line in log.getvalue().splitlines() if line.startswith(b"event "))
    return tuple(msgspec.json.decode(line[6:], type=Entry) for line in lines)


@cache
def unfinished() -> tuple[Entry, ...]:
    """The same job up to a moment in which its ranks train."""
    entries = simulated()
    return entries[: len(entries) * 4 // 5]


def latest(
    entries: tuple[Entry, ...], look: Callable[[Job], V | None]
) -> tuple[tuple[Entry, ...], V]:
    """The events up to the latest moment in which a look at the job finds something, and that."""
    assert isinstance(entries[0].event, JobOpened)
    job, at, newest = jobs.opened(entries[0].event), 0, None
    for number, entry in enumerate(entries[1:], 1):
        jobs.decide(job, entry.event, entry.at)
        if (found := look(job)) is not None:
            at, newest = number, found
    assert newest is not None, "there is no such moment"
    return entries[: at + 1], newest


def home_with(entries: tuple[Entry, ...], name: str = "j") -> JobHome:
    """A job's home with these events in its journal; HOLDFAST_HOME says where."""
    home = create(name, "train.py")
    home.write_job_file(JobFile(job=name, host="127.0.0.1", port=1, token="t", pid=1))
    write(home, entries)
    return home


def keep_state(home: JobHome) -> None:
    """Give a home's journal a snapshot after its newest event, as a coordinator does now and then."""
    snapshot = replay(home.journal)
    assert snapshot is not None
    journal = Journal(home.journal)
    journal.write_snapshot(snapshot)
    journal.close()


def write(home: JobHome, entries: tuple[Entry, ...]) -> None:
    """Add events to a home's journal, as another process would."""
    journal = Journal(home.journal)
    journal.append(entries)
    assert journal.trouble is None
    journal.close()
