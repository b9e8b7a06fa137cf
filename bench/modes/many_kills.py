"""One job, many kills in a row: does it always come back, how fast, and what does it leave behind?

Each kill comes as soon as all ranks have stepped again (or `--settle` seconds later), ranks in
turn. The script saves each step before it counts as finished, so every life gets at least one step
further and the job advances through all of it. Then the job must finish by itself, and leave
nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from harness import leftovers
from harness.job import Job, JobError
from harness.launchers import Launcher
from harness.marks import Seconds
from harness.report import Report, number, percentile
from harness.setting import Setting, checkpoint_every, say

TELL_EVERY = 10


@dataclass
class Series:
    launcher: str
    wanted: int
    recoveries_s: list[Seconds] = field(default_factory=list)
    kills: int = 0
    finished: bool = False
    processes: list[str] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)
    sockets: list[str] = field(default_factory=list)
    descriptor_growth: dict[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def clean(self) -> bool:
        grown = [key for key, more in self.descriptor_growth.items() if more > leftovers.FD_SLACK]
        return not (self.processes or self.shared_memory or self.sockets or grown)

    @property
    def passed(self) -> bool:
        return len(self.recoveries_s) == self.wanted and self.finished and self.clean


def run(setting: Setting, kills: int) -> Report:
    series = [_series(setting, launcher, kills) for launcher in setting.launchers]
    columns = ["launcher", "came back", "median s", "p99 s", "max s", "finished"]
    columns += ["processes", "shm", "sockets", "fds"]
    rows = [_row(one) for one in series]
    notes = ["processes, shm, sockets: left after the end; fds: most any lasting process gathered"]
    notes += [f"{one.launcher}: {one.note}" for one in series if one.note]
    summary = {one.launcher: _summary(one) for one in series}
    results = [asdict(one) for one in series]
    return Report(
        "many-kills", columns, rows, notes, results, summary, all(one.passed for one in series)
    )


def _series(setting: Setting, launcher: Launcher, kills: int) -> Series:
    result = Series(launcher.name, kills)
    memory_before = leftovers.shared_memory()
    try:
        with setting.job(launcher, checkpoint_every(1)) as job:
            try:
                _kill_in_a_row(job, setting, result)
                job.finish(setting.limit)
                result.finished = True
            finally:
                if job.exit_code() is not None:
                    _look_around(job, result, memory_before)
    except JobError as failure:
        result.note = str(failure)
    return result


def _kill_in_a_row(job: Job, setting: Setting, result: Series) -> None:
    samples: list[leftovers.Footprint] = []
    stepped = job.wait_for_steps(setting.limit)
    while result.kills < result.wanted:
        job.train_until(stepped + setting.settle)
        samples.append(leftovers.footprint(life.pid for life in job.marks.lives))
        result.descriptor_growth = leftovers.descriptor_growth(samples)
        killed = job.kill((result.kills + 1) % job.ranks)
        if killed is None:
            raise JobError(f"a rank was gone before kill {result.kills + 1}")
        result.kills += 1
        job.marks.close_lives_before(killed)
        stepped = job.wait_for_steps(setting.limit, after=killed)
        result.recoveries_s.append(stepped - killed)
        if result.kills % TELL_EVERY == 0:
            latest = median(result.recoveries_s[-TELL_EVERY:])
            done = f"{result.kills} of {result.wanted} kills"
            say(f"{result.launcher}: {done}, lately back in {latest:.3f} s")


def _look_around(job: Job, result: Series, memory_before: set[str]) -> None:
    """Right after the launcher ended by itself, and before the bench cleans up after it."""
    result.processes = leftovers.processes_after(set(job.pids))
    result.shared_memory = leftovers.unowned_shared_memory(memory_before)
    result.sockets = leftovers.socket_files(job.folder)


def _summary(one: Series) -> dict[str, Any]:
    times = one.recoveries_s
    return {
        "kills": one.kills,
        "came_back": len(times),
        "recovery_median_s": median(times) if times else None,
        "recovery_p99_s": percentile(times, 99) if times else None,
        "recovery_max_s": max(times, default=None),
        "finished": one.finished,
        "left_nothing": one.clean,
        "descriptor_growth_max": max(one.descriptor_growth.values(), default=0),
    }


def _row(one: Series) -> list[str]:
    line = _summary(one)
    return [
        one.launcher,
        f"{line['came_back']} of {one.wanted}",
        number(line["recovery_median_s"], 3),
        number(line["recovery_p99_s"], 3),
        number(line["recovery_max_s"], 3),
        "yes" if one.finished else "no",
        str(len(one.processes)),
        str(len(one.shared_memory)),
        str(len(one.sockets)),
        f"{line['descriptor_growth_max']:+d}",
    ]
