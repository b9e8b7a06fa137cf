"""The same exception under NVRx's in-process restart, as far as it runs without a GPU.

Its own hooks look for CUDA devices and end the process where there is none, so the script replaces
them. If it does not run at all, the line says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from harness import peers
from harness.job import JobError
from harness.launchers import FOREIGN, Command, Launch, Launcher, free_port
from harness.lines import Line
from harness.marks import Seconds
from harness.setting import say

from restarting.jobs import Setting

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "nvrx_restarting.py"
RANKS = 2
BETWEEN_S: Seconds = 3.0


def measure(setting: Setting, cache: Path) -> list[Line]:
    peers.peer("nvrx", cache, say)
    what = "NVRx: exception in one of 2, both entered again"
    times: list[Seconds] = []
    note = ""
    launcher = _launcher(cache.resolve() / "nvrx")
    try:
        with setting.job(RANKS, launcher=launcher, program=SCRIPT) as job:
            stepped = job.wait_for_steps(setting.limit)
            for _ in range(setting.tries):
                job.train_until(stepped + BETWEEN_S)
                struck = job.break_(1, "raise@after")
                stepped = job.wait_for_steps(setting.limit, after=struck)
                times.append(max(job.life(rank).begun for rank in range(RANKS)) - struck)
                say(f"nvrx: both entered again after {times[-1]:.3f} s")
    except JobError as failure:
        note = str(failure)
    seen = f"{len(times)} times, {min(times):.2f} to {max(times):.2f} s" if times else ""
    return [Line(what, median(times) if times else None, "s", seen=seen, why=note, samples=times)]


def _launcher(environment: Path) -> Launcher:
    """One process a rank, with the Python of NVRx's environment."""
    python = str(environment / "bin" / "python")

    def launch(_: str, ranks: int, script: Sequence[str]) -> Launch:
        world = FOREIGN | {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        return Launch(
            [
                Command([python, *script], world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(ranks)
            ]
        )

    return Launcher("nvrx", launch)
