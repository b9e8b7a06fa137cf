"""One rank is killed once, in scripts that other people's frameworks train.

The same tries as for one kill, but with transformers' Trainer, an accelerate loop and Lightning's
Trainer: what they import takes seconds, so a launcher is only as quick as what it has imported before.
A framework that is not installed is named and left out. Holdfast learns from the first life of a script
what it imports, and imports that at the lowest priority, so it needs some seconds of training before it
is as quick as it can be.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.launchers import LauncherMissingError
from harness.report import Report
from harness.setting import Setting, say

from modes import one_kill

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
PROGRAMS = {
    "transformers": SCRIPTS / "hf_trainer.py",
    "accelerate": SCRIPTS / "accelerate_loop.py",
    "lightning": SCRIPTS / "lightning_fit.py",
}
"""The script of each framework, by the name of the module it needs."""


def run(setting: Setting, names: Sequence[str]) -> Report:
    programs = {name: PROGRAMS[name] for name in _present(names)}
    reports = {
        name: one_kill.run(replace(setting, program=program)) for name, program in programs.items()
    }
    columns = ["framework", *next(iter(reports.values())).columns]
    rows = [[name, *row] for name, report in reports.items() for row in report.rows]
    notes = ["medians; hf/ is holdfast's median over this launcher's, from this run"]
    results: list[dict[str, Any]] = [
        {"framework": name, **one} for name, report in reports.items() for one in report.results
    ]
    summary = {name: report.summary for name, report in reports.items()}
    return Report("frameworks", columns, rows, notes, results, summary)


def _present(names: Sequence[str]) -> list[str]:
    present = [name for name in names if importlib.util.find_spec(name) is not None]
    missing = [name for name in names if name not in present]
    if missing:
        say(f"{sys.executable} has no {', '.join(missing)}: not measured")
    if not present:
        raise LauncherMissingError(
            f"no framework to measure: {sys.executable} -m pip install {' '.join(names)}"
        )
    return present
