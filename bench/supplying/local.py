"""The local platform: a node of `holdfast up` is killed with all it runs, by SIGKILL.

no spare    supply asks for another node, which starts from nothing; all ranks step again
spare       a node waits: its ranks take the place, and supply asks for another spare meanwhile
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from harness import processes
from harness.job import Job, JobError
from harness.launchers import Command, Launch, Launcher
from harness.launchers import holdfast as one_node
from harness.marks import Seconds
from harness.setting import Setting, say

from supplying.lines import Line

NODES = 2
GUARD = "holdfast-node"
"""What the process of each node of the local platform is called."""
GOALS: dict[int, Seconds] = {0: 4.0, 1: 1.5}
"""By the number of spares."""
SPARE_READY_S: Seconds = 6.0
"""A spare imports what its standbys need; until then it is not ready."""


def run(setting: Setting) -> list[Line]:
    lines = {spares: Line("local", _name(spares), goal=goal) for spares, goal in GOALS.items()}
    for turn in range(setting.tries):
        for spares, line in lines.items():
            value = _try(setting, spares, line)
            line.values.append(value)
            told = f"{value:.3f} s" if value is not None else line.notes[-1]
            say(f"try {turn + 1}, local, {line.what}: {told}")
    return list(lines.values())


def _name(spares: int) -> str:
    return "a node killed, a spare ready" if spares else "a node killed, no spare"


def _try(setting: Setting, spares: int, line: Line) -> Seconds | None:
    try:
        with setting.job(up(spares)) as job:
            first = job.wait_for_steps(setting.limit)
            job.train_until(first + setting.settle + (SPARE_READY_S if spares else 0.0))
            killed = kill_node(job, setting)
            return job.wait_for_steps(setting.limit, after=killed) - killed
    except JobError as failure:
        line.notes.append(str(failure))
        return None


def up(spares: int) -> Launcher:
    """A job of two nodes on this machine, which `holdfast up` provides."""
    python = one_node().launch("", 1, ["x"]).commands[0].argv[0]

    def launch(job: str, ranks: int, script: Sequence[str]) -> Launch:
        flags = ["--nodes", str(NODES), "--nproc-per-node", str(ranks // NODES), "--job", job]
        command = [python, "-m", "holdfast", "up", *flags, "--spares", str(spares), *script]
        return Launch([Command(command)])

    return Launcher("up", launch)


def kill_node(job: Job, setting: Setting) -> Seconds:
    """Kill a node that has a rank, with everything on it; return when."""
    life = job.marks.newest(setting.ranks - 1)
    for guard in processes.descendants():
        below = [process.pid for process in processes.below(guard.pid)]
        if guard.name == GUARD and life is not None and life.pid in below:
            killed = time.monotonic()
            for pid in [guard.pid, *below]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return killed
    raise JobError("no node has the last rank")
