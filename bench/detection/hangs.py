"""A rank hangs: is the right one named, how soon, and how long until all train again?

Each try is a job of its own: four ranks on two nodes train until their deadlines are learnt, then one
of them hangs in one of the ways, ranks in turn. Tries go through steps of several lengths. A rank
notes when it begins to hang, all ranks note their steps, and the journal has when the hang was noticed
and who was named.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from harness.job import Job, JobError
from harness.lines import Line, count
from harness.marks import Seconds
from harness.setting import say

from detection import jobs
from detection.jobs import LIMIT_S, NODES, RANKS, Setting

WAYS = {
    "stop": "SIGSTOP",
    "sleep": "sleeps",
    "gil": "holds the GIL in C",
    "skip": "skips a collective",
}
STEPS_MS = (20, 200, 1000)
BAR_STEPS, BAR_S = 3.0, 2.0
BACK_S: Seconds = 1.0


@dataclass
class Try:
    way: str
    step_ms: int
    rank: int
    step_s: Seconds | None = None
    named: int | None = None
    sentence: str = ""
    detect_s: Seconds | None = None
    back_s: Seconds | None = None
    """From the moment it was noticed until every rank trained again: it had finished a step, which
    takes as long as steps do."""
    note: str = ""

    @property
    def bar_s(self) -> Seconds:
        return BAR_STEPS * (self.step_s or 0.0) + BAR_S

    @property
    def in_time(self) -> bool:
        return self.detect_s is not None and self.detect_s <= self.bar_s


def measure(setting: Setting) -> list[Line]:
    tries = []
    for turn in range(setting.tries):
        for way in WAYS:
            step_ms = STEPS_MS[turn % len(STEPS_MS)]
            tries.append(_try(setting, Try(way, step_ms, (turn + len(way)) % RANKS)))
            say(_told(tries[-1], turn, setting.tries))
    return [line for way in WAYS for line in _named(way, tries)] + _times(tries)


def _try(setting: Setting, one: Try) -> Try:
    script = [f"--step-ms={one.step_ms}"]
    try:
        with jobs.running(setting, jobs.launcher(NODES), RANKS, script) as job:
            jobs.wait_until_warm(job)
            one.step_s = jobs.step_s(job)
            began = _hang(job, one)
            incident = jobs.first_incident(job)
            noticed = jobs.monotonic(incident.opened_at)
            one.named, one.sentence = incident.rank, incident.detail or incident.signature
            one.detect_s = noticed - began
            one.back_s = job.wait_for_steps(LIMIT_S, after=began) - noticed - one.step_s
            if incident.kind != "hang":
                one.note = f"taken for {incident.kind}: {incident.signature}"
    except (JobError, OSError) as failure:
        one.note = str(failure)
    return one


def _hang(job: Job, one: Try) -> Seconds:
    """Have the rank hang; when it began to."""
    if one.way == "stop":
        life = job.marks.newest(one.rank)
        if life is None:
            raise JobError("the rank is gone")
        os.kill(life.pid, signal.SIGSTOP)
        return time.monotonic()
    order = job.folder / "orders" / f"{one.way}.{one.rank}"
    order.touch()
    done = Path(f"{order}.done")
    job.wait_for("the rank to hang", lambda: done.exists() and bool(done.read_text()), LIMIT_S)
    return float(done.read_text())


def _told(one: Try, turn: int, tries: int) -> str:
    if one.detect_s is None:
        return f"try {turn + 1} of {tries}, {one.way}, {one.step_ms} ms: {one.note}"
    right = "right" if one.named == one.rank else f"WRONG ({one.named})"
    back = "-" if one.back_s is None else f"{one.back_s:.2f} s"
    return (
        f"try {turn + 1} of {tries}, {one.way}, {one.step_ms} ms: {right} rank, noticed after"
        f" {one.detect_s:.2f} s (bar {one.bar_s:.2f}), back {back} later {one.note}"
    ).rstrip()


def _named(way: str, tries: list[Try]) -> list[Line]:
    mine = [one for one in tries if one.way == way]
    right = [one for one in mine if one.named == one.rank]
    wrong = "; ".join(f"rank {o.rank}: {o.sentence or o.note}" for o in mine if o not in right)
    seen = wrong or (right[0].sentence if right else "")
    return [
        count(f"{WAYS[way]}: right rank named", len(right), len(mine), seen=seen),
        count(
            f"{WAYS[way]}: in 3 steps + 2 s",
            sum(one.in_time for one in mine),
            len(mine),
            samples=[asdict(one) for one in mine],
        ),
    ]


def _times(tries: list[Try]) -> list[Line]:
    lines = []
    for step_ms in STEPS_MS:
        mine = [one for one in tries if one.step_ms == step_ms and one.detect_s is not None]
        detect = [one.detect_s for one in mine if one.detect_s is not None]
        if not detect:
            continue
        over = max((one.detect_s or 0.0) - one.bar_s for one in mine)
        bar = median(one.bar_s for one in mine)
        seen = f"{len(mine)} tries, worst {max(detect):.2f} s, {-over:.2f} s before its bar"
        what = f"noticed after, {step_ms} ms steps"
        lines.append(Line(what, median(detect), "s", at_most=bar, seen=seen))
    back = [one.back_s for one in tries if one.back_s is not None]
    worst = f"worst {max(back):.2f} s" if back else ""
    lines.append(
        Line("back after that", median(back) if back else None, "s", at_most=BACK_S, seen=worst)
    )
    return lines
