"""How soon a rank that stands still is noticed, whether the right one is named, and what that costs.

Four gloo ranks on two nodes, all on this machine, hang in several ways; thousands of steps in which
nobody does; sick nodes and slow ranks. Every line has a figure from this run and the goal that it is
held against; nothing is carried over from other runs or machines.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH.parent)]  # Also where holdfast is not installed.

from detection import calm, cost, hangs, localise, slow, stacks  # noqa: E402
from detection.jobs import Setting  # noqa: E402
from harness import processes  # noqa: E402
from harness.launchers import LauncherMissingError  # noqa: E402
from harness.lines import Line, report  # noqa: E402
from harness.report import Report, publish  # noqa: E402
from harness.setting import say  # noqa: E402

MEASURES: dict[str, Callable[[Setting], list[Line]]] = {
    "localise": localise.measure,
    "stacks": stacks.measure,
    "slow": slow.measure,
    "cost": cost.measure,
    "hangs": hangs.measure,
    "calm": calm.measure,
}

EXAMPLES = """\
  detect.py                    all of it; most of an hour
  detect.py --quick            two tries of each hang, 800 calm steps: is anything far off?
  detect.py --only hangs       just these, separated by commas:
      localise   sick nodes, singly and in pairs, in simulated clusters of 3 to 64
      stacks     where eight ranks are: `holdfast why`
      slow       one of four ranks at half speed; healthy ranks beside six busy processes
      cost       5 ms steps, watched and not, by turns
      hangs      SIGSTOP, sleep, GIL, skipped collective; steps of 20 ms, 0.2 s and 1 s
      calm       10,000 steps with pauses, slow saves and evaluations, and nobody hangs

Exits with 1 if a goal is missed. Ctrl-C ends the bench and every process it started.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", metavar="NAMES", help=f"of {', '.join(MEASURES)}")
    add("--tries", type=int, metavar="N", help="of each way to hang (20; --quick 2)")
    add("--quick", action="store_true", help="little of everything; for a first look")
    add(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to a file, or to standard output"
    )
    args = parser.parse_args()
    args.names = [name.strip() for name in args.only.split(",")] if args.only else list(MEASURES)
    if unknown := sorted(set(args.names) - set(MEASURES)):
        parser.error(f"--only does not know {', '.join(unknown)}; it knows {', '.join(MEASURES)}")
    if args.tries is None:
        args.tries = 2 if args.quick else 20
    if args.tries < 1:
        parser.error("--tries must be at least 1")
    return args


def _report(args: argparse.Namespace, folder: Path) -> Report:
    setting = Setting(tries=args.tries, quick=args.quick, folder=folder)
    load = os.getloadavg()[0]
    found: dict[str, list[Line]] = {}
    for name in args.names:
        found[name] = MEASURES[name](setting)
        for line in found[name]:
            say(f"{name}: {'  '.join(line.row())}  ({line.told()})")
    return report("detect", found, load)


def main() -> int:
    args = arguments()
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Short, because launchers put Unix sockets below it and those allow about 100 characters.
    with tempfile.TemporaryDirectory(prefix="hfd-", ignore_cleanup_errors=True) as scratch:
        try:
            report = _report(args, Path(scratch))
        except LauncherMissingError as missing:
            say(f"detect.py: {missing}")
            return 2
        except KeyboardInterrupt:
            say("detect.py: interrupted; every process it started has been ended")
            return 130
        finally:
            processes.end_descendants([])
    options = {key: value for key, value in vars(args).items() if key != "json"}
    publish(report, options, args.json)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
