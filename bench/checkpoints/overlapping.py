"""What a save costs a training that computes about a second a step.

A model is really trained, on all cores but one, which is left for copying as it is left idle next to
an accelerator. Every other step begins with a save, and is held against the steps before and after it:
so what the machine does meanwhile is in both. What the copy takes from the step that it runs beside is
in it, and what the optimizer has to wait for it.

Torch's own checkpoints need several steps for a save, so a block of theirs has one `async_save`; what
the block takes longer than as many steps without is that save's cost.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from checkpoints import states
from checkpoints.contestants import SaveFailedError, Torch
from checkpoints.lines import Line, Seconds, milliseconds
from checkpoints.setting import Setting
from checkpoints.timing import took, wait_for_shared_memory
from holdfast import Checkpointer
from holdfast.checkpoint.tickets import Ticket

WIDTH = 2048
STEP_S: Seconds = 1.0
STEPS = 6
"""With a save, in a turn; and of a block of torch's."""
ROWS = 64
MOST_BATCHES = 64


class Training:
    """A plain multilayer perceptron; how many batches make a step decides how long it is."""

    def __init__(self, size: int) -> None:
        layers = max(1, round(size / (1 + states.MOMENTS) / (4 * WIDTH * WIDTH)))
        blocks = [
            part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())
        ]
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._batches = 1
        self._inputs = torch.ones(ROWS, WIDTH)

    def step(self) -> None:
        for _ in range(self._batches):
            torch.autograd.backward(self.model(self._inputs).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def make_steps_last(self, seconds: Seconds) -> None:
        """Choose how many batches."""
        self.step()
        one = min(took(self.step) for _ in range(2))
        self._batches = 2
        of_a_batch = max(min(took(self.step) for _ in range(2)) - one, one / 10)
        self._batches = min(MOST_BATCHES, max(1, 1 + round((seconds - one) / of_a_batch)))


def measure(told: dict[str, Any]) -> list[dict[str, Any]]:
    setting = Setting(**told)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    training = Training(setting.size)
    state = {"model": training.model, "optim": training.optimizer}
    saving = _Saving(Checkpointer(None, state, overlap=True))
    training.make_steps_last(STEP_S)
    size = states.bytes_of(training.model, training.optimizer)
    wait_for_shared_memory(2 * size)
    samples = _alternate(setting, training, saving, Torch(state, setting.on_disk))
    step_s, ours, call = (median(samples[name]) for name in ("none", "save costs", "call"))
    theirs = STEPS * (sum(samples["async_save"]) - sum(samples["none"])) / len(samples["none"])
    line = Line(
        f"overlapped save of {size / 1e9:.2g} GB, of the step",
        100 * ours / step_s,
        "%",
        at_most=2.0,
        torchs=100 * theirs / step_s,
        seen=f"step {milliseconds(step_s)}, a save costs {milliseconds(ours)}, of which in the call"
        f" {milliseconds(call)}; {saving.refused} saves were refused; one async_save costs"
        f" {milliseconds(theirs)} in all",
        samples=samples,
    )
    return [asdict(line)]


def _alternate(
    setting: Setting, training: Training, saving: _Saving, dcp: Torch
) -> dict[str, list[Seconds]]:
    samples: dict[str, list[Seconds]] = {"none": [], "save costs": [], "call": [], "async_save": []}
    for turn in range(1 + max(2, setting.tries // 2)):
        steps = _block(training, 2 * STEPS + 1, lambda n: saving.save(n) if n % 2 else None)
        calls = saving.settle()
        found = {
            "none": steps[::2],
            "save costs": [steps[n] - (steps[n - 1] + steps[n + 1]) / 2 for n in calls],
            "call": list(calls.values()),
            "async_save": _block_of_torchs(training, dcp),
        }
        for name, times in found.items() if turn else ():
            samples[name] += times
    if not samples["call"]:
        raise SaveFailedError("no save was made")
    return samples


class _Saving:
    def __init__(self, checkpointer: Checkpointer) -> None:
        self.refused = 0
        self._checkpointer = checkpointer
        self._steps = 0
        self._begun: dict[int, tuple[Ticket, Seconds]] = {}

    def save(self, number: int) -> None:
        self._steps += 1
        began = perf_counter()
        ticket = self._checkpointer.save(self._steps, to="memory")
        self._begun[number] = ticket, perf_counter() - began

    def settle(self) -> dict[int, Seconds]:
        """Wait for all; what the calls took, of those whose copy was made. A save that is refused,
        as both images are still being read, costs nothing and must not count."""
        begun, self._begun = self._begun, {}
        made = {n: call for n, (ticket, call) in begun.items() if _copied(ticket)}
        self.refused += len(begun) - len(made)
        return made


def _copied(ticket: Ticket) -> bool:
    """Also when a newer one took its place before the keeper came to it."""
    return ticket.memory().outcome in ("saved", "skipped")


def _block(training: Training, count: int, before: Callable[[int], object]) -> list[Seconds]:
    """So many steps, each with what comes before it."""
    times = []
    for number in range(count):
        began = perf_counter()
        before(number)
        training.step()
        times.append(perf_counter() - began)
    return times


def _block_of_torchs(training: Training, dcp: Torch) -> list[Seconds]:
    pending: list[Any] = []
    times = _block(training, STEPS, lambda step: pending.append(dcp.begin()) if step == 0 else None)
    for one in pending:
        one.result()
    dcp.remove()
    return times
