"""What it costs, on a short step, that a function can be left: by turns with kept state and without.

See `scripts/kept_by_turns.py`. The figure is the median of the ratios of neighbouring turns; what the
threads beside the training use is read from the kernel's account of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from harness.job import GLANCE_EVERY_S, Job, JobError
from harness.launchers import holdfast
from harness.lines import Line

from restarting.jobs import Setting

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "kept_by_turns.py"
RANKS = 2
TURNS = 400
LIMIT_S = 300.0
AT_MOST = 0.5


def measure(setting: Setting) -> list[Line]:
    what = "cost of a restartable function and kept state, of a 5 ms step"
    result = setting.folder / "kept_by_turns.json"
    script = [f"--turns={TURNS}", f"--result={result}"]
    job = Job("cost", holdfast(), RANKS, setting.folder / "cost", script, SCRIPT)
    try:
        with job:
            job.wait_for("the turns", result.exists, LIMIT_S, GLANCE_EVERY_S)
            found = json.loads(result.read_text())
    except JobError as failure:
        return [Line(what, None, "%", at_most=AT_MOST, why=str(failure))]
    ratios = [on / off for on, off in zip(found["kept"], found["not"], strict=True)]
    step = 100 * (median(ratios) - 1)
    threads = 100 * found["threads"]
    seen = (
        f"kept state {step:.3f} %, threads {threads:.3f} %; step {1000 * median(found['not']):.2f} ms,"
        f" {TURNS} turns of {found['steps']} steps"
    )
    return [Line(what, step + threads, "%", at_most=AT_MOST, seen=seen, samples=ratios)]
