"""The global batch stays: nodes leave and come, and the parameters are those of a single process.

Four nodes of one rank each train `scripts/elastic.py`; two of them are killed, one comes back. The same
script, run by one process alone, says what the parameters should be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from harness import processes
from harness.lines import Line
from harness.setting import say

from feeding.exact import Cluster

SCRIPT = Path(__file__).parent.parent / "scripts" / "elastic.py"


def reference(folder: Path) -> dict[str, torch.Tensor]:
    """Train in one process."""
    folder.mkdir(parents=True)
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), "0"],
        env=alone,
        check=True,
        capture_output=True,
        timeout=300,
    )
    return _parameters(folder)


def resized(folder: Path) -> tuple[dict[str, torch.Tensor], list[int | None]]:
    """Train with 4, then 2, then 3 ranks."""
    folder.mkdir(parents=True)
    cluster = Cluster(folder, "batches", [str(SCRIPT), str(folder), "10"])
    try:
        cluster.start_all(4)
        cluster.await_step(60)
        cluster.lose_node()
        cluster.lose_node()
        cluster.await_step(150)
        cluster.start()
        codes = cluster.codes()
    finally:
        processes.end_descendants([node.pid for node in cluster.nodes])
        for node in cluster.nodes:
            node.wait()
    return _parameters(folder), codes


def _parameters(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "parameters.pt", weights_only=True)
    return found


def measure(folder: Path) -> list[Line]:
    alone = reference(folder / "alone")
    found, codes = resized(folder / "resized")
    steps = alone.pop("steps"), found.pop("steps")
    apart = max(float((alone[name] - found[name]).abs().max()) for name in alone)
    say(f"steps {steps}, exit codes {codes}, parameters {apart:.1e} apart")
    seen = f"{apart:.1e} after {steps[1]} steps with 4, 2 and 3 ranks; {steps[0]} alone"
    return [
        Line("parameters apart from one process's, in 1e-6", apart / 1e-6, at_most=1.0, seen=seen)
    ]
