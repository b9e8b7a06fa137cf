"""Runs `holdfast trace`: a job as a file that Perfetto opens."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from holdfast.cli.view import Parser, print_json, read_journal, write_whole
from holdfast.errors import UsageError
from holdfast.jobhome import find
from holdfast.view.trace.drawing import write_trace

ABOUT = """\
Draw a job as a trace: what every rank did and when, by cause; each incident with the phases of its
repair and an arrow from the fault to the first step after it; saves; speed; the load of the nodes; and
the collectives in which the ranks of a hang waited. A running job is drawn until now.

  holdfast trace                     the newest job, into trace-NAME.json
  holdfast trace big-run -o t.json   that job, into that file
  holdfast trace -o t.json.gz        compressed: Perfetto opens that too
  holdfast trace -o -                to standard output

Open the file at https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing.
"""


def main(argv: Sequence[str]) -> int:
    parser = Parser("holdfast trace", ABOUT, raw=True)
    parser.add_argument("job", nargs="?", metavar="JOB", help="its name; the newest when left out")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write it; - is standard output"
    )
    parser.add_argument("--json", action="store_true", help="print JSON about the file")
    arguments = parser.parse_args(argv)
    home = find(arguments.job)
    name = arguments.output or f"trace-{home.name}.json"
    if name == "-" and arguments.json:
        raise UsageError("--json and -o - both want standard output; give a file")
    follower = read_journal(home)
    try:
        with _opened(name) as out:
            trace = write_trace(follower, out, home.incidents)
    finally:
        follower.close()
    if name == "-" or not Path(name).is_file():
        return 0  # A pipe has a reader who wants the trace and nothing else.
    size = Path(name).stat().st_size
    if arguments.json:
        about = {"job": home.name, "file": name, "size_bytes": size, "slices": trace.slices}
        print_json(about)
    else:
        print(f"{name}: {trace.slices} slices, {size / 1e6:.1f} MB; open it at ui.perfetto.dev")
    return 0


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        try:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UsageError(f"standard output cannot be written: {error.strerror}") from None
        return
    with write_whole(Path(name)) as file:
        if not name.endswith(".gz"):
            yield file
            return
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=5, filename="") as packed:
            yield cast(BinaryIO, packed)
