"""A standby takes the GPU that it is told to, and leaves it rather than harm the ranks."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import msgspec
import pytest

from holdfast.messages.local import GAVE_DEVICE_UP, Assign, Standing, TakeDevice
from holdfast.worker import device_rehearsal, standing
from holdfast.worker.channel import Channel

ORDER = TakeDevice(index=0, variables={}, nccl=False, leave_bytes=100)
LIMIT_S = 60.0


class Standby:
    """A forked process that waits for an order, with the agent's end of its socket."""

    def __init__(self) -> None:
        self.agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.agent.settimeout(LIMIT_S)
        self.pid = os.fork()
        if self.pid == 0:
            self.agent.close()
            order, _ = standing.await_order(Channel(theirs.detach()))
            os._exit(order.local_rank if isinstance(order, Assign) else 99)
        theirs.close()

    def order(self, message: TakeDevice | Assign) -> None:
        self.agent.send(msgspec.msgpack.encode(message))

    def said(self) -> Standing:
        return msgspec.msgpack.decode(self.agent.recv(65536), type=Standing)

    def code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Standby]]:
    started: list[Standby] = []

    def one() -> Standby:
        started.append(Standby())
        return started[-1]

    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    yield one
    for standby in started:
        standby.agent.close()
        try:
            os.kill(standby.pid, signal.SIGKILL)
            os.waitpid(standby.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def test_a_standby_that_has_its_gpu_says_what_it_holds_and_gets_a_rank(
    start: Callable[[], Standby], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rehearsal, "take", lambda torch, order: 700)
    standby = start()
    standby.order(ORDER)
    assert standby.said() == Standing(device_bytes=700)
    standby.order(Assign(env={}, entry="script", agent_pid=os.getpid(), local_rank=3))
    assert standby.code() == 3


def test_a_standby_whose_gpu_fails_exits(start: Callable[[], Standby]) -> None:
    standby = start()
    standby.order(ORDER)  # The module that stands for torch has no CUDA.
    assert standby.code() == GAVE_DEVICE_UP


@pytest.mark.parametrize(("free", "stays"), [(99, False), (100, True)])
def test_a_standby_leaves_its_gpu_when_memory_runs_low(
    start: Callable[[], Standby], monkeypatch: pytest.MonkeyPatch, free: int, stays: bool
) -> None:
    monkeypatch.setattr(device_rehearsal, "take", lambda torch, order: 700)
    monkeypatch.setattr(device_rehearsal, "free_bytes", lambda torch, index: free)
    monkeypatch.setattr(standing, "LOOK_EVERY_S", 0.01)
    standby = start()
    standby.order(ORDER)
    standby.said()
    if stays:
        standby.order(Assign(env={}, entry="script", agent_pid=os.getpid(), local_rank=3))
    assert standby.code() == (3 if stays else GAVE_DEVICE_UP)


def test_a_standby_ends_with_its_agent(start: Callable[[], Standby]) -> None:
    standby = start()
    standby.agent.close()
    assert standby.code() == 0
