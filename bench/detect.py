"""Is a healthy script left alone, is a hang repaired in time with the right rank named, at what cost?

Small training scripts, one job each, all on this machine: patterns that look like hangs and are none,
hangs that can be proven, and hangs in which nothing moves (`detection/patterns`); thousands of steps in
which nobody hangs; sick nodes and slow ranks. Every line has a figure from this run and the goal that
it is held against; nothing is carried over from other runs or machines.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH.parent)]  # Also where holdfast is not installed.

from detection import calm, cost, healthy, hung, localise, slow, stacks  # noqa: E402
from detection.jobs import Setting  # noqa: E402
from detection.patterns import KINDS, ROWS  # noqa: E402
from harness import command  # noqa: E402
from harness.lines import Line, report  # noqa: E402
from harness.report import Report  # noqa: E402
from harness.setting import say  # noqa: E402

MEASURES: dict[str, Callable[[Setting], list[Line]]] = {
    "localise": localise.measure,
    "stacks": stacks.measure,
    "slow": slow.measure,
    "cost": cost.measure,
    "proven": hung.measure_proven,
    "silent": hung.measure_silent,
    "healthy": healthy.measure,
    "calm": calm.measure,
}

EXAMPLES = """\
  detect.py                    all of it; some hours on two cores
  detect.py --quick            two tries of each hang, each healthy row once: is anything far off?
  detect.py --only proven      just these, separated by commas:
      localise   sick nodes, singly and in pairs, in simulated clusters of 3 to 64
      stacks     where eight ranks are: `holdfast why`
      slow       one of four ranks at half speed; healthy ranks beside six busy processes
      cost       5 ms steps, watched and not, by turns
      proven     stopped, collectives that never meet, own locks: at once, rank and line named
      silent     nothing of a rank moves: after --hang-after, and not before
      healthy    evaluations, uploads, waits, pauses, ...: never restarted
      calm       10,000 steps with pauses, slow saves and evaluations, quiet and under load
  detect.py --only healthy --kind ddp --steps-ms 20 --jobs 8
                               one variant of all healthy rows; ten minutes on two cores
  detect.py --pattern upload-20,lock-twice
                               only these rows; `--list` has all, `--show NAME` prints a script

Exits with 1 if a goal is missed. Ctrl-C ends the bench and every process it started.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", metavar="NAMES", help=f"of {', '.join(MEASURES)}")
    add("--pattern", metavar="NAMES", help="only these rows, and the measures that have them")
    add("--kind", metavar="KINDS", help=f"of {', '.join(KINDS)}; default: all")
    add("--steps-ms", metavar="LENGTHS", help="of a step; default: 20, 200 and 2000 or 1000")
    add("--tries", type=int, metavar="N", help="of each way to hang (20; --quick 2)")
    add("--jobs", type=int, default=1, metavar="N", help="jobs of patterns side by side (1)")
    add("--quick", action="store_true", help="little of everything; for a first look")
    add("--unwatched", action="store_true", help="healthy rows with --no-hang-detection: a control")
    add("--keep", metavar="FOLDER", help="leave the jobs' folders there, logs and journals")
    add("--list", action="store_true", help="print all rows and exit")
    add("--show", metavar="NAME", choices=ROWS, help="print the script of a row and exit")
    add(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to a file, or to standard output"
    )
    args = parser.parse_args()
    args.patterns = _known(parser, "--pattern", args.pattern, ROWS)
    args.kinds = _known(parser, "--kind", args.kind, KINDS)
    args.steps = tuple(int(length) for length in _words(args.steps_ms))
    groups = dict.fromkeys(ROWS[name].group for name in args.patterns)
    args.names = _known(parser, "--only", args.only, MEASURES) or tuple(groups or MEASURES)
    if args.tries is None:
        args.tries = 2 if args.quick else 20
    if args.keep and Path(args.keep).exists() and any(Path(args.keep).iterdir()):
        parser.error(f"--keep: {args.keep} is not empty")
    if args.tries < 1 or args.jobs < 1:
        parser.error("--tries and --jobs must be at least 1")
    return args


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",")] if text else []


def _known(
    parser: argparse.ArgumentParser, flag: str, text: str | None, names: Collection[str]
) -> tuple[str, ...]:
    """The words of a flag, all of which must be among the names."""
    if unknown := sorted(set(_words(text)) - set(names)):
        parser.error(f"{flag} does not know {', '.join(unknown)}; it knows {', '.join(names)}")
    return tuple(_words(text))


def _listed() -> str:
    rows = [[row.name, row.group, f"{row.lasts_s:g}", row.story] for row in ROWS.values()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:{widths[0]}}  {group:{widths[1]}}  {lasts:>{widths[2]}} s  {story}"
        for name, group, lasts, story in rows
    )


def _report(args: argparse.Namespace, folder: Path) -> Report:
    setting = Setting(
        tries=args.tries,
        quick=args.quick,
        folder=folder,
        jobs=args.jobs,
        patterns=args.patterns,
        kinds=args.kinds,
        steps_ms=args.steps,
        unwatched=args.unwatched,
        keep=args.keep is not None,
    )
    load = os.getloadavg()[0]
    found: dict[str, list[Line]] = {}
    for name in args.names:
        found[name] = MEASURES[name](setting)
        say(f"{name}: {sum(line.met is False for line in found[name])} goals missed")
    return report("detect", found, load)


def main() -> int:
    args = arguments()
    if args.list or args.show:
        print(ROWS[args.show].script if args.show else _listed())
        return 0
    return command.run(args, lambda folder: _report(args, folder))


if __name__ == "__main__":
    sys.exit(main())
