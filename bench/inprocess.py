"""How fast a function is left and entered again, and what that costs: holdfast beside NVRx.

One script (scripts/restarting.py: data-parallel over gloo, on the CPU) trains inside a restartable
function and writes down each finished step; it is told to break from outside.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from harness import command, lines
from harness.lines import Line
from harness.report import Report
from restarting import cost, device, nvrx, single, storm
from restarting.jobs import Setting

CACHE = Path(__file__).resolve().parent.parent / ".bench"

EXAMPLES = """\
  inprocess.py                              all but faults
  inprocess.py --only single                just these, separated by commas:
      single     an exception in one of 2 ranks, SIGKILL of one of 4: back, and steps redone
      hangs      stopped, GIL kept, a mismatch, a sleep, a loop: detection and return
      cost       kept state on a 5 ms step, by turns with none
      gloo-cuda, nccl-cuda   an exception with work in flight on a GPU, fifty times (not unasked)
      nvrx       the exception, under NVRx's in-process restart, installed into .bench/ the first time
      faults     one job with hundreds of faults of all kinds, and the bits of an undisturbed run
  inprocess.py --only faults --faults 500   half an hour on two cores

Exits with 1 if a goal is missed. Ctrl-C ends the bench and every process it started.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", metavar="NAMES", help=f"just these measures: {', '.join(MEASURES)}")
    add("--tries", type=int, default=5, metavar="N", help="faults of each kind (5)")
    add("--faults", type=int, default=500, metavar="N", help="with faults: how many (500)")
    add("--seed", type=int, default=1, help="with faults: which ones (1)")
    add("--limit", type=float, default=60.0, metavar="S", help="what takes longer hangs (60)")
    add("--cache", type=Path, default=CACHE, metavar="DIR", help="where NVRx is installed (.bench)")
    add("--keep", type=Path, metavar="DIR", help="keep each job's folder with its logs here")
    add("--json", nargs="?", const="-", metavar="FILE", help="JSON to a file or standard output")
    args = parser.parse_args()
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep {args.keep} is not empty")
    args.names = args.only.split(",") if args.only else UNASKED
    if unknown := sorted(set(args.names) - set(MEASURES)):
        parser.error(f"--only does not know {', '.join(unknown)}")
    return args


MEASURES: dict[str, Callable[[Setting, argparse.Namespace], list[Line]]] = {
    "single": lambda setting, _: single.measure(setting),
    "hangs": lambda setting, _: single.measure_hangs(setting),
    "cost": lambda setting, _: cost.measure(setting),
    "nvrx": lambda setting, args: nvrx.measure(setting, args.cache),
    "gloo-cuda": lambda setting, _: device.measure(setting, "gloo"),
    "nccl-cuda": lambda setting, _: device.measure(setting, "nccl"),
    "faults": lambda setting, args: storm.measure(setting, args.faults, args.seed),
}
UNASKED = [name for name in MEASURES if name not in ("faults", "gloo-cuda", "nccl-cuda")]


def _report(args: argparse.Namespace, folder: Path) -> Report:
    setting = Setting(args.tries, args.limit, folder, args.keep is not None)
    load = os.getloadavg()[0]
    return lines.report(
        "in-process", {name: MEASURES[name](setting, args) for name in args.names}, load
    )


def main() -> int:
    args = arguments()
    return command.run(args, lambda folder: _report(args, folder))


if __name__ == "__main__":
    sys.exit(main())
