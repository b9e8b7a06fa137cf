"""Steps are counted in scripts that never heard of us.

Each case runs in a process of its own: torch's hooks are global, and whether torch is imported before
or after is part of the matter.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from holdfast.shm.rank_page import PageState, RankPage, create_page

BEFORE = """
import os, sys
from holdfast.shm.rank_page import RankPage
from holdfast.worker import runtime
from holdfast.worker.torch_hooks import patches
from holdfast.worker.channel import Channel
from holdfast.worker.runtime import Runtime
worker = Runtime(Channel(int(sys.argv[1])), RankPage(int(sys.argv[2])))
runtime.install(worker)
"""
MODEL = """
import torch
def model(): return torch.nn.Linear(2, 2)
def train(m, *optimizers, steps=1):
    for _ in range(steps):
        for o in optimizers:
            o.zero_grad()
            m(torch.ones(1, 2)).sum().backward()
            o.step()
m = model()
"""

UNSEEN = """
import torch.optim.optimizer as module
from importlib.machinery import SourceFileLoader
assert isinstance(module.__loader__, SourceFileLoader), module.__loader__
assert isinstance(module.__spec__.loader, SourceFileLoader)
assert not any("holdfast" in type(finder).__module__ for finder in sys.meta_path)
"""
"""What a curious script can check: the import hook has left no trace."""


def counted(script: str, *, torch_first: bool = False) -> tuple[PageState, int]:
    """What the page says after the script, and how often the agent was told of a first step."""
    page_fd = create_page()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    count = "patches.count_steps(worker)\n"
    code = BEFORE + ("import torch\n" + count if torch_first else count) + script
    subprocess.run(
        [sys.executable, "-c", code, str(far.fileno()), str(page_fd)],
        pass_fds=[far.fileno(), page_fd],
        timeout=200,
        check=True,
    )
    far.close()
    told = 0
    while near.recv(1 << 16):
        told += 1
    near.close()
    page = RankPage(page_fd)
    state = page.read()
    page.close()
    os.close(page_fd)
    return state, told


@pytest.mark.parametrize("torch_first", [False, True], ids=["imported later", "imported before"])
def test_steps_of_the_first_optimizer_are_counted(torch_first: bool) -> None:
    script = MODEL + "train(m, torch.optim.SGD(m.parameters()), steps=7)" + UNSEEN
    state, told = counted(script, torch_first=torch_first)
    assert (state.step, state.steps, told) == (7, 7, 1)
    assert 0 < state.first_at <= state.last_at


# One process for several cases: importing torch is what costs here.
def test_each_kind_of_script_is_counted_right() -> None:
    script = (
        MODEL
        + """
def fresh():
    worker._steps = worker._step = 0
    worker._own_count = False
    counter._counted = None

# The counter whose hooks count_steps registered, so that each case starts afresh.
from torch.optim import optimizer as o
(hook,) = o._global_optimizer_post_hooks.values()
counter = hook.__self__

def state(): return worker._step, worker._steps

# A GAN: two optimizers by turns.
one, two = torch.optim.SGD(m.parameters()), torch.optim.SGD(m.parameters())
train(m, one, two, steps=5)
assert state() == (5, 5), state()
del one, two

# The optimizer is made anew in the middle (a schedule that swaps it).
fresh()
sgd = torch.optim.SGD(m.parameters())
train(m, sgd, steps=3)
del sgd
sgd = torch.optim.SGD(m.parameters())
train(m, sgd, steps=4)
assert state() == (7, 7), state()
del sgd

# Adam resumed from a checkpoint knows its steps.
fresh()
adam = torch.optim.Adam(m.parameters())
train(m, adam, steps=10)
saved = adam.state_dict()
del adam
fresh()
adam = torch.optim.Adam(m.parameters())
adam.load_state_dict(saved)
train(m, adam, steps=3)
assert state() == (13, 3), state()
del adam

# SGD does not: it counts from 1.
fresh()
sgd = torch.optim.SGD(m.parameters(), momentum=0.9)
train(m, sgd, steps=2)
assert state() == (2, 2), state()
del sgd

# An optimizer of the user's own that keeps anything under the name of step, and whose step calls
# another's that torch has wrapped too: that is one step.
class Odd(torch.optim.SGD):
    def step(self, closure=None):
        for p in m.parameters():
            self.state[p]["step"] = "three"
        super().step(closure)
fresh()
odd = Odd(m.parameters())
train(m, odd, steps=2)
assert state() == (2, 2), state()
del odd

# A step that fails is none; what comes after it counts, of the same optimizer and of the next.
def fail(): raise ValueError
fresh()
odd = Odd(m.parameters())
for _ in range(2):
    train(m, odd)
    try:
        odd.step(fail)
    except ValueError:
        pass
assert state() == (2, 2), state()
del odd
sgd = torch.optim.SGD(m.parameters())
train(m, sgd, steps=2)
assert state() == (4, 4), state()
del sgd

# The script's own count wins from its first call on.
import holdfast
fresh()
sgd = torch.optim.SGD(m.parameters())
train(m, sgd, steps=2)
holdfast.progress(100)
train(m, sgd, steps=2)
assert state() == (100, 2), state()
"""
    )
    counted(script)


@pytest.mark.parametrize("kind", ["torch.optim.Adam", "Nested"])
def test_compiled_steps_are_counted_and_nothing_of_ours_is_compiled(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = (
        MODEL
        + f"""
class Nested(torch.optim.Adam):
    def step(self, closure=None): super().step(closure)
optimizer = {kind}(m.parameters())
optimizer.step = torch.compile(optimizer.step, backend="eager")
train(m, optimizer, steps=4)
"""
    )
    state, _ = counted(script)
    assert (state.step, state.steps) == (4, 4)
    said = capfd.readouterr().err
    assert not [word for word in ("holdfast", "_getframe", "Error") if word in said], said


def test_a_script_without_torch_never_knows() -> None:
    script = """
import json, sys
assert not any(name.startswith("torch") for name in sys.modules)
"""
    state, told = counted(script)
    assert (state.steps, told) == (0, 0)


def test_sections_are_booked_beside_the_steps() -> None:
    script = """
import holdfast, time
with holdfast.section("checkpoint"):
    time.sleep(0.02)
with holdfast.section("anything else"):
    pass
holdfast.progress(5)
"""
    state, told = counted(script)
    assert state.checkpoint_s >= 0.02
    assert (state.step, state.steps, told) == (5, 1, 1)
