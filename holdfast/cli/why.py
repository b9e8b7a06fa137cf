"""The command `holdfast why`: where every rank is now, and which ranks wait for which."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from holdfast.cli.tlsflags import add_tls_flags, tls_given
from holdfast.cli.view import Parser, print_json
from holdfast.errors import JobError
from holdfast.jobhome import JobHome, find
from holdfast.messages.evidence import StackGroup
from holdfast.messages.wire import AskWhy, Why
from holdfast.wire.visitors import ask

FRAMES_SHOWN = 12

ABOUT = """Examine all ranks of a running job: print one sentence that says which rank the others wait
for, then the ranks at the same place together, with their stacks. Training is not stopped. With an
incident's number: print what was seen when that one hung."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="holdfast why", description=ABOUT)
    parser.add_argument("job", nargs="?", metavar="JOB", help="name of the job (default: newest)")
    parser.add_argument("--incident", type=int, metavar="N", help="the number of a past hang")
    add_tls_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    arguments = parser.parse_args(argv)
    home = find(arguments.job)
    if arguments.incident is not None:
        return _print_past(home, arguments.incident, arguments.json)
    why = ask(home, AskWhy(), Why, tls_given(arguments))
    if arguments.json:
        print_json(msgspec.to_builtins(why))
        return 0
    if why.standing == 0:
        print("no rank is past its deadline; this is where the ranks were a moment ago")
    print(why.verdict.sentence)
    _show(why.verdict.groups)
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
    _show([msgspec.convert(group, StackGroup) for group in content["groups"]])
    print(f"\nall evidence is in {path.parent}")
    return 0


def _show(groups: Sequence[StackGroup]) -> None:
    for group in groups:
        print(f"\n{group.headline}")
        for frame in group.frames[:FRAMES_SHOWN]:
            where = f"{frame.file}:{frame.line}" if frame.line else frame.file
            print(f"    {frame.function}  {where}")
        if len(group.frames) > FRAMES_SHOWN:
            print(f"    ... {len(group.frames) - FRAMES_SHOWN} more")
