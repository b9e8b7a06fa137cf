"""`holdfast status`: where a job stands."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.view import look, print_json, print_table
from holdfast.core import report


def main(argv: Sequence[str]) -> int:
    about = "Where a job stands: state, round, step, speed, nodes and ranks, last incident."
    viewed, as_json = look("status", about, argv)
    status = report.status(viewed.job, viewed.now, viewed.alive)
    if as_json:
        print_json(status)
        return 0
    speed = "" if status["steps_per_s"] is None else f", {status['steps_per_s']:.1f} steps/s"
    title = (
        f"job {status['job']}: {status['state']}, round {status['round']},"
        f" {status['world_size']} ranks, step {status['step']}{speed}"
    )
    rows = [
        (node["node"], node["state"], str(rank["rank"]), str(rank["pid"]), str(rank["step"]))
        for node in status["nodes"]
        for rank in node["ranks"] or [{"rank": "-", "pid": "-", "step": "-"}]
    ]
    print_table(title, ("node", "state", "rank", "pid", "step"), rows)
    if status["last_incident"]:
        print(f"last incident: {status['last_incident']}")
    if status["reason"]:
        print(f"ended with {status['exit_code']}: {status['reason']}")
    return 0
