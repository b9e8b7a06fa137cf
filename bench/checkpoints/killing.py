"""A rank is killed in a real job: how long until every rank has stepped again, with its state back?

The script has 200 MB of state on each of two ranks. Under `holdfast run` it comes back from memory,
and if it comes from anywhere else the try has failed. Under torchrun the same script writes a file by
`torch.save` now and then, and reads it back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import launchers, processes
from harness.job import Job, JobError
from harness.launchers import Launch, Launcher
from harness.setting import say

from checkpoints.lines import Line, Seconds, medians
from checkpoints.setting import Setting

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "keep.py"
SIZE = 200_000_000
RANKS = 2
SETTLE_S: Seconds = 4.0
LIMIT_S: Seconds = 60.0
PHASES = ("until the script began", "until it restored", "restore", "first step")


def measure(told: dict[str, Any]) -> list[dict[str, Any]]:
    setting = Setting(**told)
    processes.adopt_orphans()
    samples: dict[str, list[Seconds]] = {}
    failures: list[str] = []
    tries = max(2, setting.tries // 2)
    for turn in range(tries):
        for launcher, keep in ((launchers.holdfast(), "holdfast"), (launchers.torchrun(), "torch")):
            try:
                found = _try(setting, launcher, keep, turn)
            except JobError as failure:
                failures.append(f"{launcher.name}: {failure}")
                say(failures[-1])
                continue
            for phase, seconds in found.items():
                samples.setdefault(f"{launcher.name}, {phase}", []).append(seconds)
    return [asdict(_line(samples, failures, tries))]


def _line(samples: dict[str, list[Seconds]], failures: list[str], tries: int) -> Line:
    found = medians(samples)
    what = f"kill to a step on all of {RANKS} ranks, {SIZE // 10**6} MB each from memory"
    back = len(samples.get("holdfast, in all", []))
    if back < tries:
        return Line(
            what, None, "s", why=f"came back {back} of {tries} times; {'; '.join(failures)}"
        )
    phases = ", ".join(f"{phase} {found[f'holdfast, {phase}']:.3f} s" for phase in PHASES)
    theirs = len(samples.get("torchrun, in all", []))
    return Line(
        what,
        found["holdfast, in all"],
        "s",
        torchs=found.get("torchrun, in all"),
        seen=f"{phases}; torchrun with torch.save came back {theirs} of {tries} times",
        samples=samples,
    )


def _try(setting: Setting, launcher: Launcher, keep: str, turn: int) -> dict[str, Seconds]:
    folder = setting.on_disk / f"{keep}-{turn}"
    notes = folder / "notes"
    script = [f"--with={keep}", f"--notes={notes}", f"--file={folder / 'state.pt'}"]
    script.append(f"--size={SIZE}")
    job = Job(f"{keep}-{turn}", _with_script(launcher), RANKS, folder, script)
    notes.mkdir()
    try:
        with job:
            first = job.wait_for_steps(LIMIT_S)
            job.train_until(first + SETTLE_S)
            if keep == "torch":
                job.wait_for("a file", (folder / "state.pt").exists, LIMIT_S)
            killed = job.kill(rank=1)
            if killed is None:
                raise JobError("the rank was gone before it could be killed")
            back = job.wait_for_steps(LIMIT_S, after=killed)
            return _phases(job, notes, killed, back, "memory" if keep == "holdfast" else "file")
    finally:
        job.discard()


def _with_script(launcher: Launcher) -> Launcher:
    """The same launcher for another script than the bench's usual one."""

    def launch(job: str, ranks: int, script: Sequence[str]) -> Launch:
        return launcher.launch(job, ranks, [str(SCRIPT), *script[1:]])

    return Launcher(launcher.name, launch)


def _phases(
    job: Job, notes: Path, killed: Seconds, back: Seconds, wanted: str
) -> dict[str, Seconds]:
    """Where the time went, on the rank that was the last in each; all of them restored as wanted."""
    new = [json.loads(path.read_text()) for path in notes.iterdir()]
    new = [note for note in new if note["began"] > killed]
    wrong = [note["where"] for note in new if note["where"] != wanted]
    if len(new) < RANKS or wrong:
        raise JobError(f"{len(new)} ranks restored, {wrong} not from {wanted}")
    begun = [life.begun for life in job.marks.lives if life.begun > killed]
    moments = [killed, max(begun), *(max(note[key] for note in new) for key in ("began", "done"))]
    moments.append(back)
    spans = [after - before for before, after in pairwise(moments)]
    return {**dict(zip(PHASES, spans, strict=True)), "in all": back - killed}
