"""Runs `holdfast web`: a page that shows jobs while they run and afterwards."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from holdfast.cli.flags import add_flag, given_settings
from holdfast.cli.tlsflags import add_tls_flags
from holdfast.cli.view import Parser
from holdfast.config.schema import Settings
from holdfast.config.settings import tls_files
from holdfast.config.sources import holdfast_home
from holdfast.config.values import address, endpoint
from holdfast.errors import UsageError
from holdfast.jobhome import find
from holdfast.launch.site import given_token
from holdfast.wire.tls import TlsFiles
from holdfast.wire.visitors import Coordinates

ABOUT = """\
Show a job, or all jobs of this machine, in a browser: what every rank does and did, goodput, incidents
with their stories and stacks, checkpoints, nodes. The page follows the journals by itself: the job does
not notice it, and goes on if it is killed.
The printed link logs a browser in; the second one is for looking alone, and can be shared. Both stay
good after a restart, until --new-tokens ends them."""

EPILOG = """\
examples:
  holdfast web                      a list of all jobs of this machine
  holdfast web llm                  one job
  holdfast web llm --allow-actions  with buttons: stop, save, exclude a node, scale, inject a fault
  ssh -L 8800:127.0.0.1:8800 cluster holdfast web --listen 127.0.0.1:8800
                                    in the browser of another machine, through ssh
  holdfast web --coordinator node7:29400 --token-file t
                                    a job whose home is on another machine"""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="holdfast web", description=ABOUT, raw=True)
    parser.epilog = EPILOG
    add = parser.add_argument
    add("job", nargs="?", metavar="JOB", help="its name; a list of all jobs when left out")
    add(
        "--listen",
        default="127.0.0.1",
        metavar="HOST:PORT",
        help="127.0.0.1 and a port that stays the same after a restart if it is free; port 0: any",
    )
    add("--new-tokens", action="store_true", help="end all links and logins of earlier runs")
    add(
        "--host-name",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which browsers reach this server; requests for other names are refused",
    )
    add("--allow-actions", action="store_true", help="let the first link act, not only look")
    add("--coordinator", metavar="HOST:PORT", help="follow a job on another machine")
    add_flag(parser, Settings.price_per_hour)
    add_flag(parser, Settings.token_file)
    add_tls_flags(parser)
    given = parser.parse_args(argv)
    for module in ("starlette", "uvicorn"):
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"{module} is missing: pip install 'holdfast[web]'")
    from holdfast.view.web.server import WebSettings, serve

    host, port = endpoint(given.listen, "--listen")
    said = given_settings(given)
    tls = tls_files(said)
    away = None
    if given.coordinator is not None:
        away = _coordinates(given.coordinator, said.token_file, given.job, tls)
    settings = WebSettings(
        home=holdfast_home(),
        host=host,
        port=port,
        new_tokens=given.new_tokens,
        names=given.host_name,
        may_act=given.allow_actions,
        price=said.price_per_hour,
        job=None if given.job is None or away is not None else find(given.job).name,
        coordinator=away,
        tls=tls,
    )
    serve(settings, lambda line: print(line, flush=True))
    return 0


def _coordinates(
    coordinator: str, token_file: str | None, job: str | None, tls: TlsFiles | None
) -> Coordinates:
    token = given_token(token_file)
    if token is None:
        raise UsageError("--coordinator: the job's token is needed; give --token-file FILE")
    return Coordinates(job or coordinator, *address(coordinator, "--coordinator"), token, tls)
