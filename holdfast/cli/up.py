"""`holdfast up` runs a whole job: its coordinator, and the supplier of the platform it runs on."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.cli.flags import given_flags, parse_settings, run_parser
from holdfast.cli.run import fill_standard_fds, process_start
from holdfast.config.rendezvous import Rendezvous
from holdfast.config.schema import Settings
from holdfast.config.settings import RunSettings, run_settings
from holdfast.config.values import joined
from holdfast.errors import UsageError
from holdfast.platforms.opening import PLATFORMS, own_host

DESCRIPTION = """\
Run a job whose nodes are provided by a platform: one that is lost is asked for again, and `holdfast
scale` changes their number. On this machine each node is a group of processes that takes itself for a
host (node-0, node-1, ...): see what your script does when nodes die, come back, and become more or
fewer, before you pay for a cluster. In an allocation of Slurm (--on slurm) they are its
nodes, in a Ray cluster (--on ray) they are actors."""

EPILOG = """\
examples:
  holdfast up --nodes 4 train.py
      four nodes of one rank each
  holdfast up --nodes 2:4 --spares 1 --nproc-per-node 2 --job try train.py --lr 0.1
      two to four nodes of two ranks, and one that waits for a place
  salloc --nodes 4 holdfast up --on slurm --nodes 3 --spares 1 train.py
      three nodes of an allocation of Slurm, and one that waits; `holdfast submit slurm` is for batch
  HOLDFAST_RAY_GPUS=8 holdfast up --on ray --nodes 3 --spares 1 --nproc-per-node 8 train.py
      three actors of eight GPUs on a Ray cluster, and one that waits; RAY_ADDRESS says which cluster

while it runs, in another terminal:
  holdfast status try                      the nodes that are wanted, and those that are there
  kill -9 -- -$(pgrep -of 'node-1 ')       end the session leader of a node: another takes its place
  holdfast scale try 2:6                   more nodes; 2:2 for fewer
  holdfast incidents try                   what was lost, and what it cost

It takes all flags of `holdfast run`, except those that say where nodes meet. All after SCRIPT is the
script's. Memory (--memory) is not limited on one machine."""

OWN = (
    *("coordinator", "standalone", "node_rank", "master_addr", "master_port"),
    *("rdzv_backend", "rdzv_endpoint"),
)
"""Settings that say where nodes meet: that is for `holdfast up` to know."""
NOT_FOR_NODES = frozenset(
    {
        *OWN,
        *("nnodes", "job", "requeued", "token_file", "local_addr", "drain"),
        *("notify", "no_status_line"),
    }
)
LOCAL = "local"


def main(argv: Sequence[str]) -> int:
    since = process_start()
    fill_standard_fds()
    platform, settings, flags = parse_up(argv)
    for warning in settings.warnings:
        print(f"holdfast up: {warning}", file=sys.stderr)

    from holdfast.launch.machine import check_machine
    from holdfast.launch.up import launch_job

    logging.basicConfig(
        format="[holdfast] %(message)s",
        level=logging.ERROR if settings.terminal.quiet else logging.INFO,
    )
    check_machine(settings)
    code, home = launch_job(settings, platform, flags, since)

    from holdfast.cli.view import tell_end

    tell_end(home, settings.terminal.quiet)
    return code


def parse_up(argv: Sequence[str]) -> tuple[str, RunSettings, list[str]]:
    """Read `holdfast up ARGV`: the platform, the job's settings, and the flags for its nodes."""
    parser = _parser()
    given, command, parsed = parse_settings(parser, argv)
    for name in OWN:
        if name in given.said:
            raise UsageError(
                f"{given.shown(name)}: `holdfast up` starts all nodes, and decides where they meet; "
                "leave it out"
            )
    settings = run_settings(given, command)
    meeting = settings.rendezvous
    listens = meeting.local_addr if parsed.on != LOCAL else None
    listens = listens or own_host(parsed.on, os.environ)
    here = Rendezvous(
        coordinator=joined(listens, 0),
        hosts_coordinator=True,
        local_addr=meeting.local_addr,
        run_id=meeting.run_id,
    )
    flags = given_flags(parsed, NOT_FOR_NODES)
    return parsed.on, replace(settings, rendezvous=here), flags


def _parser() -> argparse.ArgumentParser:
    parser = run_parser(
        "holdfast up",
        usage="holdfast up --nodes N|MIN:MAX [flags of holdfast run] SCRIPT [its own arguments]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument(
        "--on",
        default=LOCAL,
        choices=tuple(PLATFORMS),
        help="platform that provides the nodes (default: this machine)",
    )
    parser.add_argument(
        "--nodes",
        dest=Settings.nnodes.name,
        metavar=Settings.nnodes.takes,
        help="number of nodes, or the fewest and the most to train with; the same as --nnodes",
    )
    return parser
