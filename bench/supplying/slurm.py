"""Slurm: overhead of a start over `srun torchrun`, a lost node with a spare, steps lost by a requeue.

What is done is in `modes/slurm.py`; here it is compared with the goals.
"""

from __future__ import annotations

import sys

from harness.setting import Setting
from modes import slurm

from supplying.lines import Line, Skipped

TORCHRUN = "start, srun torchrun"


def run(setting: Setting) -> list[Line]:
    sys.path.insert(0, str(slurm.BENCH.parent))
    from tests.engines.slurm import missing

    why = missing()
    if why is not None:
        raise Skipped(why)
    found = slurm.run(setting.tries, list(slurm.SCENARIOS)).results
    plain = {one["turn"]: one["seconds"] for one in found if one["scenario"] == TORCHRUN}
    lines = []
    for name in ("start, srun holdfast run", "start, holdfast submit slurm"):
        own = [one for one in found if one["scenario"] == name]
        over = [one["seconds"] - plain[one["turn"]] for one in own]
        lines.append(Line("slurm", f"{name}, over srun torchrun", goal=0.0, values=over))
    lost = [one["seconds"] for one in found if one["scenario"] == "node lost, spare"]
    lines.append(Line("slurm", "node lost, a spare takes its place", goal=3.0, values=lost))
    again = [float(one["steps_again"]) for one in found if one["scenario"] == "requeue"]
    most = float(slurm.CHECKPOINT_EVERY)
    lines.append(Line("slurm", "steps done again after a requeue", "steps", most, again))
    return lines
