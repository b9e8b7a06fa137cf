"""Nobody hangs: does anybody believe so?

Four ranks on two nodes take thousands of steps. Now and then one of them pauses for ten times a step;
rank 0 saves to slow storage while the others wait; every hundred steps it evaluates, alone or with all
others. Whatever restarts the job is a false alarm. Then all of it again beside six processes that want
the processors for themselves.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from harness.job import JobError
from harness.launchers import holdfast
from harness.lines import Line
from harness.setting import say

from detection import jobs
from detection.beside import BUSY, busy
from detection.jobs import NODES, RANKS, UNBROKEN, Setting
from holdfast.core.job import Job as JobState

STEPS, STEPS_QUICK = 10_000, 800
TELL_EVERY_S = 30.0


def measure(setting: Setting) -> list[Line]:
    loaded = f" beside {BUSY} busy processes"
    return [*_measure(setting, "", nullcontext()), *_measure(setting, loaded, busy())]


def _measure(setting: Setting, told: str, beside: AbstractContextManager[None]) -> list[Line]:
    steps = STEPS_QUICK if setting.quick else STEPS
    script = ["--step-ms=15", f"--steps={steps}", "--pauses=0.005", "--save-every=500"]
    script += ["--save-s=4", "--evaluate-every=100", "--linger-every=1000", "--linger-s=5"]
    found: list[str] = []
    reached, why, began = 0, "", time.monotonic()
    try:
        with beside, jobs.running(setting, holdfast(nodes=NODES), RANKS, script) as job:
            try:
                _wait(job, steps, began)
            finally:
                job.marks.refresh()
                reached = job.marks.highest_step()
                state = jobs.state(job)
                found = _alarms(state)
    except JobError as failure:
        why = str(failure)
    took_s = time.monotonic() - began
    seen = f"{reached} steps in {took_s:.0f} s" + "".join(f"; {one}" for one in found)
    what = f"steps without a hang{told}"
    return [
        Line(what, float(reached), at_least=float(steps), seen=seen, why=why),
        Line(
            f"false alarms in them{told}", float(len(found)), at_most=0.0, seen=seen, samples=found
        ),
    ]


def _alarms(state: JobState | None) -> list[str]:
    """What broke a round; that rank 0, which does more than others, is slow, breaks none."""
    if state is None:
        return []
    return [i.detail or i.signature for i in state.incidents if i.kind not in UNBROKEN]


def _wait(job: jobs.Job, steps: int, began: float) -> None:
    """Until the job has ended, with a word now and then for whoever waits too."""
    told = began

    def ended() -> bool:
        nonlocal told
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            say(f"calm: step {job.marks.highest_step()} of {steps}")
        return job.exit_code() is not None

    job.wait_for("end of the job", ended, 0.3 * steps + 120, look_every_s=0.5)
    if job.exit_code() != 0:
        raise JobError(f"launcher ended with {job.exit_code()}")
