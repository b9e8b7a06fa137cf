"""`holdfast chaos`: have a fault happen to a running job."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from holdfast.cli.tlsflags import add_tls_flags, tls_given
from holdfast.cli.view import Parser, print_json
from holdfast.config.faults import injection
from holdfast.jobhome import find
from holdfast.messages.chaos import FAULTS, About
from holdfast.messages.wire import AskFault, FaultTaken
from holdfast.wire.visitors import ask

ABOUT = """\
Have a fault happen to a running job, to see what the job does about it.
With nothing else said it happens now, to any rank or node; which one follows from the seed alone.
What happens in a rank's main thread happens at the end of its current step.
`holdfast incidents` marks what came of it as injected, `holdfast status` shows what is to come."""

EPILOG = """\
examples:
  holdfast chaos llm kill --rank 1                 now
  holdfast chaos llm hang --rank any --at-step 500 when that rank has finished step 500
  holdfast chaos llm stop --every 100 --seed 7     one rank in each 100 steps, the same each time
  HOLDFAST_CHAOS="kill@step=50,rank=1; hang@every=100,seed=7" holdfast run ... train.py
                                                   from the start of a job"""

_WORDS = {
    "rank": "--rank",
    "node": "--node",
    "step": "--at-step",
    "every": "--every",
    "seed": "--seed",
    "value": "--value",
}


def main(argv: Sequence[str]) -> int:
    given = _parser().parse_args(argv)
    said = {word: [str(text)] for word in _WORDS if (text := getattr(given, word)) is not None}
    if given.force:
        said["force"] = ["1"]
    asked = injection(given.fault, said, f"job {given.job}")
    taken = ask(find(given.job), AskFault(injection=asked), FaultTaken, tls_given(given)).taken
    if given.json:
        print_json(taken)
    else:
        for one in taken:
            outcome = {"done": "injected", "armed": "to come", None: "asked for, no word yet"}
            print(f"{outcome.get(one.outcome, one.outcome)}: {one.line}")
    return 1 if any(one.outcome in ("refused", "missed") for one in taken) else 0


def _parser() -> Parser:
    parser = Parser(prog="holdfast chaos", description=ABOUT, raw=True)
    parser.epilog = f"{_list_of_faults()}\n\n{EPILOG}"
    parser.add_argument("job", metavar="JOB", help="its name")
    parser.add_argument("fault", metavar="FAULT", help="one of those below")
    parser.add_argument("--rank", metavar="R[,R]|any", help="whom; default any")
    parser.add_argument(
        "--node", metavar="N", help="which node: its place in the round, its name or its host's"
    )
    parser.add_argument(
        "--at-step", dest="step", metavar="S", help="when the rank has finished step S"
    )
    parser.add_argument("--every", metavar="K", help="once in K steps, again and again")
    parser.add_argument("--seed", metavar="X", help="who is any, and with --every in which step")
    parser.add_argument("--value", metavar="V", help="what it means stands below")
    parser.add_argument("--force", action="store_true", help="although the machine may suffer")
    add_tls_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def _list_of_faults() -> str:
    lines = []
    for name, about in FAULTS.items():
        first, *more = textwrap.wrap(_described(about), 76)
        lines += [f"  {name:<17} {first}", *(f"{'':<20}{line}" for line in more)]
    return "faults:\n" + "\n".join(lines)


def _described(about: About) -> str:
    if about.value is None:
        return about.text
    return f"{about.text} (V: {about.value.meaning}, default {about.value.default:g})"
