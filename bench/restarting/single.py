"""One fault at a time: how long until the ranks are back in their function, and what was lost.

All faults of one kind strike the same job, one after the other, each a while after the last. A rank
that is told to break writes down when it does; entries and steps have the same clock.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median

from harness.job import JobError
from harness.launchers import holdfast
from harness.lines import Line
from harness.marks import Seconds
from harness.setting import say

from restarting.jobs import RestartingJob, Setting

BETWEEN_S: Seconds = 1.0
"""How long the ranks train before each fault: standbys must be there again."""
REST_S: Seconds = 1.0
"""What leaving and entering may add to the detection of a hang."""


@dataclass
class Fault:
    """One fault, seen from outside."""

    entered_s: Seconds
    """Until all ranks had entered the function again."""
    stepped_s: Seconds
    """Until all ranks had finished a step."""
    redone: int
    replaced: int


@dataclass
class Found:
    faults: list[Fault] = field(default_factory=list)
    note: str = ""

    def times(self, name: str) -> list[Seconds]:
        return [getattr(one, name) for one in self.faults]


def measure(setting: Setting) -> list[Line]:
    raised = _faults(setting, 2, lambda job: job.break_(1, "raise@after"))
    killed = _faults(setting, 4, lambda job: _signal(job, 3, signal.SIGKILL))
    first = _faults(setting, 4, lambda job: _signal(job, 0, signal.SIGKILL))
    return [
        _line("exception in one of 2, both entered again", raised, "entered_s", 0.1),
        _line("exception in one of 2, both stepping", raised, "stepped_s"),
        _line("SIGKILL of one of 4, all stepping", killed, "stepped_s", 0.3),
        _line("SIGKILL of rank 0 of 4, all stepping", first, "stepped_s", 0.3),
        _sum("steps redone", [raised, killed, first], "redone", 0),
        _sum("processes replaced beside the killed", [raised, killed, first], "replaced", 0),
    ]


HANGS: dict[str, tuple[tuple[str, ...], Callable[[RestartingJob], Seconds], Seconds]] = {
    "SIGSTOP": ((), lambda job: _signal(job, 1, signal.SIGSTOP), 1.2),
    "mismatched collective": ((), lambda job: job.break_(1, "mismatch@reduce"), 1.2),
    "GIL kept": ((), lambda job: job.break_(1, "gil@forward"), 4.2),
    "sleep, --hang-after 2": (
        ("--hang-after", "2"),
        lambda job: job.break_(1, "sleep@forward"),
        3.0,
    ),
    "Python loop, --rank-heartbeat-timeout 2": (
        ("--rank-heartbeat-timeout", "2"),
        lambda job: job.break_(1, "loop@forward"),
        2.0,
    ),
}
"""Flags, the fault, and the deadline that its class has: see `docs/faults.md`."""


def measure_hangs(setting: Setting) -> list[Line]:
    lines = []
    for name, (flags, fault, deadline_s) in HANGS.items():
        found = _faults(setting, 2, fault, *flags)
        lines.append(_line(f"hang: {name}", found, "stepped_s", deadline_s + REST_S))
    return lines


def _faults(
    setting: Setting, ranks: int, fault: Callable[[RestartingJob], Seconds], *flags: str
) -> Found:
    found = Found()
    try:
        with setting.job(ranks, launcher=holdfast(*flags)) as job:
            stepped = job.wait_for_steps(setting.limit)
            for number in range(setting.tries):
                job.train_until(stepped + BETWEEN_S)
                before = [job.life(rank) for rank in range(ranks)]
                struck = fault(job)
                stepped = job.wait_for_steps(setting.limit, after=struck)
                after = [job.life(rank) for rank in range(ranks)]
                pairs = zip(before, after, strict=True)
                reached = max(life.steps[-1] for life in before)
                found.faults.append(
                    Fault(
                        entered_s=max(life.begun for life in after) - struck,
                        stepped_s=stepped - struck,
                        redone=max(0, reached + 1 - min(life.steps[0] for life in after)),
                        replaced=sum(old.pid != new.pid for old, new in pairs) - job.killed,
                    )
                )
                say(f"fault {number + 1} of {setting.tries}: {found.faults[-1]}")
    except JobError as failure:
        found.note = str(failure)
    return found


def _signal(job: RestartingJob, rank: int, number: signal.Signals) -> Seconds:
    job.killed = 1
    moment = time.monotonic()
    os.kill(job.life(rank).pid, number)
    return moment


def _line(what: str, found: Found, name: str, at_most: Seconds | None = None) -> Line:
    times = found.times(name)
    seen = f"{len(times)} times, {min(times):.3f} to {max(times):.3f} s" if times else ""
    figure = median(times) if times else None
    samples = [asdict(one) for one in found.faults]
    return Line(what, figure, "s", at_most=at_most, seen=seen, why=found.note, samples=samples)


def _sum(what: str, found: list[Found], name: str, at_most: int) -> Line:
    total = sum(getattr(fault, name) for one in found for fault in one.faults)
    return Line(what, float(total), at_most=float(at_most))
