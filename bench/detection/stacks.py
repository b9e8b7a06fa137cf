"""How long it takes to see where eight ranks of a node are: `holdfast why`, from question to answer."""

from __future__ import annotations

import time
from statistics import median

from harness.job import JobError
from harness.launchers import holdfast
from harness.lines import Line, count

from detection import jobs
from detection.jobs import Setting
from holdfast.messages.wire import AskWhy, Why
from holdfast.wire.visitors import ask

RANKS = 8
AT_MOST_S = 1.5


def measure(setting: Setting) -> list[Line]:
    took: list[float] = []
    complete, why = 0, ""
    tries = 2 if setting.quick else 5
    try:
        with jobs.running(setting, holdfast(), RANKS, ["--step-ms=100"]) as job:
            jobs.wait_until_warm(job)
            for _ in range(tries):
                began = time.monotonic()
                found = ask(jobs.home(job), AskWhy(), Why)
                took.append(time.monotonic() - began)
                complete += len(found.evidence) == RANKS and all(e.stacks for e in found.evidence)
            before = {rank: job.marks.newest(rank) for rank in range(RANKS)}
            job.wait_for_steps(jobs.LIMIT_S)
            if any(job.marks.newest(rank) != life for rank, life in before.items()):
                why = "a rank was restarted by the look"
    except JobError as failure:
        why = str(failure)
    worst = f"worst {max(took):.2f} s; training goes on meanwhile" if took else ""
    return [
        Line(
            "stacks of 8 ranks",
            median(took) if took else None,
            "s",
            at_most=AT_MOST_S,
            seen=worst,
            why=why,
            samples=took,
        ),
        count("looks that saw all 8", complete, tries),
    ]
