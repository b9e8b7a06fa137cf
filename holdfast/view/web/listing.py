"""Lists the jobs of this machine, those that run and those that are over.

A job that somebody looks at is known already. Of the others the journal is read from its newest
snapshot, and again only when it was written to since.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.coordinator.journal import replay
from holdfast.errors import HoldfastError
from holdfast.jobhome import JobHome, homes
from holdfast.messages.units import Time
from holdfast.view.web import answers

MOST_JOBS: Final = 500
"""Jobs of a list: the newest."""
LIVE_EVERY_S: Final = 2.0
"""A job that runs is read at most this often."""


class Written(NamedTuple):
    """One content of a file."""

    at_ns: int
    inode: int
    size_bytes: int


class Stamp(NamedTuple):
    """One state of a job's journal."""

    alive: bool
    journal: Written
    log: Written

    @property
    def written_at_ns(self) -> int:
        return max(self.journal.at_ns, self.log.at_ns)


class JobList:
    """What is known of all jobs of this machine."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stamp, float, dict[str, Any]]] = {}

    def read(self) -> list[dict[str, Any]]:
        """Read what has changed; the newest job first. It may take a while the first time."""
        found = [home for home in homes() if home.journal.exists()]
        found.sort(key=lambda home: -_changed_at(home.path))
        listed = [self._one(home) for home in found[:MOST_JOBS]]
        return sorted(listed, key=lambda one: -(one["opened_at"] or 0.0))

    def _one(self, home: JobHome) -> dict[str, Any]:
        stamp, now = journal_stamp(home), time.monotonic()
        known = self._known.get(home.name)
        if known is not None and (known[0] == stamp or now - known[1] < LIVE_EVERY_S):
            return known[2]
        told = _summary(home)
        self._known[home.name] = (stamp, now, told)
        return told


def _summary(home: JobHome) -> dict[str, Any]:
    error = "no events yet"
    try:
        snapshot = replay(home.journal)
        if snapshot is not None:
            alive = home.alive()
            at = Time(max(time.time(), snapshot.at)) if alive else snapshot.at
            return answers.summary(snapshot.job, at, alive) | {"job": home.name}
    except HoldfastError as caught:  # The journal of one job must not hide the others.
        error = str(caught)
    return {"job": home.name, "state": "unreadable", "opened_at": None, "reason": error}


def journal_stamp(home: JobHome) -> Stamp:
    """Changes whenever the journal was written to, or its job began or ceased to run."""
    log = home.journal.with_name(home.journal.name + "-wal")
    return Stamp(home.alive(), _written(home.journal), _written(log))


def _written(path: Path) -> Written:
    try:
        stat = os.stat(path)
    except OSError:
        return Written(0, 0, 0)
    if not stat.st_size:  # A log that a reader has made and leaves empty.
        return Written(0, 0, 0)
    return Written(stat.st_mtime_ns, stat.st_ino, stat.st_size)


def _changed_at(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
