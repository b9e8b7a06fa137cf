"""Runs `holdfast status`: where a job stands."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.view import look, print_json, view_parser
from holdfast.view.terminal import print_status

ABOUT = "Where a job stands: state, round, step, speed, nodes and ranks, last incident."


def main(argv: Sequence[str]) -> int:
    arguments = view_parser("status", ABOUT).parse_args(argv)
    status = look(arguments.job).status()
    if arguments.json:
        print_json(status)
    else:
        print_status(status)
    return 0
