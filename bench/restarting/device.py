"""On a GPU: a function that raises with work in flight is entered again, and the device's memory stays
what it was. Needs a CUDA device, and a torch that can use it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from harness.lines import Line
from harness.setting import say

from restarting.jobs import Setting

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "restarting_cuda.py"
RESTARTS = 50
SETTLED = 20
"""By this restart, standbys hold their part of the device."""
RANKS = {"gloo": 2, "nccl": 1}
"""NCCL wants a GPU for each rank."""


def measure(setting: Setting, backend: str) -> list[Line]:
    """Measure restarts on the device; without one, say so."""
    what = f"cuda, {backend}: raise with work in flight → next step"
    if not _has_device():
        return [Line(what, None, "s", at_most=0.3, why="there is no CUDA device here")]
    say(f"{RESTARTS} restarts on the GPU, {RANKS[backend]} ranks, {backend}")
    file = setting.folder / f"cuda-{backend}"
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", str(RANKS[backend])]
    command += [str(SCRIPT), str(RESTARTS), backend, str(file)]
    log = file.with_suffix(".log")
    with log.open("wb") as out:
        subprocess.run(command, stdout=out, stderr=out, timeout=5 * setting.limit, check=True)
    found = [
        json.loads(one.read_text()) for one in sorted(setting.folder.glob(f"{file.name}.[0-9]"))
    ]
    seconds = [second for one in found for second in one["seconds"]]
    grown = max(one["used"][-1] - one["used"][SETTLED] for one in found)
    seen = f"{len(seconds)} of {RESTARTS * RANKS[backend]}, slowest {max(seconds):.2f} s"
    return [
        Line(what, median(seconds), "s", at_most=0.3, seen=seen, samples=seconds),
        Line(
            f"cuda, {backend}: growth of device memory, MiB",
            grown / (1 << 20),
            at_most=0.0,
            seen=f"from restart {SETTLED} to {RESTARTS}",
        ),
    ]


def _has_device() -> bool:
    asked = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asked]).returncode == 0
