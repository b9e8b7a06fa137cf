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
`holdfast incidents` marks its consequences as injected; `holdfast status` shows the faults that are
to come, and those that were not injected with the reason."""

EPILOG = """\
examples:
  holdfast chaos llm kill --rank 1                 now
  holdfast chaos llm hang --rank any --at-step 500 when that rank has finished step 500
  holdfast chaos llm stop --every 100 --seed 7     one rank in each 100 steps, the same each time
  HOLDFAST_CHAOS="kill@step=50,rank=1; hang@every=100,seed=7" holdfast run ... train.py
                                                   from the start of a job"""


def main(argv: Sequence[str]) -> int:
    given = _parser().parse_args(argv)
    said = {word: [text] for word in WORDS if (text := getattr(given, word)) is not None}
    asked = injection(given.fault, said, f"job {given.job}")
    taken = ask(find(given.job), AskFault(injection=asked), FaultTaken, tls_given(given)).taken
    if given.json:
        print_json(taken)
    else:
        outcomes = {"done": "injected", "armed": "to come", None: "requested, not confirmed yet"}
        for one in taken:
            why = f": {one.why}" if one.why and one.why not in one.line else ""
            print(f"{outcomes.get(one.outcome, one.outcome)}: {one.line}{why}")
    return 1 if any(one.missed or one.outcome in ("refused", "missed") for one in taken) else 0


def _parser() -> Parser:
    parser = Parser(prog="holdfast chaos", description=ABOUT, raw=True)
    lines = ["faults:"]
    for name, fault in FAULTS.items():
        first, *more = textwrap.wrap(fault.described, 76)
        lines += [f"  {name:<17} {first}", *(f"{'':<20}{line}" for line in more)]
    parser.epilog = "\n".join([*lines, "", EPILOG])
    parser.add_argument("job", metavar="JOB", help="its name")
    parser.add_argument("fault", metavar="FAULT", help="one of those below")
    for name, word in WORDS.items():
        if name == "force":
            parser.add_argument(word.flag, action="store_const", const="1", help=word.help)
        else:
            parser.add_argument(word.flag, dest=name, metavar=word.metavar, help=word.help)
    add_tls_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser
