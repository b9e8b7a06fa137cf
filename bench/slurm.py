"""How fast jobs on Slurm start, survive the loss of a node, and go on after a requeue.

    python bench/slurm.py --tries 3
    python bench/slurm.py --only start      `srun torchrun` and Holdfast, in turns

It starts a Slurm of its own on this machine (as root; tests/engines/install.sh installs it), so what is
to be believed are the ratios of one run.
"""

from __future__ import annotations

import argparse

from harness.report import table
from modes import slurm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=3, metavar="N", help="of each (3)")
    parser.add_argument("--only", metavar="TEXT", default="", help="scenarios whose name has this")
    args = parser.parse_args()
    report = slurm.run(args.tries, [name for name in slurm.SCENARIOS if args.only in name])
    print(table(report.columns, report.rows), *report.notes, sep="\n")


if __name__ == "__main__":
    main()
