"""`holdfast check`: is this node fit to train?"""

from __future__ import annotations

import argparse
import os
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

from holdfast.cli.view import Parser, print_json, print_table
from holdfast.config import settings as config
from holdfast.config import values
from holdfast.errors import UsageError
from holdfast.health import baseline as baselines
from holdfast.health.catalogue import HealthCheck, chosen
from holdfast.health.checker import Checker, worst_verdict
from holdfast.health.settings import HealthSettings, settings_here
from holdfast.messages.health import HealthResult, Verdict

ABOUT = """\
Look at this machine: processors, memory, disks, clock, GPUs, network, and what you add.

  pass      looked at, and good
  fail      looked at, and bad: the reason says what, and what can be done
  warn      works, but a person should look
  unknown   could not be looked at; neither good nor bad

Ends with 1 if anything failed, else with 0. Each check has a deadline, so that a disk or
a driver that hangs is an answer too.

examples:
  holdfast check                                 all checks
  holdfast check --path /data --path /ckpt       also these directories: room, write, read back
  holdfast check --only gpu,nic                  some checks, by name or kind; --list names them
  holdfast check --skip cpu-compute --json       all but one, for a program
  holdfast check --baseline /var/tmp/node.json   what changed since the last time: counters, links
  holdfast check --watch 30 --only gpu,nvlink    again every 30 seconds
  holdfast check --service unix:/run/node.sock   ask a health service of the node
  holdfast check --check mychecks:fan            run fan() of mychecks.py; raising fails it

Installed packages can offer checks by an entry point of the group "holdfast.checks"."""

COLOURS: dict[Verdict, str] = {"pass": "green", "fail": "red", "warn": "yellow", "unknown": "dim"}

INTERRUPTED = 130
"""Ended by Ctrl-C before anything could be said."""


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    baseline = baselines.Baseline()
    if arguments.baseline is not None:
        baseline = baselines.load(arguments.baseline)
    watch_s = _positive(arguments.watch, "--watch")
    code = INTERRUPTED
    with _ended_by_hand(), Checker(_settings(arguments), baseline) as checker:
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
            if watch_s is None:
                break
            time.sleep(watch_s)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="holdfast check", description=ABOUT, raw=True)
    add = parser.add_argument
    add("--only", metavar="NAMES", action="append", default=[], help="these checks, with commas")
    add("--skip", metavar="NAMES", action="append", default=[], help="not these checks")
    add("--path", metavar="DIR", action="append", default=[], help="a directory the job uses")
    add("--service", metavar="URL", help="http://HOST:PORT/PATH or unix:/SOCKET[:/PATH]")
    add(
        "--service-unreachable",
        choices=get_args(Verdict),
        default="unknown",
        help="the verdict if it does not answer (unknown)",
    )
    add("--check", metavar="MODULE:FUNCTION", action="append", default=[], help="your own check")
    add("--topology", metavar="FILE", help="NCCL's XML: which NIC is near which GPU")
    add("--baseline", metavar="FILE", type=Path, help="what was seen before; read, then written")
    add("--deadline", metavar="SECONDS", help="for each check (as each has it)")
    add("--watch", metavar="SECONDS", help="look again and again, that long apart")
    add("--list", action="store_true", help="name the checks and run none")
    add("--json", action="store_true", help="print JSON for programs; with --watch a line each")
    return parser


def _settings(arguments: argparse.Namespace) -> HealthSettings:
    settings = settings_here(os.environ, home=str(config.home()))
    if arguments.service is not None:
        from holdfast.health.service import service_address

        service_address(arguments.service)  # Refuses what is not a URL.
    for path in arguments.path:
        if not path.isprintable():
            raise UsageError(f"--path {path}: only paths in printable UTF-8 can be checked")
    for name in arguments.check:
        _refuse_if_missing(name)
    return msgspec.structs.replace(
        settings,
        # Nothing of a path is touched here: it may hang.
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
    """A check that was asked for by hand and is not there is a slip of the hand."""
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
    except ValueError:  # Loaded without a spec, as __main__ is: not to be loaded again elsewhere.
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
    print_table("checks", ("check", "looks at"), rows)


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
    """A terminal's table takes brackets for markup; a reason means them as they are."""
    if not sys.stdout.isatty():
        return text
    from rich.markup import escape

    return escape(text)


@contextmanager
def _ended_by_hand() -> Iterator[None]:
    """Ctrl-C is how one ends watching, and no failure worth a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print(file=sys.stderr)
