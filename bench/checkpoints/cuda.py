"""The same on a GPU: how fast a state leaves it, and whether training notices.

The limit is a copy of as many bytes from the device into pinned memory, in the same process. Steps are
matrix products with AdamW behind them; they are timed on the device's own clock, from the end of one to
the end of the next, so whatever holds the device up is in them. Blocks of steps with a save in each
and without any take turns.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from checkpoints import fresh, states
from checkpoints.contestants import Holdfast, SaveFailedError, Torch
from checkpoints.lines import Line, Seconds, medians, milliseconds, speed
from checkpoints.setting import Setting
from checkpoints.timing import alternate, wait_for_shared_memory

WIDTH = 4096
ROWS = 8192
STEP_S: Seconds = 0.5
STEPS = 8
"""In a block."""
TORCHS_TRIES = 3
TORCHS_LIMIT_S = 100.0
BLOCKING_GB_S = 50.0


class Training:
    """A multilayer perceptron in bfloat16 over float32 weights.

    Each step ends with a look at the loss, as most loops have one: so the host does not run ahead, and
    what a call takes it takes from training.
    """

    def __init__(self, size: int) -> None:
        layers = max(1, round(size / (1 + states.MOMENTS) / (4 * WIDTH * WIDTH)))
        with torch.device("cuda"):
            linear = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
            self.model = nn.Sequential(*(part for one in linear for part in (one, nn.ReLU())))
            self._inputs = torch.randn(ROWS, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._batches = 1
        self.loss = 0.0

    def step(self) -> None:
        for _ in range(self._batches):
            with torch.autocast("cuda", torch.bfloat16):
                outputs = self.model(self._inputs)
            loss = outputs.float().square().mean()
            torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = float(loss.detach())

    def make_steps_last(self, seconds: Seconds) -> None:
        """Choose how many batches make a step."""
        times = []
        for self._batches in (1, 2):
            self.step()
            torch.cuda.synchronize()
            began = perf_counter()
            self.step()
            torch.cuda.synchronize()
            times.append(perf_counter() - began)
        of_a_batch = max(times[1] - times[0], 1e-3)
        self._batches = max(1, 1 + round((seconds - times[0]) / of_a_batch))

    def block(self, after: Callable[[], object]) -> list[Seconds]:
        """Some steps, with what comes after each; on the device's clock."""
        torch.cuda.synchronize()
        marks = [self._mark()]
        for _ in range(STEPS):
            self.step()
            after()
            marks.append(self._mark())
        marks[-1].synchronize()
        return [before.elapsed_time(later) / 1000 for before, later in pairwise(marks)]

    @staticmethod
    def _mark() -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark


def measure(told: dict[str, Any]) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return [asdict(Line("cuda", None, why="there is no GPU here", skipped=True))]
    setting = Setting(**told)
    training = Training(setting.size)
    state = {"model": training.model, "optim": training.optimizer}
    saving = Holdfast(state)
    training.make_steps_last(STEP_S)  # It takes a first step, and memory is made ready after that.
    size = states.bytes_of(training.model, training.optimizer)
    wait_for_shared_memory(2 * size)
    lines = [_blocking(setting, saving, state, size)]
    lines += _overlapped(setting, training, saving)
    return [asdict(line) for line in lines]


def _blocking(setting: Setting, saving: Holdfast, state: dict[str, Any], size: int) -> Line:
    def save() -> Seconds:
        torch.cuda.synchronize()
        return saving.block()

    contestants = {"pinned": _Pinned(size).copy, "save": save}
    samples = alternate(setting.tries, contestants, warm=2)
    contestants.clear()
    samples["async_save"], why_not = _torchs(setting)
    found = medians(samples)
    theirs = found.get("async_save")
    return Line(
        f"cuda: blocking save of {size / 2**30:.2f} GiB in {_tensors(state)} tensors",
        found["save"],
        "s",
        at_most=size / BLOCKING_GB_S / 1e9,
        torchs=theirs,
        seen=f"{speed(size, found['save'])}, a pinned copy {speed(size, found['pinned'])}"
        f" ({100 * found['pinned'] / found['save']:.0f} % of it), async_save"
        f" {speed(size, theirs) if theirs else why_not}",
        samples=samples,
    )


def _torchs(setting: Setting) -> tuple[list[Seconds], str]:
    """What `async_save` takes, or why that is not known: ours are worth having without it."""
    free = shutil.disk_usage(setting.in_memory).free
    if free < setting.size * 1.1:
        return [], f"has no room: {free / 1e9:.1f} GB are free in /dev/shm"
    try:
        return fresh.call("checkpoints.cuda:torchs", setting.plain(), limit_s=TORCHS_LIMIT_S), ""
    except fresh.TaskError as error:
        return [], f"failed: {error}"


def torchs(told: dict[str, Any]) -> list[Seconds]:
    setting = Setting(**told)
    training = Training(setting.size)
    training.step()
    state = {"model": training.model, "optim": training.optimizer}
    saving = Torch(state, setting.in_memory)
    return [saving.async_save() for _ in range(TORCHS_TRIES)]


class _Pinned:
    """The most that the way from the device to the host can do."""

    def __init__(self, size: int) -> None:
        self._source = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._target = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self) -> Seconds:
        torch.cuda.synchronize()
        began = perf_counter()
        self._target.copy_(self._source, non_blocking=True)
        torch.cuda.synchronize()
        return perf_counter() - began


def _tensors(state: dict[str, Any]) -> int:
    moments = sum(len(of_one) for of_one in state["optim"].state.values())
    return len(state["model"].state_dict()) + moments


def _overlapped(setting: Setting, training: Training, saving: Holdfast) -> list[Line]:
    calls: list[Seconds] = []
    tickets: list[Any] = []

    def save() -> None:
        began = perf_counter()
        tickets.append(saving.begin())
        calls.append(perf_counter() - began)

    samples: dict[str, list[Seconds]] = {"none": [], "save": [], "call": []}
    for turn in range(1 + max(2, setting.tries // 2)):
        none = training.block(lambda: None)
        ours = training.block(save)
        results = [ticket.memory() for ticket in tickets]
        failed = [result.reason for result in results if result.outcome == "failed"]
        if failed:
            raise SaveFailedError(f"{len(failed)} of {len(results)}: {failed[0]}")
        if turn:
            samples["none"] += none
            samples["save"] += ours
            samples["call"] += calls
        calls.clear()
        tickets.clear()
    found = medians(samples)
    step = found["none"]
    slower = 100 * (found["save"] - step) / step
    seen = (
        f"step {milliseconds(step)}, with a save {milliseconds(found['save'])} (means"
        f" {milliseconds(mean(samples['none']))}, {milliseconds(mean(samples['save']))}), the call"
        f" {milliseconds(found['call'])}, at most {milliseconds(max(samples['call']))}"
    )
    return [
        Line(
            "cuda: step with an overlapped save, slower by",
            slower,
            "%",
            at_most=1.0,
            seen=seen,
            samples=samples,
        ),
        Line(
            "cuda: call of an overlapped save, of the step",
            100 * median(samples["call"]) / step,
            "%",
            at_most=1.0,
            seen=seen,
        ),
    ]
