"""`holdfast check` runs the health checks of this node."""

from __future__ import annotations

import argparse
import os
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import msgspec

from holdfast.cli.view import Parser, print_json
from holdfast.config import values
from holdfast.config.sources import holdfast_home
from holdfast.errors import UsageError
from holdfast.health import baseline as baselines
from holdfast.health.catalogue import HealthCheck, chosen
from holdfast.health.checker import Checker, worst_verdict
from holdfast.health.settings import HealthSettings, settings_here
from holdfast.messages.health import HealthResult, Verdict
from holdfast.view.terminal import print_table

ABOUT = """\
Check this machine: processors, memory, disks, clock, GPUs, network, and what you add.

  pass      healthy
  fail      broken; the reason says what, and what can be done
  warn      works, but a person should look at it
  unknown   could not be checked

Ends with 1 if a check failed, else with 0. Each check has a deadline, so that a hung disk or
driver is reported as well.

examples:
  holdfast check                                 all checks
  holdfast check --path /data --path /ckpt       also these directories: space, write, read back
  holdfast check --only gpu,nic                  some checks, by name or kind; --list names them
  holdfast check --skip cpu-compute --json       all but one, as JSON
  holdfast check --baseline /var/tmp/node.json   changes since the last run: counters, links
  holdfast check --watch 30 --only gpu,nvlink    repeat every 30 seconds
  holdfast check --service unix:/run/node.sock   also ask a health service of the node
  holdfast check --check mychecks:fan            also run fan() of mychecks.py; an exception fails it

Installed packages can add checks by an entry point of the group "holdfast.checks"."""

COLOURS: dict[Verdict, str] = {"pass": "green", "fail": "red", "warn": "yellow", "unknown": "dim"}

INTERRUPTED = 130
"""Exit code after Ctrl-C before the first result."""


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    baseline = baselines.Baseline()
    if arguments.baseline is not None:
        baseline = baselines.load(arguments.baseline)
    watch_s = _positive(arguments.watch, "--watch")
    code = INTERRUPTED
    with _until_interrupted(), Checker(_settings(arguments), baseline) as checker:
        checks = _chosen(checker.checks, arguments)
        if arguments.list:
            _show_names(checks, arguments.json)
            return 0
        while True:
            results = checker.run([check.name for check in checks])
            code = 1 if worst_verdict(results) == "fail" else 0
            _show(results, arguments)
            if arguments.baseline is not None:
                baselines.save(checker.baseline, arguments.baseline)
            if watch_s is None or _reader_left(watch_s):
                break
    return code


def _reader_left(within_s: float) -> bool:
    """Wait; end early, with True, when the pipe or terminal for the results is closed."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # Errors and hang-ups are always reported.
    return bool(output.poll(min(within_s, 1e6) * 1000))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="holdfast check", description=ABOUT, raw=True)
    add = parser.add_argument
    add("--only", metavar="NAMES", action="append", default=[], help="these checks, as in a,b")
    add("--skip", metavar="NAMES", action="append", default=[], help="all but these checks")
    add("--path", metavar="DIR", action="append", default=[], help="directory that the job uses")
    add("--service", metavar="URL", help="http://HOST:PORT/PATH or unix:/SOCKET[:/PATH]")
    add(
        "--service-unreachable",
        choices=get_args(Verdict),
        default="unknown",
        help="verdict if the service does not answer; default: unknown",
    )
    add("--check", metavar="MODULE:FUNCTION", action="append", default=[], help="a check of yours")
    add("--topology", metavar="FILE", help="NCCL's XML file of which NIC is near which GPU")
    add("--baseline", metavar="FILE", type=Path, help="counters of the last run; is updated")
    add("--deadline", metavar="SECONDS", help="time limit of each check; default: its own")
    add("--watch", metavar="SECONDS", help="repeat, with this pause in between")
    add("--list", action="store_true", help="list the checks and run none")
    add(
        "--json",
        action="store_true",
        help="print JSON for programs; with --watch, one line per run",
    )
    return parser


def _settings(arguments: argparse.Namespace) -> HealthSettings:
    settings = settings_here(os.environ, home=str(holdfast_home()))
    if arguments.service is not None:
        from holdfast.health.service import service_address

        service_address(arguments.service)  # Raises UsageError for an invalid URL.
    for path in arguments.path:
        if not path.isprintable():
            raise UsageError(f"--path {path}: only paths in printable UTF-8 can be checked")
    for name in arguments.check:
        _refuse_if_missing(name)
    return msgspec.structs.replace(
        settings,
        # The file system is not touched here: it may hang.
        paths=tuple(map(os.path.abspath, arguments.path)),
        service=arguments.service,
        service_unreachable=arguments.service_unreachable,
        topology=arguments.topology or settings.topology,
        user_checks=tuple(arguments.check),
        import_path=(os.getcwd(),) if arguments.check else (),
        deadline_s=_positive(arguments.deadline, "--deadline"),
    )


def _positive(text: str | None, flag: str) -> float | None:
    return None if text is None else values.time_limit(text, flag)


def _refuse_if_missing(name: str) -> None:
    """Refuse a check of the user's whose module does not exist."""
    module, colon, function = name.partition(":")
    words = [*module.split("."), *function.split(".")]
    if not colon or not all(word.isidentifier() for word in words):
        raise UsageError(f"--check {name}: MODULE:FUNCTION is needed, as in mychecks:fan")
    top = words[0]
    if not (Path(f"{top}.py").exists() or Path(top).is_dir() or _installed(top)):
        raise UsageError(f"--check {name}: no module {top} here or in this Python")


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # Loaded without a spec, as __main__ is: it must not be loaded again.
        return False


def _chosen(checks: list[HealthCheck], arguments: argparse.Namespace) -> list[HealthCheck]:
    only = [word for text in arguments.only for word in values.comma_list(text, "--only")]
    skip = [word for text in arguments.skip for word in values.comma_list(text, "--skip")]
    wanted = chosen(checks, only) if arguments.only else checks
    unwanted = {check.name for check in chosen(checks, skip)}
    left = [check for check in wanted if check.name not in unwanted]
    if not left:
        raise UsageError("nothing is left to check; see `holdfast check --list`")
    return left


def _show_names(checks: list[HealthCheck], as_json: bool) -> None:
    if as_json:
        print_json([{"check": check.name, "about": check.about} for check in checks])
        return
    rows = [(_plain(check.name), check.about) for check in checks]
    print_table("checks", ("check", "what it checks"), rows)


def _show(results: list[HealthResult], arguments: argparse.Namespace) -> None:
    if arguments.json:
        _print_json(results, line=arguments.watch is not None)
    else:
        _print_table(results)


def _print_json(results: list[HealthResult], line: bool) -> None:
    content: dict[str, Any] = {
        "host": socket.gethostname(),
        "at": time.time(),
        "verdict": worst_verdict(results),
        "results": msgspec.to_builtins(results),
    }
    if line:
        print(msgspec.json.encode(content).decode(), flush=True)
    else:
        print_json(content)


def _print_table(results: list[HealthResult]) -> None:
    counts = Counter(result.verdict for result in results)
    told = ", ".join(f"{counts[v]} {v}" for v in ("fail", "warn", "unknown", "pass") if counts[v])
    rows = [
        (
            _plain(result.check),
            _coloured(result.verdict),
            f"{result.seconds:.3f}",
            _plain(result.reason),
        )
        for result in results
    ]
    title = f"node {socket.gethostname()}: {told}"
    print_table(title, ("check", "verdict", "seconds", "reason"), rows)
    sys.stdout.flush()


def _coloured(verdict: Verdict) -> str:
    colour = COLOURS[verdict]
    return f"[{colour}]{verdict}[/]" if sys.stdout.isatty() else verdict


def _plain(text: str) -> str:
    """Escape brackets, which a terminal's table would take for markup."""
    if not sys.stdout.isatty():
        return text
    from rich.markup import escape

    return escape(text)


@contextmanager
def _until_interrupted() -> Iterator[None]:
    """End quietly on Ctrl-C, which is how a user stops watching."""
    try:
        yield
    except KeyboardInterrupt:
        print(file=sys.stderr)
