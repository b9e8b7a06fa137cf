"""Holdfast on a real Slurm of four nodes on this machine (tests/engines/slurm.py; needs root).

start       from the first line of the batch script to a step of every rank: `srun torchrun`, `srun
            holdfast run` and `holdfast submit slurm`, in turns
node lost   a slurmd and all its processes are killed; a spare is ready; until all ranks step again
requeue     the script is warned as before a time limit, and the job queued again: from the start of
            the second run to a step of every rank, and how many steps were trained twice

python bench/modes/slurm.py --tries 3
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.launchers import free_port
from harness.marks import Marks, Seconds
from harness.report import Report, median_of, number

if TYPE_CHECKING:
    from tests.engines.slurm import SlurmCluster

BENCH = Path(__file__).resolve().parents[1]
SCRIPT = BENCH / "scripts" / "ddp.py"
RANKS = 2
LIMIT_S: Seconds = 120.0
SETTLE_S: Seconds = 6.0
"""A spare imports what its standbys need."""
CHECKPOINT_EVERY = 10
BEGUN = 'date +%s.%N >> "$BENCH_BEGUN"\n'
HOLDFAST = f"{sys.executable} -m holdfast"
TORCHRUN = f"{sys.executable} -m torch.distributed.run"


@dataclass
class Try:
    scenario: str
    turn: int
    seconds: Seconds
    steps_again: int = 0


class Trial:
    """One job on the cluster, from its submission."""

    def __init__(self, cluster: SlurmCluster, name: str) -> None:
        self.cluster, self.folder = cluster, cluster.folder / name
        (self.folder / "marks").mkdir(parents=True)
        self.marks = Marks(self.folder / "marks")
        self.id = 0
        self._environ = {
            "BENCH_MARKS": str(self.folder / "marks"),
            "BENCH_BEGUN": str(self.folder / "begun"),
            "HOLDFAST_HOME": str(self.folder / "home"),
            "OMP_NUM_THREADS": "1",
        }
        self.checkpoint = self.folder / "checkpoint.pt"
        self.words = (
            f"{SCRIPT} --checkpoint {self.checkpoint} --checkpoint-every {CHECKPOINT_EVERY}"
        )

    def submit(self, script: str) -> None:
        path = self.folder / "job.sh"
        path.write_text(script)
        lines = [f"{name}={value}" for name, value in self._environ.items()]
        export = "--export=ALL," + ",".join(lines)
        words = ("sbatch", "--parsable", export, f"--output={self.folder}/out", str(path))
        self.id = int(self.cluster.run(*words).split(";")[0])

    def submit_plain(self, command: str) -> None:
        srun = f"srun --ntasks-per-node=1 {command}"
        self.submit(
            f"#!/bin/bash\n#SBATCH --nodes={RANKS} --exclusive\n{BEGUN}{srun} {self.words}\n"
        )

    def submit_ours(self, *flags: str) -> None:
        """The script of `holdfast submit slurm`, with a line that says when it began."""
        words = (*HOLDFAST.split(), "submit", "slurm", "--dry-run", *flags, *self.words.split())
        head, _, body = self.cluster.run(*words).partition("\n\n")
        self.submit(f"{head}\n\n{BEGUN}{body}")

    def begun(self, run: int = 1) -> Seconds:
        """When the batch script began for the nth time, on the monotonic clock."""
        path = self.folder / "begun"
        self._wait(lambda: path.exists() and len(path.read_text().split()) >= run, f"run {run}")
        return float(path.read_text().split()[run - 1]) - (time.time() - time.monotonic())

    def stepped(self, after: Seconds = 0.0) -> Seconds:
        """When every rank had finished a step in a life that began after a moment."""

        def found() -> bool:
            self.marks.refresh()
            return self.marks.all_stepped(RANKS, after) is not None

        self._wait(found, "a step of every rank")
        moment = self.marks.all_stepped(RANKS, after)
        assert moment is not None
        return moment

    def cancel(self) -> None:
        self.cluster.run("scancel", str(self.id))
        self._wait(lambda: not self.cluster.run("squeue", "--noheader").strip(), "an empty queue")

    def _wait(self, question: Callable[[], bool], what: str) -> None:
        try:
            self.cluster.wait_for(question, what, LIMIT_S)
        except TimeoutError as error:
            out = self.folder / "out"
            raise TimeoutError(f"{error}\n{out.read_text() if out.exists() else ''}") from None


def start_torchrun(trial: Trial) -> tuple[Seconds, int]:
    meet = (
        f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id {trial.folder.name}"
    )
    trial.submit_plain(f"{TORCHRUN} --nnodes {RANKS} --nproc-per-node 1 {meet}")
    return trial.stepped() - trial.begun(), 0


def start_run(trial: Trial) -> tuple[Seconds, int]:
    trial.submit_plain(f"{HOLDFAST} run")
    return trial.stepped() - trial.begun(), 0


def start_submitted(trial: Trial) -> tuple[Seconds, int]:
    trial.submit_ours("--nodes", str(RANKS))
    return trial.stepped() - trial.begun(), 0


def lose_node(trial: Trial) -> tuple[Seconds, int]:
    trial.submit_ours("--nodes", str(RANKS), "--spares", "1", "--job", "lost")
    first = trial.stepped()
    time.sleep(max(0.0, first + SETTLE_S - time.monotonic()))
    words = (*HOLDFAST.split(), "status", "lost", "--json")
    os.environ["HOLDFAST_HOME"] = trial.cluster.env["HOLDFAST_HOME"] = str(trial.folder / "home")
    placed = [
        node["host"] for node in json.loads(trial.cluster.run(*words))["nodes"] if node["ranks"]
    ]
    host = next(name for name in placed if name != "n1")
    killed = time.monotonic()
    trial.cluster.kill_node(host)
    took = trial.stepped(after=killed) - killed
    trial.cancel()
    trial.cluster.start_node(host)
    trial.cluster.wait_for_node(host, "IDLE")
    return took, 0


def requeue(trial: Trial) -> tuple[Seconds, int]:
    trial.submit_ours("--nodes", str(RANKS))
    first = trial.stepped()
    time.sleep(max(0.0, first + SETTLE_S - time.monotonic()))
    trial.cluster.run("scancel", "--batch", "--signal=USR1", str(trial.id))
    trial.cluster.wait_for_job(trial.id, "PENDING")
    trial.marks.refresh()
    reached = max(step for life in trial.marks.lives for step in life.steps)
    ended = time.monotonic()
    trial.cluster.start_now(trial.id)
    took = trial.stepped(after=ended) - trial.begun(run=2)
    again = [life.steps[0] for life in trial.marks.lives if life.begun > ended and life.steps]
    return took, reached + 1 - min(again)


SCENARIOS: dict[str, Callable[[Trial], tuple[Seconds, int]]] = {
    "start, srun torchrun": start_torchrun,
    "start, srun holdfast run": start_run,
    "start, holdfast submit slurm": start_submitted,
    "node lost, spare": lose_node,
    "requeue": requeue,
}


def run(tries: int, only: list[str]) -> Report:
    """Measure these scenarios in turns, on a cluster of four nodes that is gone afterwards."""
    sys.path.insert(0, str(BENCH.parent))
    from tests.engines.slurm import SlurmCluster

    results: list[Try] = []
    with SlurmCluster(4) as cluster:
        for turn in range(tries):
            for name in only:
                trial = Trial(cluster, f"{turn}-{name.replace(' ', '-').replace(',', '')}")
                seconds, again = SCENARIOS[name](trial)
                results.append(Try(name, turn, seconds, again))
                print(
                    f"try {turn + 1}, {name}: {seconds:.2f} s, {again} steps again", file=sys.stderr
                )
                trial.cancel()
    summary: dict[str, Any] = {}
    for name in only:
        found = [one for one in results if one.scenario == name]
        times = [one.seconds for one in found]
        again = max(one.steps_again for one in found)
        summary[name] = {"median_s": median_of(times), "max_s": max(times), "steps_again": again}
    rows = [
        [name, number(one["median_s"]), number(one["max_s"]), str(one["steps_again"])]
        for name, one in summary.items()
    ]
    columns = ["what", "median s", "max", "steps again"]
    notes = [f"{tries} tries, {RANKS} nodes of one rank, all on this machine"]
    return Report("slurm", columns, rows, notes, [asdict(one) for one in results], summary)
