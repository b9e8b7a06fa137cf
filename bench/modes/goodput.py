"""Ranks die again and again for a fixed time: how much of the work still gets done?

Two jobs of the same length under the same launcher, one undisturbed and one with a rank killed at
fixed moments, whatever state the job is in by then: faults do not wait for a recovery to be over.
The script saves its own checkpoint now and then and resumes from it, so steps that were lost and
done again count once. The window opens when all ranks have finished their first step; starting is
measured elsewhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from harness.job import Job, JobError
from harness.launchers import Launcher
from harness.marks import Seconds
from harness.report import Report, median_of, number, ratio
from harness.setting import Setting, checkpoint_every, say

CHECKPOINT_EVERY_STEPS = 10


@dataclass
class Window:
    launcher: str
    turn: int
    disturbed: bool
    steps_per_s: float = 0.0
    kills: int = 0
    missed: int = 0
    """Moments at which the rank to be killed was not alive anyway."""
    note: str = ""


def run(setting: Setting, every: Seconds, length: Seconds) -> Report:
    windows = [
        _window(setting, launcher, turn, every if disturbed else None, length)
        for turn, launcher in setting.interleaved()
        for disturbed in (False, True)
    ]
    summary = {launcher.name: _summary(windows, launcher.name) for launcher in setting.launchers}
    ours = summary.get("holdfast", {}).get("goodput")
    for line in summary.values():
        line["holdfast/goodput"] = ratio(ours, line["goodput"])
    columns = [
        "launcher",
        "kills",
        "missed",
        "calm steps/s",
        "killed steps/s",
        "goodput",
        "hf/goodput",
    ]
    rows = [_row(name, line) for name, line in summary.items()]
    notes = [
        f"a kill every {every:g} s for {length:g} s after the first step; goodput is killed / calm",
        "missed: the rank was still dead when its next kill was due",
    ]
    return Report("goodput", columns, rows, notes, [asdict(one) for one in windows], summary)


def _window(
    setting: Setting, launcher: Launcher, turn: int, every: Seconds | None, length: Seconds
) -> Window:
    result = Window(launcher.name, turn, disturbed=every is not None)
    try:
        with setting.job(launcher, checkpoint_every(CHECKPOINT_EVERY_STEPS)) as job:
            first = job.wait_for_steps(setting.limit)
            try:
                _disturb(job, result, first, every, first + length)
            finally:
                # A job that gave up early is charged for the whole window all the same.
                result.steps_per_s = _useful_steps(job, first, first + length) / length
    except JobError as failure:
        result.note = str(failure)
    kind = f"{result.kills} kills" if result.disturbed else "undisturbed"
    say(f"{launcher.name}, {kind}: {result.steps_per_s:.2f} useful steps/s {result.note}".rstrip())
    return result


def _disturb(job: Job, result: Window, first: Seconds, every: Seconds | None, end: Seconds) -> None:
    """Train until the end of the window, with a kill at each multiple of `every`, ranks in turn."""
    due = first + every if every else end
    while every and due < end:
        job.train_until(due)
        turn = result.kills + result.missed + 1
        if job.kill(turn % job.ranks) is None:
            result.missed += 1
        else:
            result.kills += 1
        due += every
    job.train_until(end)


def _useful_steps(job: Job, start: Seconds, end: Seconds) -> int:
    job.marks.refresh()
    return job.marks.highest_step(until=end) - job.marks.highest_step(until=start)


def _summary(windows: list[Window], name: str) -> dict[str, Any]:
    mine = [one for one in windows if one.launcher == name]
    calm = median_of([one.steps_per_s for one in mine if not one.disturbed])
    stormy = median_of([one.steps_per_s for one in mine if one.disturbed])
    return {
        "kills": sum(one.kills for one in mine),
        "missed": sum(one.missed for one in mine),
        "undisturbed_steps_per_s": calm,
        "disturbed_steps_per_s": stormy,
        "goodput": ratio(stormy, calm),
    }


def _row(name: str, line: dict[str, Any]) -> list[str]:
    return [
        name,
        str(line["kills"]),
        str(line["missed"]),
        number(line["undisturbed_steps_per_s"]),
        number(line["disturbed_steps_per_s"]),
        number(line["goodput"], 3),
        number(line["holdfast/goodput"]),
    ]
