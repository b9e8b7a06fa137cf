"""Runs `holdfast hang`: a person decides about a rank that others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.tlsflags import add_tls_flags, tls_given
from holdfast.cli.view import Parser, print_json
from holdfast.config.values import whole_number
from holdfast.jobhome import find
from holdfast.messages.units import Rank
from holdfast.messages.wire import AskHang, HangNoted
from holdfast.wire.visitors import ask

ABOUT = """\
Decide about a rank that others wait for, instead of leaving it to Holdfast.
`holdfast status` and `holdfast why` show what is suspected, and until when it is left alone."""

EPILOG = """\
decisions:
  now     end the rank and repair the round at once
  never   leave the rank alone for the rest of the round, and its place for good:
          the job remembers that, over restarts and when it is queued again

example:
  holdfast hang llm --rank 0 never    rank 0 uploads, and that takes as long as it takes"""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="holdfast hang", description=ABOUT, raw=True)
    parser.epilog = EPILOG
    parser.add_argument("job", metavar="JOB", help="its name")
    parser.add_argument("--rank", required=True, metavar="N", help="global rank")
    parser.add_argument("decision", choices=("now", "never"), help="see below")
    add_tls_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    given = parser.parse_args(argv)
    rank = Rank(whole_number(given.rank, "--rank"))
    question = AskHang(rank=rank, act=given.decision == "now")
    noted = ask(find(given.job), question, HangNoted, tls_given(given))
    if given.json:
        print_json(noted)
    else:
        print(noted.text)
    return 0
