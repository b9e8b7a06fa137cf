"""What the scripts of `detection/patterns` train with: one step of a small model, parallelised in one
of three kinds, and the everyday work that ranks do between steps.

It knows no launcher. For the bench it notes each finished step, and the moment at which the script does
what its pattern is about: once in a job, however often the script is started.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from ddp import FEATURES, StepMarks
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

MIB = 1 << 20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("plain", "ddp", "fsdp2"), default="ddp")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--event", type=int, default=40, help="step after which it happens")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--guilty", type=int, default=0, help="rank that does it, where one does")
    return parser.parse_known_args()[0]


class Net(nn.Module):
    """Takes its time, and as long again for the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.own_s = 0.0
        self.inner = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.own_s / 2)
        outputs: torch.Tensor = self.inner(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: time.sleep(self.own_s / 2))
        return outputs


class Training:
    """One rank's training. `begin` joins the process group; what a script does before is its own."""

    def __init__(self) -> None:
        args = _arguments()
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.kind, self.step_s = args.kind, args.step_ms / 1000
        self.event, self.last, self.guilty = args.event, args.steps, args.guilty
        self._signs = Path(os.environ["BENCH_SIGNS"])
        self._marks = StepMarks(Path(os.environ["BENCH_MARKS"]), self.rank)
        self.net = Net()
        """Not parallelised: what a rank may use alone."""
        self.batch = torch.ones(16, FEATURES)
        torch.set_num_threads(1)

    def begin(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        net = Net()
        self.model: nn.Module = net
        if self.kind == "ddp":
            self.model = DistributedDataParallel(net)
        elif self.kind == "fsdp2":
            fully_shard(net)
        self._timed = net
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)

    def steps(self) -> Iterator[int]:
        """1, 2, 3 ...; a step is finished when the next one is asked for."""
        for step in range(1, self.last + 1):
            yield step
            self._marks.finished(step)

    def now(self, step: int) -> bool:
        """Whether this is the step after which it happens; noted, and never true again."""
        return step == self.event and self.note()

    def note(self) -> bool:
        """Note that it happens now; False if it has happened before."""
        sign = self._signs / f"began.{self.rank}"
        if sign.exists():
            return False
        partial = self._signs / f"partial.{self.rank}"
        partial.write_text(str(time.monotonic()))
        partial.rename(sign)
        return True

    def train(self, batch: torch.Tensor | None = None, seconds: float | None = None) -> None:
        self.optimizer.zero_grad()
        self.gradients(batch, seconds)
        self.optimizer.step()

    def gradients(self, batch: torch.Tensor | None = None, seconds: float | None = None) -> None:
        """Forward and backward pass, and the mean of all ranks' gradients."""
        self.gradients_alone(batch, seconds)
        if self.kind == "plain":
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)

    def gradients_alone(
        self, batch: torch.Tensor | None = None, seconds: float | None = None
    ) -> None:
        self._timed.own_s = self.step_s if seconds is None else seconds
        self.model(self.batch if batch is None else batch).square().mean().backward()

    def no_sync(self) -> AbstractContextManager[object]:
        """Gradients pile up here, and other ranks are not asked."""
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def sync_gradients(self, really: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(really)

    def end(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


class Items(Dataset[torch.Tensor]):
    """As many items; one of them takes longer."""

    def __init__(self, size: int, slow: int = -1, seconds: float = 0.0) -> None:
        self.size, self.slow, self.seconds = size, slow, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.slow:
            time.sleep(self.seconds)
        return torch.ones(FEATURES)


def burn(seconds: float) -> int:
    """Plain Python that never rests."""
    until, found = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        found += _score(5_000)
    return found


def _score(count: int) -> int:
    return sum(number % 7 for number in range(count))


def forward_only(net: nn.Module, seconds: float) -> None:
    """Evaluate a model with batches from a loader."""
    net.eval()
    until = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < until:
            for batch in DataLoader(Items(256), batch_size=64):
                net(batch)
    net.train()


def multiply(seconds: float) -> None:
    """Large products: long calls into native code, which let go of the GIL."""
    until, matrix = time.monotonic() + seconds, torch.randn(1500, 1500)
    while time.monotonic() < until:
        matrix = (matrix @ matrix).clamp(-1, 1)


def burn_with_gil(seconds: float) -> None:
    """One call into C that computes and keeps the GIL all the time."""
    began, probe = time.monotonic(), 20_000_000
    sum(itertools.repeat(1, probe))
    rate = probe / (time.monotonic() - began)
    sum(itertools.repeat(1, int(rate * seconds)))


def send(seconds: float, rate: int = MIB) -> None:
    """Upload as many bytes as a slow receiver takes in that time, and wait for its receipt."""
    host, port = os.environ["BENCH_BESIDE"].split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        connection.sendall(bytes(int(seconds * rate)))
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(2) != b"ok":
            raise ConnectionError("the upload was not accepted")


def download() -> int:
    """Fetch a file from a slow server; its size."""
    with urllib.request.urlopen(f"http://{os.environ['BENCH_BESIDE']}/data") as answer:
        return sum(len(piece) for piece in iter(lambda: answer.read(1 << 16), b""))


def write_slowly(path: str, seconds: float) -> None:
    """A file that takes its time: 100 pieces, and a last line that says it is whole."""
    with open(path, "w") as file:
        for piece in range(100):
            time.sleep(seconds / 100)
            file.write(f"{piece}\n")
            file.flush()
        file.write("whole\n")
