"""Runs `holdfast incidents`: each fault of a job, what it cost, and how it was repaired."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.view import Parser, find_story, look, print_json
from holdfast.errors import UsageError
from holdfast.view.terminal import print_incidents, print_story

ABOUT = """\
Each fault of a job: what, where, what was done about it, seconds lost by phase.

  holdfast incidents                 those of the newest job
  holdfast incidents big-run         those of that job
  holdfast incidents big-run 3       its third
  holdfast incidents 3 --story       each event and action from the third fault of the newest job to
                                     the first step after it, with what each follows from
"""


def main(argv: Sequence[str]) -> int:
    parser = Parser("holdfast incidents", ABOUT, raw=True)
    parser.add_argument("words", nargs="*", metavar="[JOB] [N]", help="job, and number of incident")
    parser.add_argument("--story", action="store_true", help="print the chain of causes")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    arguments = parser.parse_intermixed_args(argv)
    job, number = _understood(arguments.words)
    if arguments.story:
        if number is None:
            raise UsageError(
                "--story wants the number of an incident: `holdfast incidents 1 --story`"
            )
        incident, steps = find_story(job, number)
        if arguments.json:
            print_json(steps)
        else:
            print_story(incident, steps)
        return 0
    viewed = look(job)
    incidents = viewed.incidents()
    if number is not None:
        incidents = [viewed.incident(number)]
    if arguments.json:
        print_json(incidents)
    else:
        print_incidents(viewed.name, incidents)
    return 0


def _understood(words: Sequence[str]) -> tuple[str | None, int | None]:
    """Tell the job from the number of an incident; the last word is one if it is a number."""
    if len(words) > 2 or (len(words) == 2 and not words[1].isdigit()):
        raise UsageError(f"a job and a number are expected, not {' '.join(words)!r}")
    number = int(words[-1]) if words and words[-1].isdigit() else None
    named = words[:-1] if number is not None else words
    return (named[0] if named else None), number
