"""Runs `holdfast top`: a job as it is now, redrawn in place."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence

from holdfast.cli.flags import add_flag, given_settings
from holdfast.cli.tlsflags import add_tls_flags, tls_given
from holdfast.cli.view import read_journal, view_parser
from holdfast.config.schema import Settings
from holdfast.jobhome import find
from holdfast.view.top.program import Program, print_lines, print_once
from holdfast.view.top.state import look_at

ABOUT = """Watch a job in a terminal: state, step, speed and loss, goodput and where the lost seconds
went, a letter for each rank, checkpoints, what is wrong now, the last incidents. Keys: arrows choose a
rank, w asks where it stands, i lists all incidents, ? explains the rest, q quits. It reads the job's
journal and nothing else, so the job does not notice. Into a pipe, or on a terminal that cannot draw in
place, it writes a line for each change, one a second at most, until the job is over."""
ROWS_ONCE = 60


def main(argv: Sequence[str]) -> int:
    parser = view_parser("top", ABOUT)
    parser.add_argument("--once", action="store_true", help="show one look at the job, and end")
    add_flag(parser, Settings.price_per_hour)
    add_tls_flags(parser)
    arguments = parser.parse_args(argv)
    price = given_settings(arguments).price_per_hour
    home = find(arguments.job)
    follower = read_journal(home)
    try:
        if arguments.once:
            size = shutil.get_terminal_size((100, ROWS_ONCE))
            print_once(look_at(follower, price), size.columns, ROWS_ONCE, arguments.json)
        elif arguments.json or not _has_screen():
            asyncio.run(print_lines(follower, arguments.json))
        else:
            asyncio.run(Program(home, follower, tls_given(arguments), price).run())
    except KeyboardInterrupt:
        return 130
    finally:
        follower.close()
    return 0


def _has_screen() -> bool:
    """Return whether a frame can be drawn in place, and keys be read."""
    capable = os.environ.get("TERM", "dumb") not in ("", "dumb")
    return capable and sys.stdin.isatty() and sys.stdout.isatty()
