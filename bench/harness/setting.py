"""What all modes of a bench share: who takes part, under which limits, and where jobs live."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from harness.job import SCRIPT, Job
from harness.launchers import Launcher
from harness.marks import Seconds


def say(line: str) -> None:
    """Progress, for a person who waits; results go elsewhere."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Setting:
    launchers: list[Launcher]
    ranks: int
    tries: int
    limit: Seconds
    """How long anything may take before it counts as hung."""
    settle: Seconds
    """How long all ranks train undisturbed before a kill."""
    script: list[str]
    folder: Path
    keep_logs: bool
    program: Path = SCRIPT
    """The script that is run."""
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def interleaved(self) -> Iterator[tuple[int, Launcher]]:
        """A B C A B C ...: what else the machine does meanwhile hits all launchers alike."""
        for turn in range(self.tries):
            for launcher in self.launchers:
                yield turn, launcher

    @contextmanager
    def job(
        self, launcher: Launcher, more: Callable[[Path], Sequence[str]] = lambda _: ()
    ) -> Iterator[Job]:
        """A started job, ended and cleaned up on the way out. `more` are further arguments for the
        script, given the job's folder."""
        name = f"{launcher.name}-{next(self._numbers)}"
        folder = self.folder / name
        job = Job(name, launcher, self.ranks, folder, [*self.script, *more(folder)], self.program)
        try:
            with job:
                yield job
        finally:
            if not self.keep_logs:
                job.discard()


def checkpoint_every(steps: int) -> Callable[[Path], Sequence[str]]:
    """Arguments that make the script save its own checkpoint, and resume from it."""
    return lambda folder: [
        f"--checkpoint={folder / 'checkpoint.pt'}",
        f"--checkpoint-every={steps}",
    ]
