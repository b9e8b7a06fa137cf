"""Fixtures that run scripts in processes that have imported torch already: `with_torch` with its
compiler, `with_plain_torch` without.

Torch's hooks are global, so each script needs a process of its own; importing torch takes seconds, so
they are forked from one that did.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

COMPILER = """
import torch, torch.distributed.checkpoint, torch._dynamo, torch.utils.checkpoint
torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.zeros(2))
weight.grad = torch.zeros(2)
for kind in (torch.optim.SGD, torch.optim.Adam):
    kind([weight], lr=0.0).step()  # It imports as much again as torch itself.
"""
STAGE = """
import os, sys, traceback
import torch, torch.distributed, torch.nn.parallel, torch.utils.data
for line in sys.stdin:
    script, said = line.rstrip("\\n").split("\\t")
    pid = os.fork()
    if pid == 0:
        os.chdir(os.path.dirname(script))
        with open(said, "w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        try:
            exec(compile(open(script).read(), script, "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


Stage = subprocess.Popen[str]


@contextlib.contextmanager
def staged(text: str) -> Iterator[Stage]:
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    with staged(COMPILER + STAGE) as process:
        yield process


@pytest.fixture(scope="session")
def plain_stage() -> Iterator[Stage]:
    with staged(STAGE) as process:
        yield process


@pytest.fixture
def with_torch(stage: Stage, tmp_path: Path) -> Callable[..., str]:
    """Run these parts of a script, one after the other; what it said."""
    return lambda *parts: run(stage, tmp_path, *parts)


@pytest.fixture
def with_plain_torch(plain_stage: Stage, tmp_path: Path) -> Callable[..., str]:
    """The same, before the compiler was imported."""
    return lambda *parts: run(plain_stage, tmp_path, *parts)


def run(stage: Stage, folder: Path, *parts: str) -> str:
    script, said = folder / "script.py", folder / "said"
    script.write_text("\n".join(textwrap.dedent(part) for part in parts))
    assert stage.stdin is not None
    assert stage.stdout is not None
    print(script, said, sep="\t", file=stage.stdin, flush=True)
    code = stage.stdout.readline().strip()
    assert code == "0", f"ended with {code}:\n{said.read_text()}"
    return said.read_text()
