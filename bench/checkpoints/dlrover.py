"""DLRover's flash checkpoint beside ours: what its save to memory holds training up for.

It is installed as for `recovery.py`, into an environment of its own, and started without its launcher:
then it starts the process that would save for it by itself. Where it cannot be installed or does not
run, that is said and nothing more.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import peers
from harness.launchers import FOREIGN, LauncherMissingError
from harness.setting import say

from checkpoints import fresh
from checkpoints.contestants import Holdfast
from checkpoints.leftovers import run_name
from checkpoints.lines import Line, Seconds, medians, milliseconds, speed
from checkpoints.saving import BOTH_IMAGES, SMALL_BYTES, SMALL_TENSORS, TENSORS
from checkpoints.setting import Setting
from checkpoints.states import tensors
from checkpoints.timing import alternate
from checkpoints.yardsticks import Memory

SCRIPT = fresh.BENCH / "scripts" / "dlrover_save.py"
LIMIT_S = 300.0
ROUNDS = 2
Samples = dict[str, list[Seconds]]


def measure(told: dict[str, Any]) -> list[dict[str, Any]]:
    setting = Setting(**told)
    what = "DLRover 0.6.1, save to memory"
    try:
        peers.peer("dlrover", Path(setting.cache), say)
        parts = [
            (size, count, *_both(setting, size, count))
            for size, count in (
                (setting.size, TENSORS),
                (SMALL_TENSORS * SMALL_BYTES, SMALL_TENSORS),
            )
        ]
    except (LauncherMissingError, NotRunningError) as error:
        return [asdict(Line(what, None, why=str(error), skipped=True))]
    return [asdict(_line(what, *part)) for part in parts]


def _line(what: str, size: int, count: int, theirs: Samples, ours: Samples) -> Line:
    found, mine = medians(theirs), medians(ours)
    return Line(
        f"{what}, {count} tensors, of ours",
        found["save"] / mine["save"],
        "x",
        seen=f"{milliseconds(found['save'])} ({speed(size, found['save'])}), of which metadata"
        f" {milliseconds(found['metadata'])}, first save {milliseconds(found['first'])}; ours"
        f" {milliseconds(mine['save'])} ({speed(size, mine['save'])}); memcpy there"
        f" {speed(size, found['memcpy'])}, here {speed(size, mine['memcpy'])}",
        samples=theirs | {f"holdfast, {name}": times for name, times in ours.items()},
    )


class NotRunningError(RuntimeError):
    """It is there, but does not do it."""


def _both(setting: Setting, size: int, count: int) -> tuple[Samples, Samples]:
    """DLRover and holdfast in turns, each time in a fresh process."""
    theirs: Samples = {}
    ours: Samples = {}
    for _ in range(ROUNDS):
        _add(theirs, _theirs(setting, size, count))
        _add(ours, fresh.call("checkpoints.dlrover:ours", setting.plain(), size, count))
    return theirs, ours


def _add(samples: Samples, more: Samples) -> None:
    for name, times in more.items():
        samples.setdefault(name, []).extend(times)


def _theirs(setting: Setting, size: int, count: int) -> Samples:
    run_id = f"{run_name(setting.in_memory.parent)}-{count}"
    result, folder = setting.on_disk / f"{count}.json", setting.on_disk / f"dlrover-{count}"
    options = {"size": size, "count": count, "tries": setting.tries, "folder": folder, "to": result}
    command = [f"{setting.cache}/dlrover/bin/python", str(SCRIPT)]
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = FOREIGN | {"PYTHONPATH": str(fresh.BENCH), "TORCHELASTIC_RUN_ID": run_id}
    try:
        subprocess.run(command, env=os.environ | environment, stdout=2, timeout=LIMIT_S, check=True)
        found: Samples = json.loads(result.read_text())
        return found
    except subprocess.SubprocessError as error:
        raise NotRunningError(f"DLRover does not run here: {error}"[:200]) from None


def ours(told: dict[str, Any], size: int, count: int) -> Samples:
    """The same for holdfast, in a process that is as fresh."""
    memory = Memory(size)
    saving = Holdfast({"state": tensors(size, count)})
    contestants = {"memcpy": memory.memcpy, "save": saving.block}
    return alternate(Setting(**told).tries, contestants, warm=BOTH_IMAGES)
