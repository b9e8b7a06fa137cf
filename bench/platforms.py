"""How fast lost nodes are replaced, platform by platform, and what supply costs at scale.

Each platform is measured where its engine is: Slurm, Ray and Kubernetes are skipped, with the reason,
where they are not (`make test-platforms` sets them up).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import asdict
from pathlib import Path

from harness import command
from harness.report import Report
from harness.setting import Setting, say
from supplying.lines import Line, Skipped

PLATFORMS = ("local", "sim", "slurm", "ray", "kubernetes")
EXAMPLES = """\
  platforms.py                           all that can be measured here, 5 tries each
  platforms.py --only local,sim          just these
  platforms.py --only local --tries 1    a quick look
  platforms.py --json out.json           every value, for programs

A node is killed by SIGKILL with all that it runs; the time is from there until every rank has finished
a step again. Medians are compared with the goal; the command exits with 1 if one is missed.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", metavar="NAMES", help=f"just these, separated by commas ({', '.join(PLATFORMS)})")
    add("--tries", type=int, default=5, metavar="N", help="for each line (5)")
    add("--ranks", type=int, default=2, metavar="N", help="ranks, half of them on each node (2)")
    add("--settle", type=float, default=5.0, metavar="S", help="train so long before a kill (5)")
    add("--limit", type=float, default=120.0, metavar="S", help="longer counts as hung (120)")
    add("--keep", type=Path, metavar="DIR", help="keep each job's folder with its logs here")
    add(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to a file, or to standard output"
    )
    args = parser.parse_args()
    args.names = [name.strip() for name in args.only.split(",")] if args.only else list(PLATFORMS)
    if unknown := sorted(set(args.names) - set(PLATFORMS)):
        parser.error(f"--only does not know {', '.join(unknown)}; it knows {', '.join(PLATFORMS)}")
    if args.tries < 1:
        parser.error("--tries must be more than 0")
    if args.ranks < 2 or args.ranks % 2:
        parser.error("--ranks must be even: two nodes share them")
    return args


def measured(name: str, setting: Setting) -> list[Line]:
    """Measure one platform; Skipped where it cannot be measured here."""
    try:
        module = importlib.import_module(f"supplying.{name}")
    except ModuleNotFoundError as missing:
        raise Skipped(f"{missing.name} is not there") from missing
    lines: list[Line] = module.run(setting)
    return lines


def report(args: argparse.Namespace, folder: Path) -> Report:
    setting = Setting(
        launchers=[],
        ranks=args.ranks,
        tries=args.tries,
        limit=args.limit,
        settle=args.settle,
        script=[],
        folder=folder,
        keep_logs=args.keep is not None,
    )
    lines: list[Line] = []
    notes = ["medians; all on this machine"]
    for name in args.names:
        try:
            lines += measured(name, setting)
        except Skipped as skipped:
            notes.append(f"{name}: skipped: {skipped}")
            say(notes[-1])
    columns = ["what", "median", "max", "unit", "goal", "met", "went well"]
    notes += [f"{line.platform}: {note}" for line in lines for note in line.notes]
    summary = {f"{line.platform}: {line.what}": line.met for line in lines}
    passed = all(line.met for line in lines)
    results = [asdict(line) for line in lines]
    return Report("platforms", columns, [x.row() for x in lines], notes, results, summary, passed)


def main() -> int:
    args = arguments()
    return command.run(args, lambda folder: report(args, folder))


if __name__ == "__main__":
    sys.exit(main())
