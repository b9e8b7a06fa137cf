"""Each record once: workers, agents and the coordinator are killed, nodes leave and come.

Four nodes of one rank each train a model that counts its records (`scripts/counting.py`). At steps that
are drawn beforehand something is killed; in between two nodes leave, and two come. The job must end by
itself, and the model must have used each record exactly once an epoch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from harness import processes
from harness.launchers import free_port
from harness.lines import Line, count
from harness.setting import say

SCRIPT = Path(__file__).parent.parent / "scripts" / "counting.py"
LIMIT_S = 240.0
BATCH = 500


@dataclass
class Cluster:
    folder: Path
    job: str
    script: list[str]
    port: int = field(default_factory=free_port)
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_all(self, nodes: int) -> None:
        """Start nodes, the first with the coordinator."""
        self.start()
        home = self.folder / "home" / "jobs" / self.job / "job.json"
        deadline = time.monotonic() + LIMIT_S
        while not home.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        for _ in range(nodes - 1):
            self.start()

    def start(self) -> None:
        """Start one more node."""
        flags = ["--nproc-per-node", "1", "--nnodes", "1:4", "--job", self.job]
        flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        log = (self.folder / f"node-{len(self.nodes)}.log").open("wb")
        with log:
            node = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "run", *flags, *self.script],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HOLDFAST_HOME": str(self.folder / "home")},
                preexec_fn=processes.die_with_parent,
            )
        self.nodes.append(node)

    def step(self) -> int:
        try:
            return int((self.folder / "step").read_text() or 0)
        except FileNotFoundError:
            return 0

    def await_step(self, step: int) -> bool:
        """Wait for a step; return whether the job got there before it ended."""
        deadline = time.monotonic() + LIMIT_S
        while self.step() < step:
            if self.nodes[0].poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job stands at step {self.step()}")
            time.sleep(0.02)
        return True

    def kill(self, what: str, dice: random.Random) -> None:
        """Kill a process of that kind, on any node."""
        name = {"coordinator": "holdfast-coord", "agent": "holdfast-agent"}.get(what)
        living = processes.descendants()
        ranks = {int(file.read_text()) for file in self.folder.glob("pid_*")}
        found = [one.pid for one in living if one.name == name or (not name and one.pid in ranks)]
        if found:
            _kill(dice.choice(found))

    def lose_node(self) -> None:
        """Kill a node with all that runs on it, but not the one with the coordinator."""
        living = [node for node in self.nodes[1:] if node.poll() is None]
        for process in [living[0].pid, *(one.pid for one in processes.below(living[0].pid))]:
            _kill(process)
        living[0].wait()

    def codes(self) -> list[int | None]:
        deadline = time.monotonic() + LIMIT_S
        while any(node.poll() is None for node in self.nodes) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [node.poll() for node in self.nodes]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def trial(folder: Path, sharing: str, seed: int, records: int, epochs: int) -> tuple[bool, str]:
    """Run one job with the faults of a seed; return whether each record was used once an epoch."""
    dice = random.Random(seed)
    folder.mkdir(parents=True)
    words = [f"--records={records}", f"--epochs={epochs}", f"--batch={BATCH}"]
    words += [f"--sharing={sharing}", f"--folder={folder}", f"--workers={2 * (seed % 2)}"]
    cluster = Cluster(folder, f"count-{sharing}-{seed}", [str(SCRIPT), *words])
    try:
        cluster.start_all(4)
        faults = _play(cluster, dice, records * epochs // BATCH)
        codes = cluster.codes()
    finally:
        processes.end_descendants([node.pid for node in cluster.nodes])
        for node in cluster.nodes:
            node.wait()
    result_file = folder / "result.json"
    if not result_file.exists():
        return False, f"no result, exit codes {codes}, after {faults}"
    result = json.loads(result_file.read_text())
    exact = result["used"] == [0, records * epochs]
    return exact, f"used {result['used']} in {result['steps']} steps, after {', '.join(faults)}"


def _play(cluster: Cluster, dice: random.Random, at_one_rank: int) -> list[str]:
    """Kill what was drawn, at steps in the first part of the job; return what was done."""
    whole = at_one_rank // 4
    plan = [(whole * 3 // 10, "4 to 2"), (whole * 5 // 10, "2 to 3"), (whole * 6 // 10, "3 to 4")]
    kinds = ["worker", "worker", "worker", "agent", "agent", "coordinator", "coordinator"]
    plan += [(dice.randrange(20, whole), kind) for kind in kinds]
    done = []
    for step, what in sorted(plan):
        if not cluster.await_step(step):
            break
        if what == "4 to 2":
            cluster.lose_node()
            cluster.lose_node()
        elif what in ("2 to 3", "3 to 4"):
            cluster.start()
        else:
            cluster.kill(what, dice)
        done.append(f"{what} at {step}")
    return done


def measure(folder: Path, seeds: int, records: int, epochs: int) -> list[Line]:
    found = []
    for sharing in ("lockstep", "leases"):
        good, seen = 0, []
        for seed in range(seeds):
            exact, how = trial(folder / f"{sharing}-{seed}", sharing, seed, records, epochs)
            say(f"{sharing}, seed {seed}: {'exact' if exact else 'NOT EXACT'}: {how}")
            good += exact
            seen.append(how)
        found.append(count(f"jobs with each record once, {sharing}", good, seeds, samples=seen))
    return found
