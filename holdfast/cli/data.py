"""Runs `holdfast data`: which records of its data sets a job has used, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.cli.view import Parser, look, print_json
from holdfast.errors import UsageError
from holdfast.view.data import LISTED, audit, is_as_promised, listed
from holdfast.view.terminal import print_table

if TYPE_CHECKING:
    from holdfast.messages.reports import DataAccount

ABOUT = """\
usage: holdfast data ls|audit [JOB] ...

Says which records of its data sets a job has used, while it runs or after it has ended. Only the
committed history counts: steps that a fault threw away did not happen, and their records come again.

  ls       list the data sets: how they are shared, how much was used
  audit    prove that each record was used once: by epoch and by round; name all that were not

Try:
  holdfast data ls                      those of the newest job
  holdfast data audit llm               all data sets of the job llm
  holdfast data audit llm --set train --records

`holdfast data audit --help` tells more."""

ABOUT_AUDIT = """\
Proves which positions of each epoch the job has used, how often and in which round. A round counts up
to the step from which the next one went on. What is still to come is not missing.

Positions count along the order of an epoch. If that is shuffled, --records names the records at them.

exit codes:
  0  each record that was used was used once, and none was left out; of data sets that promise "at
     least once" (evaluation, prediction, exact=False), repeats are listed and are no fault
  1  records were used more than once, were never used although their turn is over, or were left out
     because their shards failed: each is named
  2  wrong usage

Try:
  holdfast data audit llm
  holdfast data audit llm --set train --records
"""


def main(argv: Sequence[str]) -> int:
    commands = {"ls": _ls, "audit": _audit}
    if not argv or argv[0] in ("-h", "--help"):
        print(ABOUT)
        return 0 if argv else 2
    if argv[0] not in commands:
        raise UsageError(f"no command {argv[0]!r}; see `holdfast data --help`")
    return commands[argv[0]](argv[1:])


def _parser(command: str, about: str) -> Parser:
    parser = Parser(prog=f"holdfast data {command}", description=about, raw=True)
    parser.add_argument("job", nargs="?", metavar="JOB", help="its name; the newest when left out")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def _ls(argv: Sequence[str]) -> int:
    arguments = _parser("ls", "List the data sets of a job.").parse_args(argv)
    viewed = look(arguments.job)
    accounts = viewed.data()
    if arguments.json:
        print_json(accounts)
    elif not accounts:
        print(_none(viewed.name))
    else:
        print_table(f"job {viewed.name}: {len(accounts)} data sets", LISTED, listed(accounts))
    return 0


def _audit(argv: Sequence[str]) -> int:
    parser = _parser("audit", ABOUT_AUDIT)
    parser.add_argument("--set", metavar="NAME", help="this data set only")
    parser.add_argument(
        "--records", action="store_true", help="name records, not only their positions"
    )
    arguments = parser.parse_args(argv)
    viewed = look(arguments.job)
    accounts = _chosen(viewed.name, viewed.data(), arguments.set)
    if arguments.json:
        print_json(accounts)
    elif not accounts:
        print(_none(viewed.name))
    else:
        for one in accounts:
            print("\n".join(audit(one, records_at if arguments.records else None)))
    return 0 if all(map(is_as_promised, accounts)) else 1


def _none(job: str) -> str:
    return f"job {job}: its script has opened no data set of holdfast.data"


def _chosen(job: str, accounts: list[DataAccount], name: str | None) -> list[DataAccount]:
    found = [one for one in accounts if name in (None, one.dataset)]
    if name is not None and not found:
        names = ", ".join(one.dataset for one in accounts) or "none"
        raise UsageError(f"job {job} has no data set {name!r}; it has: {names}")
    return found


def records_at(account: DataAccount, epoch: int, positions: range) -> Sequence[int]:
    """Return the records at positions of an epoch."""
    from holdfast.data.order import Order

    size = account.size or positions.stop
    return Order(size, account.order, account.seed, epoch, account.shard).records(positions)
