"""Finds the job that a command looks at, replays its journal, and prints JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec

from holdfast.coordinator.journal import replay, replay_story
from holdfast.core import report
from holdfast.core.replay import JobSnapshot
from holdfast.core.story import Recorder
from holdfast.errors import HoldfastError, JobError, UsageError
from holdfast.jobhome import JobHome, find, open_privately
from holdfast.messages.reports import (
    DataAccount,
    GoodputReport,
    IncidentReport,
    StatusReport,
    StoryStep,
)
from holdfast.messages.units import Time
from holdfast.view.follower import Follower
from holdfast.view.summary import summary
from holdfast.view.trace.drawing import write_trace


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all errors of Holdfast."""

    def __init__(self, prog: str, description: str, raw: bool = False) -> None:
        layout = argparse.RawDescriptionHelpFormatter if raw else argparse.HelpFormatter
        super().__init__(
            prog=prog, description=description, formatter_class=layout, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def view_parser(command: str, about: str) -> Parser:
    """Make the parser of a command that only looks at a job; the command may add options."""
    parser = Parser(prog=f"holdfast {command}", description=about)
    parser.add_argument("job", nargs="?", metavar="JOB", help="its name; the newest when left out")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


class ViewedJob:
    """A job as its journal describes it, at this moment or at its end."""

    def __init__(self, home: JobHome, snapshot: JobSnapshot) -> None:
        self.name = snapshot.job.name
        self._job = snapshot.job
        self._alive = home.alive()
        # Time goes on between two events of a living job; of a dead one nothing more is known.
        self._now = Time(max(time.time(), snapshot.at)) if self._alive else snapshot.at

    def status(self) -> StatusReport:
        return report.status(self._job, self._now, self._alive)

    def goodput(self) -> GoodputReport:
        return report.goodput(self._job, self._now)

    def data(self) -> list[DataAccount]:
        return report.data(self._job)

    def incidents(self) -> list[IncidentReport]:
        return report.incidents(self._job)

    def incident(self, number: int) -> IncidentReport:
        return _numbered(self.name, self.incidents(), number)


def look(job: str | None) -> ViewedJob:
    """Read the journal of the job of that name, or of the newest job."""
    home = find(job)
    snapshot = replay(home.journal) if home.journal.exists() else None
    if snapshot is None:
        raise JobError(f"job {home.name} has no events yet; try again in a moment")
    return ViewedJob(home, snapshot)


def find_story(job: str | None, number: int) -> tuple[IncidentReport, list[StoryStep]]:
    """Replay a job from its first event; one of its incidents, and how it was repaired."""
    home, recorder = find(job), Recorder()
    snapshot = replay_story(home.journal, recorder) if home.journal.exists() else None
    if snapshot is None:
        raise JobError(f"job {home.name} has no events yet; try again in a moment")
    incident = _numbered(home.name, report.incidents(snapshot.job), number)
    return incident, recorder.story(snapshot.job, number)


def _numbered(job: str, incidents: list[IncidentReport], number: int) -> IncidentReport:
    if not 1 <= number <= len(incidents):
        raise UsageError(f"job {job} has {len(incidents)} incidents, and none of number {number}")
    return incidents[number - 1]


def tell_end(home: JobHome, quiet: bool) -> None:
    """Report a job that is over: the summary on the terminal, the trace in the job's home."""
    try:
        if not home.journal.exists():
            return
        follower = Follower.at_end(home)
        follower.close()
        if not follower.opened:
            return
        with write_whole(home.trace, private=True) as out:
            write_trace(follower, out, home.incidents)
        if not quiet:
            reports = follower.status(), follower.goodput(), follower.incidents()
            lines = [*summary(*reports), f"more in {home.path}"]
            print("\n".join(f"[holdfast] {line}" for line in lines), file=sys.stderr)
    except BrokenPipeError:
        # Standard error has no reader any more. The exit code must stay the job's, so Python's own
        # flush at exit goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    except (HoldfastError, OSError) as error:
        print(f"[holdfast] no summary: {error}", file=sys.stderr)


def read_journal(home: JobHome) -> Follower:
    """Read a job's journal up to now; on a terminal, a bar shows how far a long one was read."""
    if not sys.stderr.isatty():
        return Follower.open(home)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the journal", total=1.0)
        return Follower.open(home, lambda share: bar.update(task, completed=share))


@contextmanager
def write_whole(path: Path, private: bool = False) -> Iterator[BinaryIO]:
    """Write a file that is there whole or not at all; private: readable by this user only. A device or
    a pipe is written to as it is, and a link stays one."""
    temporary: Path | None = None
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with open(path, "wb") as file:
                yield file
            return
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".{target.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        fd = open_privately(temporary, flags) if private else os.open(temporary, flags, 0o666)
        with os.fdopen(fd, "wb") as file:
            yield file
        os.replace(temporary, target)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()


def print_json(content: Any) -> None:
    """Print structs or plain values as JSON."""
    json.dump(msgspec.to_builtins(content), sys.stdout, indent=1)
    sys.stdout.write("\n")
