"""Runs `holdfast incidents`: each fault of a job, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.view import look, print_json, view_parser
from holdfast.view.terminal import print_incidents

ABOUT = "Each fault of a job: what, where, what was done about it, seconds lost by phase."


def main(argv: Sequence[str]) -> int:
    arguments = view_parser("incidents", ABOUT).parse_args(argv)
    viewed = look(arguments.job)
    if arguments.json:
        print_json(viewed.incidents())
    else:
        print_incidents(viewed.name, viewed.incidents())
    return 0
