"""One of four ranks takes twice as long for its own work: what score, and is only it flagged?

Who is flagged is read from `holdfast status --json`, as a user would; since when, from the incident.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from harness.job import Job, JobError
from harness.lines import Line, count

from detection import jobs
from detection.jobs import LIMIT_S, NODES, RANKS, Setting

SLOW_RANK = 2
WINDOWS_S = 15.0
"""How long to go on after it was flagged, to see that nobody else is."""
STEPS_AT_MOST = 30


def measure(setting: Setting) -> list[Line]:
    return [*_measure(setting, "DDP", []), *_measure(setting, "FSDP", ["--sharded"])]


def _measure(setting: Setting, model: str, flags: list[str]) -> list[Line]:
    script = ["--step-ms=50", f"--slow-rank={SLOW_RANK}", "--slow=2", *flags]
    scores: list[float] = []
    steps: int | None = None
    others: set[int] = set()
    looks, flagged, why = 0, 0, ""
    try:
        with jobs.running(setting, jobs.launcher(NODES), RANKS, script) as job:
            job.wait_for_steps(LIMIT_S)
            until = time.monotonic() + LIMIT_S
            while time.monotonic() < until:
                ranks = _ranks(job)
                slow = {rank for rank, shown in ranks.items() if shown.get("straggler")}
                others |= slow - {SLOW_RANK}
                if SLOW_RANK in slow and steps is None:
                    steps = _flagged_at(job)
                    until = time.monotonic() + (3.0 if setting.quick else WINDOWS_S)
                if steps is not None:
                    looks += 1
                    flagged += SLOW_RANK in slow
                    scores.append(float(ranks[SLOW_RANK]["score"]))
    except JobError as failure:
        why = str(failure)
    score = sorted(scores)[len(scores) // 2] if scores else None
    seen = f"others flagged: {sorted(others) or 'none'}"
    return [
        Line(
            f"{model}: score of a rank at half speed", score, at_least=0.45, at_most=0.55, why=why
        ),
        Line(f"{model}: other ranks flagged", float(len(others)), at_most=0.0, seen=seen, why=why),
        count(f"{model}: looks at which it stayed flagged", flagged, max(1, looks)),
        Line(
            f"{model}: steps until it was flagged",
            None if steps is None else float(steps),
            at_most=float(STEPS_AT_MOST),
            why=why or ("" if steps is not None else "it never was"),
        ),
    ]


def _flagged_at(job: Job) -> int | None:
    """The step at which it became an incident."""
    now = jobs.state(job)
    incidents = now.incidents if now is not None else []
    return next((one.step for one in incidents if one.rank == SLOW_RANK), None)


def _ranks(job: Job) -> dict[int, dict[str, Any]]:
    """Each rank as `holdfast status` shows it."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "status", job.name, "--json"],
        env={"HOLDFAST_HOME": str(job.folder / "home"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode != 0:
        raise JobError(f"holdfast status: {done.stderr.strip()[-200:]}")
    nodes = json.loads(done.stdout)["nodes"]
    return {rank["rank"]: rank for node in nodes for rank in node["ranks"]}
