"""A script tells its loss, and the page says which step it is of; the GPU here is a made-up one."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import holdfast
from holdfast.shm.rank_page import RankPage, create_page
from holdfast.worker import runtime
from holdfast.worker.channel import Channel
from holdfast.worker.runtime import Runtime
from holdfast.worker.told_losses import EVERY_S
from holdfast.worker.torch_hooks.framework_losses import hear_losses, loss_in


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPage]:
    """The page of a worker that this process is for the test."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = create_page()
    page = RankPage(fd)
    worker = Runtime(Channel(far.detach()), page)
    monkeypatch.setattr(runtime._Slot, "runtime", worker)
    yield page
    worker.channel.close()
    near.close()
    page.close()
    os.close(fd)


def worker() -> Runtime:
    found = runtime.current()
    assert found is not None
    return found


def told(page: RankPage) -> tuple[float, int] | None:
    """The loss on the page and its step; None if none was told."""
    state = page.read()
    if state.loss_steps == 0:
        return None
    return state.loss, state.step - (state.steps - state.loss_steps)


# ---- what a loss may be ----


@pytest.mark.parametrize(
    "loss",
    [
        0.5,
        Decimal("0.5"),
        numpy.float32(0.5),
        numpy.array([0.5]),
        torch.tensor(0.5),
        torch.tensor([[0.5]], dtype=torch.bfloat16),
        torch.nn.Parameter(torch.tensor(0.5)),
    ],
    ids=["float", "Decimal", "numpy", "array", "tensor", "bfloat16", "with a gradient"],
)
def test_whatever_is_one_number_is_a_loss(page: RankPage, loss: Any) -> None:
    holdfast.progress(7, loss)
    assert told(page) == (0.5, 7)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_a_loss_that_is_not_finite_is_kept_as_it_is(page: RankPage, loss: Any) -> None:
    holdfast.progress(1, loss)
    assert numpy.array_equal(page.read().loss, float(loss), equal_nan=True)
    assert page.read().loss_steps == 1


@pytest.mark.parametrize(
    "loss",
    [
        *(True, "0.5", b"1", [0.5], {}, object(), 1j, 10**400),
        *(torch.ones(2), torch.ones(0), torch.tensor(1j), numpy.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("active", [True, False], ids=["worker", "outside"])
def test_anything_else_is_a_type_error_and_no_step(
    page: RankPage, loss: Any, active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not active:
        monkeypatch.setattr(runtime._Slot, "runtime", None)
    with pytest.raises(TypeError, match=r"holdfast\.progress: loss must be one real number"):
        holdfast.progress(1, loss)
    assert page.read().steps == 0


def test_a_call_that_says_nothing_is_a_type_error(page: RankPage) -> None:
    with pytest.raises(TypeError, match="a step, a loss, or both"):
        holdfast.progress()


# ---- which step it is of ----


def test_a_loss_stays_that_of_its_step_until_the_next_one_is_told(page: RankPage) -> None:
    holdfast.progress(10, 2.0)
    holdfast.progress(11)
    holdfast.progress(12)
    assert told(page) == (2.0, 10)
    holdfast.progress(13, 1.5)
    assert told(page) == (1.5, 13)


def test_a_loss_without_a_step_leaves_the_count_to_the_optimizers_hook(page: RankPage) -> None:
    for _ in range(3):
        worker().hook_stepped(0)
    holdfast.progress(loss=0.25)
    assert told(page) == (0.25, 3)
    worker().hook_stepped(0)
    assert (page.read().step, told(page)) == (4, (0.25, 3))


def test_a_loss_before_the_first_step_is_of_no_step(page: RankPage) -> None:
    holdfast.progress(loss=0.25)
    worker().hook_stepped(0)
    assert told(page) is None


def test_a_script_that_goes_back_takes_its_loss_back(page: RankPage) -> None:
    holdfast.progress(100, 0.1)
    holdfast.progress(51)
    assert told(page) is None
    holdfast.progress(52, 0.2)
    assert told(page) == (0.2, 52)


def test_another_round_begins_without_a_loss(page: RankPage) -> None:
    holdfast.progress(100, 0.1)
    worker().renew(2)
    holdfast.progress(51)
    assert told(page) is None


# ---- on a GPU ----


class Gpu:
    """A queue of copies that arrive when the test says so; it stands for torch.cuda."""

    def __init__(self) -> None:
        self.copies: list[Copied] = []
        self.capturing = self.broken = False

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self, device: object) -> str:
        return "default"

    def Event(self) -> Arrival:
        return Arrival(self)

    def loss(self, value: float) -> Any:
        return OnGpu(self, value)


class Copied:
    """Pinned memory that a copy was queued to."""

    def __init__(self, value: float) -> None:
        self._value = value
        self.arrived = False

    def __float__(self) -> float:
        assert self.arrived, "it was read before it was there"
        return self._value


class Arrival:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def record(self, stream: str) -> None:
        assert not self._gpu.capturing
        self._copy = self._gpu.copies[-1]

    def query(self) -> bool:
        assert not self._gpu.capturing
        if self._gpu.broken:
            raise RuntimeError("an illegal memory access was encountered")
        return self._copy.arrived


class OnGpu:
    device = SimpleNamespace(type="cuda")

    def __init__(self, gpu: Gpu, value: float) -> None:
        self._gpu, self._value = gpu, value

    def numel(self) -> int:
        return 1

    def is_complex(self) -> bool:
        return False

    def detach(self) -> OnGpu:
        return self

    def to(self, where: str, *, non_blocking: bool) -> Copied:
        assert (where, non_blocking) == ("cpu", True)
        self._gpu.copies.append(Copied(float(self._value)))
        return self._gpu.copies[-1]

    def item(self) -> float:
        raise AssertionError("the script waits for its GPU")

    __float__ = item


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=gpu))
    monkeypatch.setattr("holdfast.worker.runtime.uses_device", lambda: True)
    return gpu


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def test_a_loss_on_a_gpu_is_known_once_it_has_arrived(page: RankPage, gpu: Gpu) -> None:
    holdfast.progress(1, gpu.loss(0.5))
    holdfast.progress(2)
    assert told(page) is None
    gpu.copies[0].arrived = True
    holdfast.progress(3)
    assert told(page) == (0.5, 1)


def test_losses_on_a_gpu_are_fetched_each_second_and_one_at_a_time(
    page: RankPage, gpu: Gpu, later: Callable[[float], None]
) -> None:
    for step in range(1, 51):
        holdfast.progress(step, gpu.loss(step))
        later(EVERY_S / 10)
    assert len(gpu.copies) == 1, "the GPU is behind"
    gpu.copies[0].arrived = True
    holdfast.progress(51, gpu.loss(51))
    assert (told(page), len(gpu.copies)) == ((1.0, 1), 2)
    gpu.copies[1].arrived = True
    for step in range(52, 60):
        holdfast.progress(step, gpu.loss(step))
    assert (told(page), len(gpu.copies)) == ((51.0, 51), 2)


def test_nothing_is_fetched_while_a_graph_is_captured(page: RankPage, gpu: Gpu) -> None:
    gpu.capturing = True
    holdfast.progress(1, gpu.loss(0.5))
    assert gpu.copies == []


def test_what_arrives_while_a_graph_is_captured_is_read_after_it(page: RankPage, gpu: Gpu) -> None:
    holdfast.progress(1, gpu.loss(0.5))
    gpu.copies[0].arrived = gpu.capturing = True
    holdfast.progress(2)
    assert told(page) is None
    gpu.capturing = False
    holdfast.progress(3)
    assert told(page) == (0.5, 1)


def test_a_gpu_that_fails_is_the_scripts_to_report(page: RankPage, gpu: Gpu) -> None:
    holdfast.progress(1, gpu.loss(0.5))
    gpu.broken = True
    holdfast.progress(2)
    holdfast.progress(3)
    assert (page.read().step, told(page)) == (3, None)


# ---- what frameworks log ----


@pytest.mark.parametrize(
    ("logged", "loss"),
    [
        ({"lr": 0.1, "loss": 0.5, "train_loss": 0.7}, 0.5),
        ({"epoch": 3, "train/loss": torch.tensor(0.5)}, 0.5),
        ({"val_loss": 0.4, "eval_loss": 0.3, "test/loss": 0.2}, None),
        ({"loss": "0.5000"}, None),
        ({"loss": None, "train_loss": 0.5}, 0.5),
    ],
)
def test_the_loss_of_the_training_is_found_by_its_name(
    logged: dict[str, Any], loss: float | None
) -> None:
    assert loss_in(logged) == loss


ACCELERATE = """
import os, socket
from accelerate import Accelerator
from holdfast.shm.rank_page import RankPage, create_page
from holdfast.worker import runtime
from holdfast.worker.channel import Channel
from holdfast.worker.runtime import Runtime
from holdfast.worker.torch_hooks import patches
from holdfast.worker.torch_hooks.framework_losses import hear_losses
near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
page = RankPage(create_page())
worker = Runtime(Channel(far.detach()), page)
runtime.install(worker)
patches.count_steps(worker)
hear_losses(worker)
import torch
model = torch.nn.Linear(1, 1)
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
def train(log):
    optimizer.zero_grad()
    loss = model(torch.ones(1, 1)).square().sum()
    accelerator.backward(loss)
    optimizer.step()
    log(loss)
    return loss.item()
"""


def test_what_accelerate_logs_is_the_loss_unless_the_script_tells_it(
    with_torch: Callable[..., str],
) -> None:
    with_torch(
        ACCELERATE,
        """
        import holdfast
        for _ in range(3):
            loss = train(lambda loss: accelerator.log({"train_loss": loss}, step=1))
        state = page.read()
        assert (state.step, state.loss, state.loss_steps) == (3, loss, 3), state
        train(lambda loss: holdfast.progress(loss=9.0))
        train(lambda loss: accelerator.log({"train_loss": loss}, step=1))
        state = page.read()
        assert (state.step, state.loss, state.loss_steps) == (5, 9.0, 4), state
        """,
    )


def test_a_framework_without_what_is_wrapped_is_left_alone(
    page: RankPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers.trainer_callback", "accelerate.accelerator"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hear_losses(worker())
