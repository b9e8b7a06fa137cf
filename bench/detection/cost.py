"""What it costs to be watched: the same short steps with everything that watches, and without.

Without means `--no-hang-detection`, no hooks and no beating thread in the ranks. Jobs take turns, and
the figure is the median of the ratios of neighbours. Processor time beside the ranks is not part of it;
`recovery.py --steady` has that.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from harness.job import GLANCE_EVERY_S, SCRIPT, Job, JobError
from harness.launchers import Launcher
from harness.setting import say

from detection import jobs
from detection.jobs import LIMIT_S, Setting
from detection.lines import Line

RANKS = 2
SHORT_STEP = ["--pause-ms=0", "--batch=256", "--width=256"]
"""About 5 ms of work a step on two cores of 2024, none of it idle."""
AT_MOST = 1.01
SETTLE_STEPS = 200


def measure(setting: Setting) -> list[Line]:
    tries, steps = (3, 300) if setting.quick else (12, 1000)
    contestants = {
        "watched": jobs.launcher(1),
        "unwatched": jobs.launcher(
            1, "--no-hang-detection", env={"HOLDFAST_WITHOUT_WATCHING": "1"}
        ),
    }
    took: dict[str, list[float]] = {name: [] for name in contestants}
    why = ""
    for turn in range(tries):
        # By turns, who is first: the machine may become busier, or calmer.
        for name in sorted(contestants, reverse=bool(turn % 2)):
            try:
                took[name].append(_step_s(setting, contestants[name], steps))
            except JobError as failure:
                return [Line("cost on a 5 ms step", None, at_most=AT_MOST, why=str(failure))]
            say(f"turn {turn + 1} of {tries}, {name}: {took[name][-1] * 1000:.3f} ms a step")
    ratios = [on / off for on, off in zip(took["watched"], took["unwatched"], strict=True)]
    bare = median(took["unwatched"])
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    seen = f"step {bare * 1000:.2f} ms without; {tries} ratios, {spread}"
    figure = median(ratios)
    return [
        Line(
            "step time, watched / not", figure, at_most=AT_MOST, seen=seen, why=why, samples=ratios
        )
    ]


def _step_s(setting: Setting, launcher: Launcher, steps: int) -> float:
    with jobs.running(setting, launcher, RANKS, SHORT_STEP, SCRIPT) as job:
        job.wait_for_steps(LIMIT_S)
        wanted = SETTLE_STEPS + steps
        job.wait_for(f"{wanted} steps", lambda: len(_times(job)) > wanted, LIMIT_S, GLANCE_EVERY_S)
        times = _times(job)[SETTLE_STEPS : wanted + 1]
        return median(later - earlier for earlier, later in pairwise(times))


def _times(job: Job) -> list[float]:
    life = job.marks.newest(0)
    return life.times if life else []
