"""`holdfast run`: start a job, see it through, say how it went."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.cli.flags import parse_run
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.jobhome import JobHome


def main(argv: Sequence[str]) -> int:
    since = _process_start()
    settings = parse_run(argv)
    for warning in settings.warnings:
        print(f"holdfast run: {warning}", file=sys.stderr)

    from holdfast import launcher

    logging.basicConfig(
        format="[holdfast] %(message)s",
        level=logging.ERROR if settings.terminal.quiet else logging.INFO,
    )
    code, home = launcher.launch(settings, since)
    if home is not None:
        _tell(home, settings.terminal.quiet)
    return code


def _process_start() -> float:
    """When this process was started, on the monotonic clock: a job's seconds begin there."""
    with open("/proc/self/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)


def _tell(home: JobHome, quiet: bool) -> None:
    """The summary on the terminal, the trace in the job's home."""
    import json

    from holdfast.coordinator.journal import replay_spans
    from holdfast.core import report

    try:
        snapshot, spans = replay_spans(home.journal)
        if snapshot is None:
            return
        home.trace.write_text(json.dumps(report.trace(snapshot.job, spans)))
        if not quiet:
            lines = [*report.summary(snapshot.job, snapshot.at), f"more in {home.path}"]
            print("\n".join(f"[holdfast] {line}" for line in lines), file=sys.stderr)
    except (HoldfastError, OSError) as error:
        print(f"[holdfast] no summary: {error}", file=sys.stderr)
