"""`holdfast coordinator` runs the coordinator of a job alone, apart from its nodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from holdfast import jobhome
from holdfast.cli.flags import add_flag, given_settings
from holdfast.cli.tlsflags import add_tls_flags
from holdfast.cli.view import Parser, tell_end
from holdfast.config.schema import Settings
from holdfast.config.settings import tls_files
from holdfast.config.values import endpoint, joined
from holdfast.coordinator.journal import replay
from holdfast.coordinator.main import run_coordinator
from holdfast.core.states import Ended
from holdfast.errors import JobHomeError, JournalError, UsageError
from holdfast.jobhome import JobHome
from holdfast.launch.machine import require_own
from holdfast.launch.orders import coordinator_orders
from holdfast.launch.site import Site, given_token, hosted, listen

ABOUT = """\
Run the coordinator of a job alone. Nodes join it with
  holdfast run --coordinator HOST:PORT --nnodes MIN:MAX ... SCRIPT
and the first node to join decides the job's terms, such as --nnodes. The token is in job.json in the
job's home; take it to other machines with HOLDFAST_TOKEN or --token-file.

Restarted after a crash with the same --job and --listen, the coordinator replays its journal; nodes
reconnect by themselves, and their workers never stop."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="holdfast coordinator", description=ABOUT, raw=True)
    add_flag(parser, Settings.job)
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default: loopback, any port"
    )
    add_flag(parser, Settings.token_file)
    add_tls_flags(parser)
    parser.add_argument("--json", action="store_true", help="print its address as JSON")
    parsed = parser.parse_args(argv)
    logging.basicConfig(format="[holdfast] %(message)s", level=logging.INFO)
    given = given_settings(parsed)
    tls = tls_files(given)
    if given.job is None:
        raise UsageError("the job has no name; give --job NAME")
    host, port = endpoint(parsed.listen, "--listen")
    require_own(host, f"--listen {parsed.listen}")
    token = given_token(given.token_file)
    listener = listen(host, port or 0)
    home = _home(given.job)
    if token is None and home.has_job_file():
        token = home.read_job_file().token
    site = hosted(home, listener, token)
    _tell_address(site, parsed.json)
    code = run_coordinator(coordinator_orders(site, tls, None, time.monotonic()))
    tell_end(home, quiet=False)
    return code


def _home(name: str) -> JobHome:
    """The job's home: the existing one if the job has not ended, else a new one."""
    home = jobhome.home_of(name)
    if home.alive():
        raise JobHomeError(f"job {name} is running already ({home.path})")
    if home.opened_id() and not home.journal.exists():
        raise JournalError(
            f"{home.journal} is gone, though the job was opened; put it back, or choose another --job"
        )
    before = replay(home.journal) if home.journal.exists() else None
    if before is None or isinstance(before.job.state, Ended):
        return jobhome.create(name, name)
    home = jobhome.share(name)
    home.lock()
    return home


def _tell_address(site: Site, as_json: bool) -> None:
    if as_json:
        line = f'{{"job": "{site.home.name}", "host": "{site.host}", "port": {site.port}}}'
    else:
        line = f"job {site.home.name}: the coordinator listens on {joined(site.host, site.port)}"
    print(line, flush=True)
