"""Runs `holdfast report`: a job on one page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.cli.flags import add_flag, given_settings
from holdfast.cli.view import Parser, print_json, read_journal, write_whole
from holdfast.config.schema import Settings
from holdfast.errors import UsageError
from holdfast.jobhome import find
from holdfast.view.report.facts import JobReport, gather
from holdfast.view.report.html import html
from holdfast.view.report.markdown import markdown

ABOUT = """\
Put a job on one page: goodput, what every rank did, incidents, checkpoints, loss, speed and nodes, as
pictures. The file needs nothing else: mail it, attach it to a ticket, print it. A running job is told
until now.

  holdfast report                        the newest job, into report-NAME.html
  holdfast report big-run -o r.html      that job, into that file
  holdfast report -o r.md                Markdown, for a ticket or a chat
  holdfast report -o r.json              all of it as JSON, for programs
  holdfast report -o - --format md       to standard output
"""
FORMATS = ("html", "md", "json")


def main(argv: Sequence[str]) -> int:
    parser = Parser("holdfast report", ABOUT, raw=True)
    parser.add_argument("job", nargs="?", metavar="JOB", help="its name; the newest when left out")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write it; - is standard output"
    )
    parser.add_argument("--format", choices=FORMATS, help="by default what the file's name says")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    add_flag(parser, Settings.price_per_hour)
    arguments = parser.parse_args(argv)
    price = given_settings(arguments).price_per_hour
    home = find(arguments.job)
    name = arguments.output or f"report-{home.name}.{arguments.format or 'html'}"
    kind = arguments.format or _format(name)
    follower = read_journal(home)
    report = gather(follower, price)
    follower.close()
    if arguments.json:
        print_json(report)
        return 0
    content = _written(report, kind)
    if name == "-":
        sys.stdout.buffer.write(content)
        return 0
    with write_whole(Path(name)) as file:
        file.write(content)
    print(f"{name}: {len(content) / 1e3:.0f} kB")
    return 0


def _format(name: str) -> str:
    suffix = Path(name).suffix.lstrip(".")
    known = {"html": "html", "htm": "html", "md": "md", "markdown": "md", "json": "json"}
    if suffix not in known:
        raise UsageError(f"-o {name}: end the name in .html, .md or .json, or give --format")
    return known[suffix]


def _written(report: JobReport, kind: str) -> bytes:
    if kind == "json":
        return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    text = html(report) if kind == "html" else markdown(report)
    return text.encode(errors="replace")
