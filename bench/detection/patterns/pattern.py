"""A pattern is a row: something that training scripts do, and what Holdfast is to make of it.

Its body is the part of a script that matters. Bodies of most rows are what happens between two steps,
once, when all ranks are warm: `between` puts the usual loop around them. A row whose body is a whole
script (`whole_script`) has the same names at hand. `script` makes the file that is run, which a person
can read and start with any launcher: `detect.py --show NAME`.

Of a body: `rank`, `world` and `guilty` are what they say, `run` is a `Training` of
`scripts/training.py`. A line that ends in `# here` is where the guilty rank is to be found.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

from harness.marks import Seconds

Group = Literal["healthy", "proven", "silent"]
"""What is to happen: nothing; a repair at once; a repair when nothing has moved for long enough."""

Beside = Literal["", "sink", "source", "fifo reader", "late word", "suspend", "debugger", "busy"]
"""What the bench does beside the job: see `detection/beside.py`."""

Guilty = Literal["one", "circle", "all"]
"""Who is to be named: one rank; none, but where it and the next one wait for each other; or any rank
and the place where all are."""

KINDS = ("plain", "ddp", "fsdp2")
STEPS_MS = (20, 200, 2000)
HERE = "# here"

_HEAD = """\
import atexit, ctypes, fcntl, gc, os, queue, random, signal, socket, subprocess, sys, threading, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from training import *

run = Training()
rank, world, guilty = run.rank, run.world, run.guilty
"""

_LOOP = """\
run.begin()
for step in run.steps():
    run.train()
    if run.now(step):
{body}
run.end()
"""


@dataclass(frozen=True)
class Pattern:
    name: str
    group: Group
    story: str
    body: str
    lasts_s: Seconds = 0.0
    """How long it lasts, where it ends by itself."""
    ranks: int = 2
    beside: Beside = ""
    whole: tuple[str, ...] = ()
    """Files that must be whole in the end."""
    alone: bool = False
    """Takes the whole machine; nothing else may run beside it."""
    guilty: Guilty = "one"
    within_s: Seconds = 2.0
    """How soon what is proven must be acted on."""
    kinds: tuple[str, ...] = KINDS

    @property
    def script(self) -> str:
        return f'"""{self.story}"""\n\n{_HEAD}\n{self.body}'

    @property
    def places(self) -> list[str]:
        """Where the guilty rank is to be found, as sentences say it; empty if that is left open."""
        marked = [
            (number, line)
            for number, line in enumerate(self.script.splitlines(), 1)
            if line.endswith(HERE)
        ]
        # Within a call of the kit it is the kit's line that is told.
        kit = ["training.py:"] if any("run." in line for _, line in marked) else []
        return [f"train.py:{number}" for number, _ in marked] + kit


def between(body: str) -> str:
    """A script that does this between two steps, once."""
    return _LOOP.format(body=textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8))


def whole_script(body: str) -> str:
    return textwrap.dedent(body).strip("\n") + "\n"


def healthy(name: str, story: str, body: str, lasts_s: Seconds, **more: object) -> Pattern:
    return Pattern(name, "healthy", story, body, lasts_s, **more)  # type: ignore[arg-type]
