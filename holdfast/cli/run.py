"""`holdfast run` starts a job, runs it to its end and prints a summary."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence

from holdfast import proc
from holdfast.cli.flags import parse_run
from holdfast.platforms.topology import request


def main(argv: Sequence[str]) -> int:
    since = process_start()
    fill_standard_fds()
    settings = parse_run(argv)
    # Who started a job of many nodes was told once.
    for warning in settings.warnings if not request(os.environ) else ():
        print(f"holdfast run: {warning}", file=sys.stderr)

    from holdfast.launch.machine import check_machine
    from holdfast.launch.process import launch

    logging.basicConfig(
        format="[holdfast] %(message)s",
        level=logging.ERROR if settings.terminal.quiet else logging.INFO,
    )
    check_machine(settings)
    code, home = launch(settings, since)
    if home is not None:
        from holdfast.cli.view import tell_end

        tell_end(home, settings.terminal.quiet)
    return code


def fill_standard_fds() -> None:
    """Open /dev/null for each closed standard stream, so that no socket of ours gets its number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Gets the lowest free number: this one.
            os.set_inheritable(fd, True)


def process_start() -> float:
    """When this process was started, on the monotonic clock; the job's ledger begins there."""
    ticks = int(proc.stat("self")[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)
