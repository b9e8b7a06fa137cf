"""Runs `holdfast scale`: another number of nodes for a job that runs."""

from __future__ import annotations

import getpass
from collections.abc import Sequence

from holdfast.cli.tlsflags import add_tls_flags, tls_given
from holdfast.cli.view import Parser, print_json
from holdfast.config.values import node_count, nodes_range
from holdfast.jobhome import find
from holdfast.messages.wire import AskScale, ScaleTaken
from holdfast.wire.visitors import ask

ABOUT = """\
Change the number of nodes of a job that runs. Nodes that are missing are asked for of the platform that
provides them; a larger world is formed when they have joined, right after a checkpoint if there are
any. A smaller one is formed at once, and what is too much is released."""

EPILOG = """\
examples:
  holdfast scale llm 4:8             between 4 and 8 nodes
  holdfast scale llm 4 --spares 1    exactly 4, and one that waits for a place"""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="holdfast scale", description=ABOUT, raw=True)
    parser.epilog = EPILOG
    parser.add_argument("job", metavar="JOB", help="its name")
    parser.add_argument("nodes", metavar="N|MIN:MAX", help="how many nodes it may train with")
    parser.add_argument(
        "--spares", metavar="N", help="nodes that wait for a place (default: as now)"
    )
    add_tls_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    given = parser.parse_args(argv)
    min_nodes, max_nodes = nodes_range(given.nodes, "scale")
    question = AskScale(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        spares=None if given.spares is None else node_count(given.spares, "--spares"),
        by=_user(),
    )
    taken = ask(find(given.job), question, ScaleTaken, tls_given(given))
    if given.json:
        print_json(taken)
    else:
        print(taken.line)
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # No such user in this container.
        return "somebody"
