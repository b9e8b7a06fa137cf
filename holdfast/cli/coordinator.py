"""`holdfast coordinator`: the coordinator of a job alone, apart from its nodes."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence

from holdfast import jobhome
from holdfast.cli.tlsflags import add_tls_flags, tls_given
from holdfast.cli.view import Parser, tell_end
from holdfast.config.values import job_name
from holdfast.coordinator.journal import replay
from holdfast.coordinator.main import CoordinatorOrders, run_coordinator
from holdfast.core.states import Ended
from holdfast.errors import JobHomeError, UsageError
from holdfast.jobhome import JobHome
from holdfast.launch import process as launcher
from holdfast.wire.tls import TlsFiles

ABOUT = """\
Run the coordinator of a job alone. Nodes join it with
  holdfast run --coordinator HOST:PORT --nnodes MIN:MAX ... SCRIPT
and the first one says what kind of job it is. The token is in the job.json of the job's home; take
it to other machines with HOLDFAST_TOKEN or --token-file.

Started again after it died, with the same --job and --listen, it goes on where its journal ends;
nodes find it again by themselves, and their workers never stopped."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="holdfast coordinator", description=ABOUT, raw=True)
    parser.add_argument("--job", required=True, metavar="NAME", help="name of the job")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default: loopback, any port"
    )
    parser.add_argument("--token-file", metavar="FILE", help="default: a token is made")
    add_tls_flags(parser, "all three: TLS, both sides checked")
    parser.add_argument("--json", action="store_true", help="print where it listens as JSON")
    given = parser.parse_args(argv)
    logging.basicConfig(format="[holdfast] %(message)s", level=logging.INFO)
    tls = tls_given(given)
    host, _, port = given.listen.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--listen {given.listen}: HOST:PORT is needed")
    home = _home(job_name(given.job, "--job"))
    orders = _orders(home, host.strip("[]"), int(port), given.token_file, tls, given.json)
    code = run_coordinator(orders)
    tell_end(home, quiet=False)
    return code


def _home(name: str) -> JobHome:
    """The job's home: as it was left if the job is not over, else a fresh one."""
    home = jobhome.share(name)
    if home.alive():
        raise JobHomeError(f"job {name} is running already ({home.path})")
    before = replay(home.journal) if home.journal.exists() else None
    if before is None or isinstance(before.job.state, Ended):
        return jobhome.create(name, name)
    home.lock()
    return home


def _orders(
    home: JobHome, host: str, port: int, token_file: str | None, tls: TlsFiles | None, json: bool
) -> CoordinatorOrders:
    listener = launcher.listen(host, port)
    host, port = launcher.reachable(listener)
    token = launcher.given_token(token_file)
    if token is None and home.has_job_file():
        token = str(home.read_job_file()["token"])
    token = token or secrets.token_urlsafe(32)
    content = {"job": home.name, "host": host, "port": port, "token": token, "pid": os.getpid()}
    home.write_job_file(content)
    if json:
        print(f'{{"job": "{home.name}", "host": "{host}", "port": {port}}}', flush=True)
    else:
        print(f"job {home.name}: the coordinator listens on {host}:{port}", flush=True)
    return CoordinatorOrders(home, listener, token, tls, None, time.monotonic())
