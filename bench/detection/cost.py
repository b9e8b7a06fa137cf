"""What it costs to be watched: the same short steps with everything that watches, and without.

A script takes its own hooks away and puts them back, turn by turn (`scripts/byturns.py`), and the
figure is the median of the ratios of neighbours. To that comes the processor time of what runs beside
it: the thread that beats in each rank, and the agent's share for each.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from harness.job import GLANCE_EVERY_S, JobError
from harness.launchers import holdfast
from harness.lines import Line

from detection import jobs
from detection.jobs import Setting

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "byturns.py"
RANKS = 2
LIMIT_S = 300.0
AT_MOST = 1.0


def measure(setting: Setting) -> list[Line]:
    turns, what = (60 if setting.quick else 400), "cost of all detection, of a 5 ms step"
    result = setting.folder / "byturns.json"
    script = [str(turns), str(result)]
    try:
        with jobs.running(setting, holdfast(), RANKS, script, SCRIPT) as job:
            job.wait_for("the turns", result.exists, LIMIT_S, GLANCE_EVERY_S)
            found = json.loads(result.read_text())
    except JobError as failure:
        return [Line(what, None, "%", at_most=AT_MOST, why=str(failure))]
    ratios = [on / off for on, off in zip(found["watched"], found["not"], strict=True)]
    hooks, pulse = 100 * (median(ratios) - 1), 100 * found["pulse"]
    agent = 100 * found["agent"] / RANKS
    bare = 1000 * median(found["not"])
    seen = (
        f"hooks {hooks:.2f} %, the thread that beats {pulse:.2f} %, the agent {agent:.2f} %; step"
        f" {bare:.2f} ms, {turns} turns"
    )
    return [Line(what, hooks + pulse + agent, "%", at_most=AT_MOST, seen=seen, samples=ratios)]
