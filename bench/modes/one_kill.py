"""One rank is killed once: how long until every rank has finished a step again?

Each try is a job of its own: start, train for a while, SIGKILL one rank, wait until all ranks have
stepped in new lives, let the job finish. A launcher that does not get there within the limit, or
gives up, has not come back; that is a result and not an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.job import Job, JobError
from harness.launchers import Launcher
from harness.marks import Seconds
from harness.report import Report, median_of, number, ratio
from harness.setting import Setting, say

MEASURES = ("start_s", "recovery_s", "total_s")


@dataclass
class Try:
    launcher: str
    turn: int
    rank: int
    start_s: Seconds | None = None
    recovery_s: Seconds | None = None
    total_s: Seconds | None = None
    killed: bool = False
    back: bool = False
    note: str = ""


def run(setting: Setting) -> Report:
    tries = [_try(setting, launcher, turn) for turn, launcher in setting.interleaved()]
    summary = {launcher.name: _summary(tries, launcher.name) for launcher in setting.launchers}
    ours = summary.get("holdfast", {})
    for line in summary.values():
        line |= {f"holdfast/{key}": ratio(ours.get(key), line[key]) for key in MEASURES}
    columns = [
        "launcher",
        "start s",
        "recovery s",
        "min",
        "max",
        "came back",
        "finished",
        "total s",
    ]
    columns += ["hf/start", "hf/recovery", "hf/total"]
    rows = [_row(name, line) for name, line in summary.items()]
    notes = [
        "medians; hf/ is holdfast's median over this launcher's, from this run",
        *_verdicts(summary),
    ]
    return Report("one-kill", columns, rows, notes, [asdict(one) for one in tries], summary)


def _try(setting: Setting, launcher: Launcher, turn: int) -> Try:
    result = Try(launcher.name, turn, rank=(turn + 1) % setting.ranks)
    try:
        with setting.job(launcher) as job:
            _measure(job, setting, result)
    except JobError as failure:
        result.note = str(failure)
    start, recovery, total = (number(getattr(result, key), unit=" s") for key in MEASURES)
    outcome = f"start {start}, recovery {recovery}, total {total} {result.note}".rstrip()
    say(f"try {turn + 1} of {setting.tries}, {launcher.name}: {outcome}")
    return result


def _measure(job: Job, setting: Setting, result: Try) -> None:
    """Fill in the result as far as the job gets."""
    first = job.wait_for_steps(setting.limit)
    result.start_s = first - job.spawned_at
    job.train_until(first + setting.settle)
    killed = job.kill(result.rank)
    if killed is None:
        raise JobError(f"rank {result.rank} was gone before it could be killed")
    result.killed = True
    result.recovery_s = job.wait_for_steps(setting.limit, after=killed) - killed
    result.back = True
    result.total_s = job.finish(setting.limit)


def _summary(tries: Sequence[Try], name: str) -> dict[str, Any]:
    mine = [one for one in tries if one.launcher == name]
    recoveries = [one.recovery_s for one in mine if one.recovery_s is not None]
    return {
        "tries": len(mine),
        "killed": sum(one.killed for one in mine),
        "came_back": sum(one.back for one in mine),
        "finished": sum(one.total_s is not None for one in mine),
        **{key: median_of([getattr(one, key) for one in mine]) for key in MEASURES},
        "recovery_min_s": min(recoveries, default=None),
        "recovery_max_s": max(recoveries, default=None),
    }


def _row(name: str, line: dict[str, Any]) -> list[str]:
    return [
        name,
        number(line["start_s"]),
        number(line["recovery_s"], 3),
        number(line["recovery_min_s"], 3),
        number(line["recovery_max_s"], 3),
        f"{line['came_back']} of {line['killed']}",
        f"{line['finished']} of {line['tries']}",
        number(line["total_s"]),
        *(number(line[f"holdfast/{key}"], 3) for key in MEASURES),
    ]


def _verdicts(summary: dict[str, dict[str, Any]]) -> list[str]:
    """Holdfast against the fastest of the others, in start and in recovery."""
    ours = summary.get("holdfast")
    lines = []
    for key, what in (("start_s", "start"), ("recovery_s", "recovery")):
        others = {
            name: line[key] for name, line in summary.items() if name != "holdfast" and line[key]
        }
        if ours and ours[key] and others:
            best = min(others, key=lambda name: others[name])
            share = ours[key] / others[best]
            lines.append(
                f"{what}: {share:.3f} of the fastest other ({best}), {1 / share:.1f} x as fast"
            )
    return lines
