"""`holdfast coordinator` runs the coordinator of a job alone, apart from its nodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast import jobhome
from holdfast.cli.flags import add_flag, given_settings
from holdfast.cli.tlsflags import add_tls_flags
from holdfast.cli.view import Parser, tell_end
from holdfast.config.schema import Settings
from holdfast.config.settings import job_terms, tls_files
from holdfast.config.values import endpoint, joined, whole_number
from holdfast.coordinator.journal import replay
from holdfast.coordinator.main import run_coordinator
from holdfast.core import report
from holdfast.core.replay import JobSnapshot
from holdfast.core.states import Ended
from holdfast.errors import JobHomeError, JournalError, UsageError
from holdfast.jobhome import JobHome
from holdfast.launch.apart import host_coordinator
from holdfast.launch.machine import check_commands, require_own
from holdfast.launch.orders import coordinator_orders
from holdfast.launch.site import Site, given_token, hosted, listen
from holdfast.messages.endnote import EndNote
from holdfast.messages.exits import EXIT_FAILED, EXIT_TRY_AGAIN

SHOWN_CHARS = 800

ABOUT = """\
Run the coordinator of a job alone. Nodes join it with
  holdfast run --coordinator HOST:PORT --nnodes MIN:MAX ... SCRIPT
and the first node to join decides the job's terms, such as --nnodes; unless --nnodes is given here, by
flag or variable: then the terms are those of this process, with all its HOLDFAST_* variables. The token
is in job.json in the job's home; take it to other machines with HOLDFAST_TOKEN or --token-file.

Restarted after a crash with the same --job and --listen, the coordinator replays its journal; nodes
reconnect by themselves, and their workers never stop."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="holdfast coordinator", description=ABOUT, raw=True)
    add_flag(parser, Settings.job)
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default: loopback, any port"
    )
    add_flag(parser, Settings.nnodes)
    add_flag(parser, Settings.token_file)
    add_flag(parser, Settings.notify)
    add_tls_flags(parser)
    parser.add_argument(
        "--end-file",
        metavar="FILE",
        help="write there how the job ended, as JSON, and end with 0; a job that has ended already"
        " is not begun anew, and its end is written again",
    )
    parser.add_argument(
        "--requeues",
        metavar="N",
        default="0",
        help="how often the job was started again after it had to stop (75): one whose journal"
        " knows of fewer goes on",
    )
    parser.add_argument("--json", action="store_true", help="print its address as JSON")
    parsed = parser.parse_args(argv)
    logging.basicConfig(format="[holdfast] %(message)s", level=logging.INFO)
    given = given_settings(parsed)
    tls = tls_files(given)
    if given.job is None:
        raise UsageError("the job has no name; give --job NAME")
    terms = job_terms(given) if Settings.nnodes.name in given.said else None
    host, port = endpoint(parsed.listen, "--listen")
    require_own(host, f"--listen {parsed.listen}")
    check_commands(given.notify)
    token = given_token(given.token_file)
    before = _before(given.job)
    goes_on = _goes_on(before, whole_number(parsed.requeues, "--requeues"))
    if parsed.end_file and not goes_on and _is_over(before):
        return _write_end(parsed.end_file, before)
    listener = listen(host, port or 0)
    home = _home(given.job, before, goes_on)
    if token is None and home.has_job_file():
        token = home.read_job_file().token
    site = hosted(home, listener, token)
    _tell_address(site, parsed.json)
    since = time.monotonic()

    def run(first: bool) -> int:
        return run_coordinator(
            coordinator_orders(site, tls, terms, since, requeued=goes_on and first)
        )

    code = host_coordinator(home, run, given.notify) if given.notify else run(True)
    tell_end(home, quiet=False)
    return _write_end(parsed.end_file, replay(home.journal)) if parsed.end_file else code


def _before(name: str) -> JobSnapshot | None:
    """The job of this name as its journal has it; None if there is none. It must not run."""
    home = jobhome.home_of(name)
    if home.alive():
        raise JobHomeError(f"job {name} is running already ({home.path})")
    if home.opened_id() and not home.journal.exists():
        raise JournalError(
            f"{home.journal} is gone, though the job was opened; put it back, or choose another --job"
        )
    return replay(home.journal) if home.journal.exists() else None


def _is_over(before: JobSnapshot | None) -> bool:
    return before is not None and isinstance(before.job.state, Ended)


def _goes_on(before: JobSnapshot | None, requeues: int) -> bool:
    """Whether a job that had to stop goes on; one that goes on already is only restarted."""
    if before is None or before.job.requeues >= requeues or not _is_over(before):
        return False
    return before.job.result is not None and before.job.result.code == EXIT_TRY_AGAIN


def _home(name: str, before: JobSnapshot | None, goes_on: bool) -> JobHome:
    """The job's home: the existing one if the job has not ended or goes on, else a new one."""
    if before is None or (_is_over(before) and not goes_on):
        return jobhome.create(name, name)
    return jobhome.reopen(name)


def _write_end(path: str, end: JobSnapshot | None) -> int:
    """Write how the job ended, in place: the file may be a mount. 0, or 1 if it has not ended."""
    if end is None or end.job.result is None:
        return EXIT_FAILED
    job, result = end.job, end.job.result
    incident = report.status(job, end.at, alive=False).last_incident
    note = EndNote(
        job=job.name,
        code=result.code,
        reason=shortened(result.reason),
        round=job.membership.round,
        step=job.highest,
        goodput=report.goodput(job, end.at).goodput,
        requeues=job.requeues,
        last_incident=shortened(incident or ""),
    )
    try:
        Path(path).write_bytes(msgspec.json.encode(note))
    except OSError as error:
        raise UsageError(f"--end-file {path}: {error.strerror}; name another file") from None
    return 0


def shortened(text: str) -> str:
    """A text that leaves room for others: Kubernetes keeps 4,096 bytes."""
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


def _tell_address(site: Site, as_json: bool) -> None:
    if as_json:
        line = f'{{"job": "{site.home.name}", "host": "{site.host}", "port": {site.port}}}'
    else:
        line = f"job {site.home.name}: the coordinator listens on {joined(site.host, site.port)}"
    print(line, flush=True)
