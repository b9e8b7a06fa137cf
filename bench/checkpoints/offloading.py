"""Measures what an overlapped save costs a training step whose optimizer runs on the CPU.

The model computes on the accelerator where there is one; master weights and Adam's moments are in host
memory, as with DeepSpeed's offload. So the optimizer's step competes with the copy for the cores and
for memory bandwidth, and it has to wait for the copy before it may change anything.

Steps with a save alternate with steps without one; a step with a save is compared with its neighbours.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from checkpoints import states
from checkpoints.contestants import Holdfast, SaveFailedError
from checkpoints.lines import Line, Seconds, milliseconds
from checkpoints.setting import Setting
from checkpoints.timing import wait_for_shared_memory

WIDTH = 2048
ROWS = 64
BATCHES = {"cuda": 32, "cpu": 2}
PAIRS = 6
"""Steps with a save, per try."""


class Offloaded:
    """A multilayer perceptron whose weights and optimizer state live in host memory."""

    def __init__(self, size: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        layers = max(1, round(size / (1 + states.MOMENTS) / (4 * WIDTH * WIDTH)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.masters = nn.ParameterList([p.detach().cpu().clone() for p in self.model.parameters()])
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=1e-5, fused=True)
        self._inputs = torch.ones(ROWS, WIDTH, device=self.device)

    def step(self) -> None:
        for _ in range(BATCHES[self.device]):
            torch.autograd.backward(self.model(self._inputs).square().mean())
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.cpu()
            weight.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.model.parameters(), self.masters, strict=True):
                weight.copy_(master)
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(told: dict[str, Any]) -> list[dict[str, Any]]:
    setting = Setting(**told)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    training = Offloaded(setting.size)
    saving = Holdfast({"masters": training.masters, "optim": training.optimizer})
    training.step()
    size = states.bytes_of(training.masters, training.optimizer)
    wait_for_shared_memory(2 * size)
    samples: dict[str, list[Seconds]] = {"none": [], "save costs": [], "call": []}
    for turn in range(1 + setting.tries):
        steps, calls = _steps(training, saving)
        if turn:
            samples["none"] += steps[::2]
            samples["save costs"] += [
                steps[n] - (steps[n - 1] + steps[n + 1]) / 2 for n in range(1, len(steps), 2)
            ]
            samples["call"] += calls
    step_s, cost_s, call_s = (median(samples[name]) for name in ("none", "save costs", "call"))
    line = Line(
        f"overlapped save of {size / 1e9:.2g} GB, optimizer on the CPU, of the step",
        100 * cost_s / step_s,
        "%",
        at_most=100.0,
        seen=f"step {milliseconds(step_s)} on {training.device}, a save costs"
        f" {milliseconds(cost_s)}, of which in the call {milliseconds(call_s)}",
        samples=samples,
    )
    return [asdict(line)]


def _steps(training: Offloaded, saving: Holdfast) -> tuple[list[Seconds], list[Seconds]]:
    """Time steps, every other one with a save before it; also the time each `save` call took."""
    times, calls, ticket = [], [], None
    for number in range(2 * PAIRS + 1):
        began = perf_counter()
        if number % 2:
            ticket = saving.begin()
            calls.append(perf_counter() - began)
        training.step()
        times.append(perf_counter() - began)
        if ticket is not None:
            outcome = ticket.memory().outcome
            if outcome != "saved":
                raise SaveFailedError(f"the save {outcome}")
            ticket = None
    return times, calls
