"""`holdfast chaos`: inject a fault into a running job."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from holdfast.cli.tlsflags import add_tls_flags, tls_given
from holdfast.cli.view import Parser, print_json
from holdfast.config.faults import WORDS, injection
from holdfast.jobhome import find
from holdfast.messages.chaos import FAULTS
from holdfast.messages.wire import AskFault, FaultTaken
from holdfast.wire.visitors import ask

ABOUT = """\
Inject a fault into a running job, to see how the job recovers from it.
By default it strikes now, on any rank or node; the seed alone determines which one.
A fault in a rank's main thread strikes at the end of its current step.
`holdfast incidents` marks its consequences as injected, `holdfast status` shows pending faults."""

EPILOG = """\
examples:
  holdfast chaos llm kill --rank 1                 now
  holdfast chaos llm hang --rank any --at-step 500 when that rank has finished step 500
  holdfast chaos llm stop --every 100 --seed 7     one rank in each 100 steps, the same each time
  HOLDFAST_CHAOS="kill@step=50,rank=1; hang@every=100,seed=7" holdfast run ... train.py
                                                   from the start of a job"""

_FLAGS = {
    "rank": ("--rank", "R[,R]|any", "ranks to strike; default any"),
    "node": ("--node", "N", "node to strike: its index in the round, its name or its host's name"),
    "step": ("--at-step", "S", "strike when the rank has finished step S"),
    "every": ("--every", "K", "strike once in K steps, repeatedly"),
    "seed": ("--seed", "X", "selects which rank `any` is, and with --every which step"),
    "value": ("--value", "V", "see below"),
}


def main(argv: Sequence[str]) -> int:
    given = _parser().parse_args(argv)
    said = {
        word: [str(text)] for word in WORDS if (text := getattr(given, word)) not in (None, False)
    }
    asked = injection(given.fault, said, f"job {given.job}")
    taken = ask(find(given.job), AskFault(injection=asked), FaultTaken, tls_given(given)).taken
    if given.json:
        print_json(taken)
    else:
        outcomes = {"done": "injected", "armed": "to come", None: "requested, not confirmed yet"}
        for one in taken:
            why = f": {one.why}" if one.why else ""
            print(f"{outcomes.get(one.outcome, one.outcome)}: {one.line}{why}")
    return 1 if any(one.outcome in ("refused", "missed") for one in taken) else 0


def _parser() -> Parser:
    parser = Parser(prog="holdfast chaos", description=ABOUT, raw=True)
    lines = ["faults:"]
    for name, fault in FAULTS.items():
        first, *more = textwrap.wrap(fault.described, 76)
        lines += [f"  {name:<17} {first}", *(f"{'':<20}{line}" for line in more)]
    parser.epilog = "\n".join([*lines, "", EPILOG])
    parser.add_argument("job", metavar="JOB", help="its name")
    parser.add_argument("fault", metavar="FAULT", help="one of those below")
    for word, (flag, metavar, text) in _FLAGS.items():
        parser.add_argument(flag, dest=word, metavar=metavar, help=text)
    parser.add_argument("--force", action="store_true", help="accept harm to the whole machine")
    add_tls_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser
