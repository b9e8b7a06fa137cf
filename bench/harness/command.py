"""Runs a bench as a command: in a folder of its own, and with every process ended on the way out."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import processes
from harness.launchers import LauncherMissingError
from harness.report import Report, publish
from harness.setting import say


def run(args: argparse.Namespace, measure: Callable[[Path], Report]) -> int:
    """Measure in the folder of `--keep`, or in one that is removed; publish the report and return the
    exit status."""
    name = Path(sys.argv[0]).name
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Short, because launchers put Unix sockets below it and those allow about 100 characters.
    with tempfile.TemporaryDirectory(prefix="hfb-", ignore_cleanup_errors=True) as scratch:
        try:
            report = measure(Path(args.keep or scratch).resolve())
        except LauncherMissingError as missing:
            say(f"{name}: {missing}")
            return 2
        except KeyboardInterrupt:
            say(f"{name}: interrupted; every process it started has been ended")
            return 130
        finally:
            processes.end_descendants([])
    publish(report, {key: value for key, value in vars(args).items() if key != "json"}, args.json)
    return 0 if report.passed else 1
