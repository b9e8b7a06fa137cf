"""`holdfast status`: where a job stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        (node["node"], node["state"], *_rank(rank))
        for node in status["nodes"]
        for rank in node["ranks"] or [None]
    ]
    print_table(title, ("node", "state", "rank", "pid", "step", "speed"), rows)
    for one in status["checkpoints"]:
        print(_checkpoint(one))
    for host, why in status["excluded"].items():
        print(f"excluded: host {host}: {why}")
    for fault in status["faults"]["pending"]:
        print(f"fault to come: {fault['line']}")
    if status["last_incident"]:
        print(f"last incident: {status['last_incident']}")
    if status["reason"]:
        print(f"ended with {status['exit_code']}: {status['reason']}")
    return 0


def _rank(rank: dict[str, Any] | None) -> tuple[str, ...]:
    """Its speed is that beside the best rank, and in words if it is a straggler; beside its own best
    if there is no other rank, or if that is why it is one."""
    if rank is None:
        return ("-", "-", "-", "-")
    score, own = rank["score"], rank["own_score"]
    if score is None or rank["straggler"] == "individual":
        speed = "-" if own is None else f"{own:.2f} of its best"
    else:
        speed = f"{score:.2f}"
    slow = ", slow" if rank["straggler"] else ""
    return (str(rank["rank"]), str(rank["pid"]), str(rank["step"]), f"{speed}{slow}")


def _checkpoint(one: dict[str, Any]) -> str:
    where = [
        f"step {one[key]} {words}"
        for key, words in (
            ("in_memory", "in memory"),
            ("on_storage", "on storage"),
            ("writing", "being written"),
        )
        if one[key] is not None
    ]
    if one["failures"]:
        where.append(f"{one['failures']} failed in a row")
    return f"checkpoints of {one['checkpointer']}: {', '.join(where) or 'none yet'}"
