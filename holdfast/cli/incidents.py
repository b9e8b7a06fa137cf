"""`holdfast incidents`: each fault of a job, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.view import look, print_json
from holdfast.core import report


def main(argv: Sequence[str]) -> int:
    about = "Each fault of a job: what, where, what was done about it, seconds lost by phase."
    viewed, as_json = look("incidents", about, argv)
    if as_json:
        print_json(report.incidents(viewed.job))
        return 0
    if not viewed.job.incidents:
        print(f"job {viewed.job.name}: no incidents")
    for incident in viewed.job.incidents:
        print(f"{incident.id}. {report.incident_line(viewed.job, incident)}")
        for line in [*incident.also, *incident.detail.rstrip().splitlines()[-12:]]:
            print(f"     {line}")
    return 0
