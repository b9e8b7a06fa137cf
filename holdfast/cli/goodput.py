"""Runs `holdfast goodput`: where every second of every rank went."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.view import look, print_json, view_parser
from holdfast.view.terminal import print_goodput

ABOUT = "The ledger: every second of every rank by cause; they add up to wall clock × ranks."


def main(argv: Sequence[str]) -> int:
    arguments = view_parser("goodput", ABOUT).parse_args(argv)
    goodput = look(arguments.job).goodput()
    if arguments.json:
        print_json(goodput)
    else:
        print_goodput(goodput)
    return 0
