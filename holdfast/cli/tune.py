"""Runs `holdfast tune`: change the settings of a running job's data loaders, or show them."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence

from holdfast.cli.tlsflags import add_tls_flags, tls_given
from holdfast.cli.view import Parser, look, print_json
from holdfast.config.values import whole_number
from holdfast.errors import JobError, UsageError
from holdfast.jobhome import find
from holdfast.messages.tuning import (
    MOST_MICRO_BATCH,
    MOST_PREFETCH,
    MOST_WORKERS,
    LoaderConfig,
    TuningReport,
)
from holdfast.messages.wire import AskTune, TuneTaken
from holdfast.view.terminal import tuning_lines
from holdfast.wire.visitors import ask

ABOUT = """\
Change the settings of a running job's data loaders. All ranks change at the same step, a few seconds
ahead, or none does; each record is still used exactly once. The settings hold until the job ends,
also after a restart. Without settings, show those in force and the latest changes."""

EPILOG = """\
A loader with a global_batch works on the same records in a step whatever the micro-batch is, so results
stay the same. Without one, another micro-batch is another batch: mind the learning rate.

--auto doubles the micro-batch while steps get faster and memory suffices, and keeps the best one. If
memory does run out, the job restarts by itself with the micro-batch before.

examples:
  holdfast tune llm                                   what is in force, and since which step
  holdfast tune llm --micro-batch 64
  holdfast tune llm --data train --workers 4 --prefetch 8
  holdfast tune llm --auto"""


def main(argv: Sequence[str]) -> int:
    given = _parser().parse_args(argv)
    config = LoaderConfig(
        micro_batch=_number(given.micro_batch, "--micro-batch", 1, MOST_MICRO_BATCH),
        workers=_number(given.workers, "--workers", 0, MOST_WORKERS),
        prefetch=_number(given.prefetch, "--prefetch", 1, MOST_PREFETCH),
    )
    if not config and not given.auto:
        return _show(given.job, given.data, given.json)
    if given.auto and config.micro_batch is not None:
        raise UsageError("--auto searches for a micro-batch; leave --micro-batch out")
    question = AskTune(dataset=given.data, config=config, auto=given.auto, by=_who())
    taken = ask(find(given.job), question, TuneTaken, tls_given(given))
    if given.json:
        print_json(taken)
    else:
        print(taken.line)
    return 1 if taken.change is not None and taken.change.outcome != "applied" else 0


def _show(job: str, data: str, json: bool) -> int:
    known: list[TuningReport] = look(job).status().tuning
    found = [one for one in known if not data or one.dataset == data]
    if not found:
        named = f" for the data set {data}" if data else ""
        others = f"; it has {', '.join(one.dataset for one in known)}" if known else ""
        raise JobError(f"job {job} has no loader{named} that can be tuned{others}")
    if json:
        print_json(found)
    else:
        print("\n".join(line for one in found for line in tuning_lines(one)))
    return 0


def _number(text: str | None, flag: str, least: int, most: int) -> int | None:
    if text is None:
        return None
    number = whole_number(text, flag)
    if not least <= number <= most:
        raise UsageError(f"{flag} {text}: a whole number from {least} to {most} is needed")
    return number


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # No name for this user id, as in many containers.
        return f"a user on {socket.gethostname()}"


def _parser() -> Parser:
    parser = Parser(prog="holdfast tune", description=ABOUT, raw=True)
    parser.epilog = EPILOG
    parser.add_argument("job", metavar="JOB", help="its name")
    parser.add_argument(
        "--micro-batch", metavar="N", help="most records that a rank works on at a time"
    )
    parser.add_argument("--workers", metavar="N", help="loader processes of a rank; 0 for none")
    parser.add_argument(
        "--prefetch", metavar="N", help="batches that each loader process reads ahead"
    )
    parser.add_argument("--auto", action="store_true", help="search for the fastest micro-batch")
    parser.add_argument("--data", default="", metavar="NAME", help="data set, if there are several")
    add_tls_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser
