"""From memory to storage: a checkpoint against a plain file of as many bytes.

What is counted begins when the snapshot is in memory, digests and all, and ends when the checkpoint is
durable and committed. That is the keeper's part; training sees none of it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from typing import Any

from checkpoints import states
from checkpoints.contestants import Holdfast, Torch
from checkpoints.lines import Line, Seconds, medians, speed
from checkpoints.saving import TENSORS
from checkpoints.setting import Setting
from checkpoints.timing import alternate
from checkpoints.yardsticks import PlainWrite


def measure(told: dict[str, Any]) -> list[dict[str, Any]]:
    setting = Setting(**told)
    tensors = states.tensors(setting.size, TENSORS)
    size = sum(tensor.nbytes for tensor in tensors.values())
    state = {"state": tensors}
    ours = setting.on_disk / "checkpoints"
    holdfast, torchs = Holdfast(state, ours), Torch(state, setting.on_disk)
    in_all: list[Seconds] = []

    def persist() -> Seconds:
        os.sync()
        seconds, whole = holdfast.persist()
        in_all.append(whole)
        shutil.rmtree(ours)
        return seconds

    def save() -> Seconds:
        os.sync()
        seconds = torchs.save()
        torchs.remove()
        return seconds

    contestants = {
        "plain": PlainWrite(setting.on_disk, size).write,
        "persist": persist,
        "dcp.save": save,
    }
    samples = alternate(setting.tries, contestants)
    samples["from the call on"] = in_all[1:]
    found = medians(samples)
    line = Line(
        f"persist {size / 1e9:.2g} GB, of a plain write with fsync",
        100 * found["plain"] / found["persist"],
        "%",
        at_least=90.0,
        torchs=100 * found["plain"] / found["dcp.save"],
        seen=f"{speed(size, found['persist'])}, plain {speed(size, found['plain'])}, dcp.save"
        f" {speed(size, found['dcp.save'])}; from the call on {found['from the call on']:.2f} s",
        samples=samples,
    )
    return [asdict(line)]
