"""Runs `holdfast why`: where every rank is now, and which ranks wait for which."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from holdfast.cli.tlsflags import add_tls_flags, tls_given
from holdfast.cli.view import print_json, view_parser
from holdfast.config.values import whole_number
from holdfast.errors import JobError
from holdfast.jobhome import JobHome, find
from holdfast.messages.evidence import StackGroup
from holdfast.messages.wire import AskWhy, Why
from holdfast.view.terminal import print_stacks
from holdfast.wire.visitors import ask

ABOUT = """Examine all ranks of a running job: print one sentence that says which rank the others wait
for, then the ranks at the same place together, with their stacks. Training is not stopped. With an
incident's number: print what was seen when that one hung."""


def main(argv: Sequence[str]) -> int:
    parser = view_parser("why", ABOUT)
    parser.add_argument("--incident", metavar="N", help="the number of a past hang")
    add_tls_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.incident is not None:
        number = whole_number(arguments.incident, "--incident")
        return _print_past(find(arguments.job), number, arguments.json)
    home = find(arguments.job)
    why = ask(home, AskWhy(), Why, tls_given(arguments))
    if arguments.json:
        print_json(why)
        return 0
    if why.suspicion is not None:
        print(why.suspicion.line)
    elif not why.detects:
        print("hang detection is off; this is where the ranks were a moment ago")
    else:
        print("no rank holds the others up; this is where the ranks were a moment ago")
    print(why.verdict.sentence)
    print_stacks(why.verdict.groups)
    return 0


def _print_past(home: JobHome, incident: int, as_json: bool) -> int:
    path = home.incidents / str(incident) / "verdict.json"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise JobError(
            f"job {home.name}: there is no evidence of incident {incident}; only hangs are examined"
        ) from None
    if as_json:
        sys.stdout.write(data.decode() + "\n")
        return 0
    content = msgspec.json.decode(data)
    print(content["sentence"])
    print_stacks([msgspec.convert(group, StackGroup) for group in content["groups"]])
    print(f"\nall evidence is in {path.parent}")
    return 0
