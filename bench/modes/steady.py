"""Nothing is killed: what does it cost to be watched?

The same script on a short step without any idle time, once as bare processes and once under each
launcher, alternating, many short runs. Within a run the median step counts, because the machine
interrupts now and then; across runs the median run, because it has slow minutes. Steps before
`--settle` are left out: a launcher may still be busy with itself there.

Wall time is what matters but not what a machine with other work can tell to the percent. So there
is also the processor time used *beside* the ranks, by launcher, agent and standbys, as a share of
one core: it is the launcher's alone, whoever else is there.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from harness import processes
from harness.job import GLANCE_EVERY_S, Job, JobError
from harness.launchers import Launcher
from harness.marks import Seconds
from harness.report import Report, median_of, number, ratio
from harness.setting import Setting, say

BARE = "plain"
SCALED = {"step_s": 1000, "beside": 100}


@dataclass
class Run:
    launcher: str
    turn: int
    step_s: Seconds | None = None
    beside: float | None = None
    steps: int = 0
    note: str = ""


def run(setting: Setting, steps: int) -> Report:
    runs = [_run(setting, launcher, turn, steps) for turn, launcher in setting.interleaved()]
    summary = {launcher.name: _summary(runs, launcher.name) for launcher in setting.launchers}
    columns = ["launcher", "runs", "step ms", "step/plain", "paired/plain", "beside"]
    rows = [_row(name, line) for name, line in summary.items()]
    notes = [
        "medians over runs; paired: of the ratios of runs next to each other",
        "beside: processor time of everything but the ranks, as a share of one core",
    ]
    return Report("steady", columns, rows, notes, [asdict(one) for one in runs], summary)


def _run(setting: Setting, launcher: Launcher, turn: int, steps: int) -> Run:
    result = Run(launcher.name, turn)
    try:
        with setting.job(launcher) as job:
            begin = job.wait_for_steps(setting.limit) + setting.settle
            job.train_until(begin)
            used, since = _beside_s(job), time.monotonic()
            intervals = _intervals(job, begin, steps, setting.limit)
            result.step_s, result.steps = median(intervals), len(intervals)
            result.beside = (_beside_s(job) - used) / (time.monotonic() - since)
    except JobError as failure:
        result.note = str(failure)
    took = "-" if result.step_s is None else f"{result.step_s * 1000:.3f} ms"
    outcome = f"{took} a step {result.note}".rstrip()
    say(f"run {turn + 1} of {setting.tries}, {launcher.name}: {outcome}")
    return result


def _intervals(job: Job, begin: Seconds, steps: int, limit: Seconds) -> list[Seconds]:
    """The time so many steps of rank 0 took, from a moment on."""

    def times() -> list[Seconds]:
        life = job.marks.newest(0)
        return [at for at in life.times if at >= begin] if life else []

    job.wait_for(f"{steps} steps", lambda: len(times()) > steps, limit, GLANCE_EVERY_S)
    return [later - earlier for earlier, later in pairwise(times()[: steps + 1])]


def _beside_s(job: Job) -> Seconds:
    """Processor time so far of every living process of the job that is not a rank."""
    ranks = {life.pid for life in job.marks.lives}
    return sum(one.cpu_s for one in processes.descendants() if one.pid not in ranks)


def _summary(runs: list[Run], name: str) -> dict[str, Any]:
    bare = [one for one in runs if one.launcher == BARE]
    mine = [one for one in runs if one.launcher == name]
    pairs = [ratio(ours.step_s, theirs.step_s) for ours, theirs in zip(mine, bare, strict=True)]
    step_s = median_of([one.step_s for one in mine])
    return {
        "runs": sum(one.step_s is not None for one in mine),
        "step_s": step_s,
        "step/plain": ratio(step_s, median_of([one.step_s for one in bare])),
        "paired/plain": median_of(pairs),
        "beside": median_of([one.beside for one in mine]),
    }


def _row(name: str, line: dict[str, Any]) -> list[str]:
    step_ms, beside = (line[key] and line[key] * factor for key, factor in SCALED.items())
    ratios = [number(line[key], 4) for key in ("step/plain", "paired/plain")]
    return [name, str(line["runs"]), number(step_ms, 3), *ratios, number(beside, 2, " %")]
