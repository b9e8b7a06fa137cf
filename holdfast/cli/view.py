"""What the commands that only look at a job have in common: which job, `--json`, tables."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from holdfast.coordinator.journal import replay, replay_spans
from holdfast.core import report
from holdfast.core.job import Job
from holdfast.errors import HoldfastError, JobError, UsageError
from holdfast.jobhome import JobHome, find
from holdfast.messages.units import Time


class Parser(argparse.ArgumentParser):
    """Argparse whose errors are one line, like all of ours."""

    def __init__(self, prog: str, description: str, raw: bool = False) -> None:
        layout = argparse.RawDescriptionHelpFormatter if raw else argparse.HelpFormatter
        super().__init__(
            prog=prog, description=description, formatter_class=layout, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


class Viewed:
    """A job as its journal tells it, at this moment or at its end."""

    def __init__(self, home: JobHome, job: Job, last_at: Time) -> None:
        self.home = home
        self.job = job
        self.alive = home.alive()
        # Between two events of a living job time goes on; of a dead one nothing more is known.
        self.now = Time(max(time.time(), last_at)) if self.alive else last_at


def look(command: str, about: str, argv: Sequence[str]) -> tuple[Viewed, bool]:
    """The job that the command line names, and whether it wants JSON."""
    parser = Parser(prog=f"holdfast {command}", description=about)
    parser.add_argument("job", nargs="?", metavar="JOB", help="its name; the newest when left out")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    arguments = parser.parse_args(argv)
    home = find(arguments.job)
    snapshot = replay(home.journal) if home.journal.exists() else None
    if snapshot is None:
        raise JobError(f"job {home.name} has no events yet; try again in a moment")
    return Viewed(home, snapshot.job, snapshot.at), arguments.json


def tell_end(home: JobHome, quiet: bool) -> None:
    """A job is over: the summary on the terminal, the trace in the job's home."""
    try:
        snapshot, spans = replay_spans(home.journal)
        if snapshot is None:
            return
        home.trace.write_text(json.dumps(report.trace(snapshot.job, spans)))
        if not quiet:
            lines = [*report.summary(snapshot.job, snapshot.at), f"more in {home.path}"]
            print("\n".join(f"[holdfast] {line}" for line in lines), file=sys.stderr)
    except BrokenPipeError:
        # Nobody reads it any more. Python shall not stumble over that at its exit either: the exit
        # code is the job's.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    except (HoldfastError, OSError) as error:
        print(f"[holdfast] no summary: {error}", file=sys.stderr)


def print_json(content: Any) -> None:
    json.dump(content, sys.stdout, indent=1)
    sys.stdout.write("\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people: drawn on a terminal, tab-separated into a pipe."""
    if not sys.stdout.isatty():
        print(title)
        for row in (columns, *rows):
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
