"""A save that copies everything before it returns: beside `memcpy`, the first time, with small tensors.

This is the worst that a save can cost, when nothing of it can go on beside training.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from checkpoints import fresh, states
from checkpoints.contestants import Holdfast, Torch
from checkpoints.lines import Line, Seconds, medians, milliseconds, speed
from checkpoints.setting import Setting
from checkpoints.timing import alternate, wait_for_shared_memory
from checkpoints.yardsticks import Memory

TENSORS = 200
SMALL_TENSORS = 20_000
SMALL_BYTES = 4096
BOTH_IMAGES = 2
"""So many saves until each image was used once."""


def repeat(told: dict[str, Any]) -> list[dict[str, Any]]:
    """A later save of large tensors, against a copy of as many bytes."""
    setting = Setting(**told)
    tensors = states.tensors(setting.size, TENSORS)
    size = sum(tensor.nbytes for tensor in tensors.values())
    samples = _samples(setting, {"state": tensors}, size, setting.tries)
    found = medians(samples)
    line = Line(
        f"repeat save of {size / 1e9:.2g} GB in {TENSORS} tensors, of memcpy",
        100 * found["memcpy"] / found["save"],
        "%",
        at_least=85.0,
        torchs=100 * found["memcpy"] / found["async_save"],
        seen=f"{_speeds(found, size)}; async_save blocks {milliseconds(found['async_save'])}",
        samples=samples,
    )
    return [asdict(line)]


def small(told: dict[str, Any]) -> list[dict[str, Any]]:
    """What thousands of small tensors cost beyond their bytes."""
    setting = Setting(**told)
    count = SMALL_TENSORS
    tensors = states.tensors(count * SMALL_BYTES, count)
    size = count * SMALL_BYTES
    samples = _samples(setting, {"state": tensors}, size, setting.tries)
    found = medians(samples)
    line = Line(
        f"{count} tensors of {SMALL_BYTES // 1024} kB, over the copy",
        1000 * (found["save"] - found["memcpy"]),
        "ms",
        at_most=30.0,
        torchs=1000 * (found["async_save"] - found["memcpy"]),
        seen=f"save {milliseconds(found['save'])}, memcpy {milliseconds(found['memcpy'])}",
        samples=samples,
    )
    return [asdict(line)]


def _samples(
    setting: Setting, state: dict[str, Any], size: int, tries: int
) -> dict[str, list[Seconds]]:
    memory = Memory(size)
    contestants = {
        "memcpy": memory.memcpy,
        "torch copy_": memory.torch_copy,
        "save": Holdfast(state).block,
        "async_save": Torch(state, setting.in_memory).async_save,
    }
    return alternate(tries, contestants, warm=BOTH_IMAGES)


def _speeds(found: dict[str, Seconds], size: int) -> str:
    return ", ".join(
        f"{name} {speed(size, found[name])}" for name in ("save", "memcpy", "torch copy_")
    )


# ---- the first one ------------------------------------------------------------------------------


def first(told: dict[str, Any]) -> list[dict[str, Any]]:
    """The first save of a process against later ones, each time in a fresh process."""
    setting = Setting(**told)
    tries = max(1, setting.tries // 2)
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for _ in range(tries):
        ours.append(fresh.call("checkpoints.saving:first_and_later", told))
        theirs.append(fresh.call("checkpoints.saving:torchs_first_and_later", told))
    samples = {
        "first": [one["first"] for one in ours],
        "later": [seconds for one in ours for seconds in one["later"]],
        "ready after": [one["ready"] for one in ours],
        "async_save first": [one["first"] for one in theirs],
        "async_save later": [seconds for one in theirs for seconds in one["later"]],
    }
    found = medians(samples)
    line = Line(
        "first save, of later ones",
        found["first"] / found["later"],
        "x",
        at_most=1.5,
        torchs=found["async_save first"] / found["async_save later"],
        seen=f"first {milliseconds(found['first'])}, later {milliseconds(found['later'])}; memory was"
        f" ready {found['ready after']:.2f} s after the first step",
        samples=samples,
    )
    return [asdict(line)]


def first_and_later(told: dict[str, Any]) -> dict[str, Any]:
    """As in training: a step, time to make memory ready, and then saves."""
    setting = Setting(**told)
    model, optimizer = states.trained(setting.size, TENSORS)
    saving = Holdfast({"model": model, "optim": optimizer})
    states.step(optimizer)
    size = states.bytes_of(model, optimizer)
    ready = wait_for_shared_memory(BOTH_IMAGES * size)
    times = [saving.block() for _ in range(1 + max(3, setting.tries))]
    return {"first": times[0], "later": times[1:], "ready": ready}


def torchs_first_and_later(told: dict[str, Any]) -> dict[str, Any]:
    setting = Setting(**told)
    model, optimizer = states.trained(setting.size, TENSORS)
    saving = Torch({"model": model, "optim": optimizer}, setting.in_memory)
    states.step(optimizer)
    times = [saving.async_save() for _ in range(3)]
    return {"first": times[0], "later": [median(times[1:])]}
