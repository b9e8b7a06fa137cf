"""Several nodes on one machine: a worker, a node or the coordinator is killed.

Each `holdfast run` is a node of its own with half of the ranks. The scenarios:

    worker        a rank on the other node dies; all ranks step again
    node          the other node is killed with all it runs, --nnodes 1:2; what is left steps again
    node, spare   the same with a spare ready; all ranks step again
    coordinator   it is killed, and a rank a moment later: how long until all ranks step again, that
                  is, until the job is under full control (no rank may have stopped before that)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness import processes
from harness.job import Job, JobError
from harness.launchers import Command, Launch, Launcher, free_port
from harness.launchers import holdfast as one_node
from harness.marks import Seconds
from harness.report import Report, median_of, number
from harness.setting import Setting, say

NODES = 2
SPARE_READY_S: Seconds = 4.0
"""A spare imports what its standbys need; until then it is not ready."""


@dataclass
class Try:
    scenario: str
    turn: int
    recovery_s: Seconds | None = None
    note: str = ""


def several(nodes: str, launchers: int) -> Launcher:
    """Holdfast with as many launchers, one a node, that meet at a port."""
    python = one_node().launch("", 1, ["x"]).commands[0].argv[0]

    def launch(job: str, ranks: int, script: Sequence[str]) -> Launch:
        flags = ["--nproc-per-node", str(ranks // NODES), "--nnodes", nodes, "--job", job]
        flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        command = [python, "-m", "holdfast", "run", *flags, *script]
        return Launch([Command(command)] * launchers)

    return Launcher("holdfast", launch)


def run(setting: Setting) -> Report:
    tries = [_try(setting, name, turn) for turn in range(setting.tries) for name in SCENARIOS]
    summary: dict[str, Any] = {}
    for name in SCENARIOS:
        found = [one.recovery_s for one in tries if one.scenario == name]
        back = [seconds for seconds in found if seconds is not None]
        summary[name] = {
            "tries": len(found),
            "came_back": len(back),
            "recovery_s": median_of(back),
            "max_s": max(back, default=None),
        }
    rows = [
        [
            name,
            number(line["recovery_s"], 3),
            number(line["max_s"], 3),
            f"{line['came_back']} of {line['tries']}",
        ]
        for name, line in summary.items()
    ]
    columns = ["what is killed", "recovery s", "max", "came back"]
    notes = [f"medians; {NODES} nodes, {setting.ranks} ranks, all on this machine"]
    return Report("nodes", columns, rows, notes, [asdict(one) for one in tries], summary)


def _try(setting: Setting, name: str, turn: int) -> Try:
    result = Try(name, turn)
    nodes, launchers, scenario = SCENARIOS[name]
    try:
        with setting.job(several(nodes, launchers)) as job:
            first = job.wait_for_steps(setting.limit)
            extra = SPARE_READY_S if launchers > NODES else 0.0
            job.train_until(first + setting.settle + extra)
            result.recovery_s = scenario(job, setting)
    except JobError as failure:
        result.note = str(failure)
    say(f"try {turn + 1}, {name}: {number(result.recovery_s, 3, ' s')} {result.note}".rstrip())
    return result


def _kill_worker(job: Job, setting: Setting) -> Seconds:
    killed = job.kill(rank=setting.ranks - 1)
    if killed is None:
        raise JobError("the rank was gone before it could be killed")
    return job.wait_for_steps(setting.limit, after=killed) - killed


def _kill_node(job: Job, setting: Setting) -> Seconds:
    """Kill a node that has ranks and not the coordinator, with everything on it."""
    launcher = _other_node(job, setting)
    killed = time.monotonic()
    for process in [launcher, *(p.pid for p in processes.below(launcher))]:
        _kill(process)
    shrunk = job.marks.all_stepped
    ranks = setting.ranks if len(job.pids) > NODES else setting.ranks // NODES
    job.wait_for("steps again", lambda: shrunk(ranks, killed) is not None, setting.limit)
    moment = shrunk(ranks, killed)
    assert moment is not None
    return moment - killed


def _kill_coordinator(job: Job, setting: Setting) -> Seconds:
    coordinator = next(p for p in processes.descendants() if p.name == "holdfast-coord")
    lives = {rank: job.marks.newest(rank) for rank in range(setting.ranks)}
    _kill(coordinator.pid)
    killed = time.monotonic()
    job.train_until(killed + 1.0)
    if any(job.marks.newest(rank) != life for rank, life in lives.items()):
        raise JobError("a rank was restarted because the coordinator died")
    return _kill_worker(job, setting)


def _other_node(job: Job, setting: Setting) -> int:
    lives = [job.marks.newest(rank) for rank in range(setting.ranks)]
    workers = {life.pid for life in lives if life is not None}
    for launcher in job.pids:
        below = processes.below(launcher)
        hosts = any(process.name == "holdfast-coord" for process in below)
        if not hosts and workers & {process.pid for process in below}:
            return launcher
    raise JobError("no node has ranks and not the coordinator")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


SCENARIOS: dict[str, tuple[str, int, Callable[[Job, Setting], Seconds]]] = {
    "worker": ("2", 2, _kill_worker),
    "node": ("1:2", 2, _kill_node),
    "node, spare": ("2", 3, _kill_node),
    "coordinator": ("2", 2, _kill_coordinator),
}
